"""Assign layers to pipeline stages, for the engine and its predictions. Pure arithmetic.

balanced_stages(12, 2, layer=11.3, first=32.8, last=32.8)      # [range(0, 6), range(6, 12)]
"""


def balanced_stages(layers: int, stages: int, layer: float, first: float, last: float) -> list[range]:
    """Return consecutive layers for each stage, at least one each; there must not be more stages than layers.

    `layer` is the cost of a layer; `first` and `last` are additional costs of the first and the last stage, in the same
    unit. The maximum stage cost is minimised, and among equals the stages are as even as possible.
    """
    assert 1 <= stages <= layers
    # Layers are equal, so only their numbers matter.
    counts, extra = [1] * stages, [0.0] * stages
    if stages > 1:
        extra[0], extra[-1] = first, last
    for _ in range(layers - stages):
        loads = [extra[stage] + counts[stage] * layer for stage in range(stages)]
        counts[loads.index(min(loads))] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
