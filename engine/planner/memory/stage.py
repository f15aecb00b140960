"""The weights of one rank: its pipeline stage and tensor-parallel shard.

stage = stage_of(setup, 0)      # the first stage; the only one without pipeline parallelism stage.elements,
stage.block, stage.touched(8)
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from engine.planner.setup import TrainingSetup


@dataclass(frozen=True)
class StageElements:
    """Elements of weights on one tensor- and pipeline-parallel rank, before data-parallel sharding.

    block: of one block; matrices: its matrices in order of use; root: those outside of the blocks, `tables`
    (embeddings) and `head` among them (0 where the embedding is the head); unembedding: the weight that computes
    logits, tied or not; vectors: elements of all vectors.
    """

    block: float
    layers: int
    root: float
    tables: float
    head: float
    unembedding: float
    vectors: float
    matrices: tuple[float, ...]
    largest: float

    @property
    def elements(self) -> float:
        return self.block * self.layers + self.root

    def touched(self, ranks: int) -> float:
        """Return elements of the weights that one of `ranks` equal partitions touches, each counted whole; the maximum.

        In the order of a flat buffer: tables, block by block, the last norm and the head.
        """
        block = [*self.matrices, max(0.0, self.block - sum(self.matrices))]
        after = self.root - self.tables - self.head
        borders = [0.0, *accumulate([self.tables, *block * self.layers, after, self.head])]
        size, most = self.elements / ranks, 0.0
        for rank in {0, ranks // 2, ranks - 1}:
            first = bisect_right(borders, size * rank + 0.5) - 1
            last = bisect_left(borders, size * (rank + 1) - 0.5)
            most = max(most, borders[min(last, len(borders) - 1)] - borders[first])
        return most


def stage_of(setup: TrainingSetup, index: int) -> StageElements:
    """Return the weights on a rank of a pipeline stage; the first has the embedding, the last the head."""
    architecture, layout = setup.architecture, setup.layout
    layers = -(-architecture.layers // layout.pp)
    sizes: dict[bool, float] = {True: 0.0, False: 0.0}
    vectors = largest = root = tables = head = unembedding = 0.0
    matrices: list[float] = []
    for weight in architecture.weights:
        one = weight.shard(layout.tp)
        sizes[weight.block] += one * weight.copies
        largest = max(largest, one if weight.copies else 0)
        if weight.block and weight.role == "matrix":
            matrices += [one] * max(1, round(weight.copies / max(architecture.layers, 1)))
        if weight.role == "vector":
            vectors += one * weight.copies / (layout.pp if weight.block else 1)
        if not weight.block:
            last = weight.role in ("head", "vector")
            if weight.role == "head":
                head, unembedding = one * weight.copies, one
            # A tied head is copied to the last stage.
            copies = max(1, weight.copies) if layout.pp > 1 and weight.role == "head" else weight.copies
            if index == (layout.pp - 1 if last else 0):
                root += one * copies
                tables += one * copies if weight.role == "embedding" else 0.0
    block = sizes[True] / max(architecture.layers, 1)
    matrices_or_all = tuple(matrices) or (block,)
    return StageElements(block, layers, root, tables, head, unembedding, vectors, matrices_or_all, largest)
