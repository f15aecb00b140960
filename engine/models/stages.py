"""Assign a model's layers to pipeline stages. Pure arithmetic, no torch.

    stage_layers(config, pp=2)               # [range(0, 6), range(6, 12)]: balances memory
    stage_layers(config, 2, "speed")         # [range(0, 7), range(7, 12)]: balances bytes read by a step
    stage_layers(t5, 2, stack="encoder")     # an encoder-decoder goes through all stages twice

Embedding and head belong to the first and the last stage; a tied head is a copy there. Both take memory, but a step
reads only its tokens' rows of the embedding, and all of the head. In an encoder-decoder each stage holds a slice of
both stacks; the tables count towards the decoder's.
"""

from math import prod

from configs.common.execution import StageBalance
from configs.families.config import ModelConfig
from configs.families.tensors import StackName, layer_stacks, layer_weights
from engine.parallel.grid import Grid
from engine.planner.stages import balanced_stages


def main_stack(config: ModelConfig) -> StackName:
    """Return the stack that produces the output: the only one, or the decoder."""
    return "encoder" if config.kind == "encoder" else "decoder"


def stage_layers(
    config: ModelConfig, pp: int, balance: StageBalance = "memory", stack: StackName | None = None
) -> list[range]:
    """Return the layers of each of `pp` stages, at least one each; `pp` must not exceed the layers.

    stack: None for the main one.
    """
    stack = stack or main_stack(config)
    table = config.vocabulary * config.hidden if stack == main_stack(config) else 0
    first = table if balance == "memory" else 0
    last = 0 if config.kind == "encoder" else table
    layer = sum(prod(weight.shape) for weight in layer_weights(config, stack, 0) if weight.layer is not None)
    return balanced_stages(layer_stacks(config)[stack], pp, layer, first, last)


def own_layers(config: ModelConfig, grid: Grid, stack: StackName | None = None) -> range:
    """Return the layers of a rank's stage in one stack."""
    return stage_layers(config, grid.pp, grid.stage_balance, stack)[grid.pp_rank]
