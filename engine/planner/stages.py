"""Which layers each pipeline stage holds: one rule for the engine and for its predictions. Pure arithmetic.

balanced_stages(12, 2, layer=11.3, first=32.8, last=32.8)      # [range(0, 6), range(6, 12)]
"""


def balanced_stages(layers: int, stages: int, layer: float, first: float, last: float) -> list[range]:
    """Consecutive layers for each stage, at least one each; there must not be more stages than layers.

    A layer weighs `layer`; `first` and `last` are what the first and the last stage bear besides, in the same unit. The
    heaviest stage is made as light as it can be, and among equals the stages as even as they can be.
    """
    assert 1 <= stages <= layers
    # Layers are alike, so only their numbers matter.
    counts, extra = [1] * stages, [0.0] * stages
    if stages > 1:
        extra[0], extra[-1] = first, last
    for _ in range(layers - stages):
        loads = [extra[stage] + counts[stage] * layer for stage in range(stages)]
        counts[loads.index(min(loads))] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
