"""Rank coordinates along data, pipeline and tensor parallelism. Pure arithmetic.

    grid = Grid.of(cell.layout, rank)
    grid.tensor_ranks            # the ranks that hold the other parts of the same layers

Tensor-parallel neighbours communicate most and have adjacent numbers, so that they share a host; then pipeline stages;
replicas are farthest apart:  rank = (dp_rank * pp + pp_rank) * tp + tp_rank.
"""

from dataclasses import dataclass

from configs.common.execution import Layout, StageBalance


@dataclass(frozen=True)
class Grid:
    """Degrees of parallelism, the assignment of layers to stages, and this rank's number."""

    dp: int
    tp: int
    pp: int
    rank: int
    stage_balance: StageBalance = "memory"

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} is not one of {self.world_size}"

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "Grid":
        """Return the place of a rank in a layout."""
        return cls(layout.dp, layout.tp, layout.pp, rank, layout.stage_balance)

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        """Index of the part of each layer on this rank."""
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        """Index of the pipeline stage."""
        return self.rank // self.tp % self.pp

    @property
    def dp_rank(self) -> int:
        """Index of the replica."""
        return self.rank // (self.tp * self.pp)

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage has the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage has the head."""
        return self.pp_rank == self.pp - 1

    @property
    def reports_results(self) -> bool:
        """Whether this rank reports samples and answers for its replica: one rank of the last stage."""
        return self.is_last_stage and self.tp_rank == 0

    def at(self, dp_rank: int, pp_rank: int, tp_rank: int) -> int:
        """Return the rank at a place."""
        return (dp_rank * self.pp + pp_rank) * self.tp + tp_rank

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """Ranks that hold parts of the same layers, this one included."""
        return tuple(self.at(self.dp_rank, self.pp_rank, place) for place in range(self.tp))

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same part of every stage, first stage first."""
        return tuple(self.at(self.dp_rank, place, self.tp_rank) for place in range(self.pp))

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same weights."""
        return tuple(self.at(place, self.pp_rank, self.tp_rank) for place in range(self.dp))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return every group along an axis (`tensor`, `pipeline` or `data`), in the same order on every rank."""
        found = {getattr(Grid(self.dp, self.tp, self.pp, rank), f"{axis}_ranks") for rank in range(self.world_size)}
        return sorted(found)
