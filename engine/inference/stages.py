"""Which layers each pipeline stage holds. Pure arithmetic, no torch.

    stage_layers(config, pp=2)               # [range(0, 6), range(6, 12)]: by what a stage holds
    stage_layers(config, 2, "speed")         # [range(0, 7), range(7, 12)]: by what a step reads of it

Embedding and head belong to the first and the last stage; a tied head is a copy there. Both take memory, but of the
embedding a step reads only the rows of its tokens, while the head is read whole.
"""

from math import prod

from configs.cell import StageBalance
from engine.models.config import ModelConfig
from engine.parallel.grid import Grid
from engine.planner.stages import balanced_stages


def stage_layers(config: ModelConfig, pp: int, balance: StageBalance = "memory") -> list[range]:
    """The layers of each of `pp` stages, at least one each; `pp` must not exceed the layers."""
    table = config.vocabulary * config.hidden
    first = table if balance == "memory" else 0
    return balanced_stages(config.layers, pp, _layer_elements(config), first, table)


def own_layers(config: ModelConfig, grid: Grid) -> range:
    """The layers of a rank's stage."""
    return stage_layers(config, grid.pp, grid.stage_balance)[grid.pp_rank]


def _layer_elements(config: ModelConfig) -> int:
    prefix = "model.layers.0."
    return sum(prod(shape) for name, shape in config.tensor_shapes().items() if name.startswith(prefix))
