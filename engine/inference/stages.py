"""Which layers each pipeline stage holds, balanced by bytes. Pure arithmetic, no torch.

    stage_layers(config, pp=2)        # [range(0, 6), range(6, 12)]

The embedding counts for the first stage and the head for the last; a tied head is a copy there. The fullest stage is
made as small as it can be, and among equals the stages as even as they can be.
"""

from math import prod

from engine.llama_config import LlamaConfig


def stage_layers(config: LlamaConfig, pp: int) -> list[range]:
    """The layers of each of `pp` stages, at least one each; `pp` must not exceed the layers."""
    assert 1 <= pp <= config.layers
    embedding = config.vocabulary * config.hidden
    layer = _layer_elements(config)
    # Layers are alike, so only their numbers matter: first and last stage take fewer by what their table weighs.
    counts = [1] * pp
    extra = [0] * pp
    if pp > 1:
        extra[0] += embedding
        extra[-1] += embedding
    for _ in range(config.layers - pp):
        loads = [extra[stage] + counts[stage] * layer for stage in range(pp)]
        counts[loads.index(min(loads))] += 1
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _layer_elements(config: LlamaConfig) -> int:
    prefix = "model.layers.0."
    return sum(prod(shape) for name, shape in config.tensor_shapes().items() if name.startswith(prefix))
