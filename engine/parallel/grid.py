"""Where a rank stands among the ranks: its place along data, pipeline and tensor parallelism. Pure arithmetic.

    grid = Grid.of(cell.layout, rank)
    grid.tensor_ranks            # the ranks that hold the other parts of the same layers

Tensor-parallel neighbours talk most and are numbered next to each other, so that they come to lie on one
host; then pipeline stages; replicas are farthest apart:  rank = (dp_rank * pp + pp_rank) * tp + tp_rank.
"""

from dataclasses import dataclass

from configs.cell import Layout, StageBalance


@dataclass(frozen=True)
class Grid:
    """Degrees of parallelism, how stages share the layers, and the rank that this is."""

    dp: int
    tp: int
    pp: int
    rank: int
    stage_balance: StageBalance = "memory"

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} is not one of {self.world_size}"

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "Grid":
        """The place of a rank in a layout."""
        return cls(layout.dp, layout.tp, layout.pp, rank, layout.stage_balance)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        """Which part of each layer this rank holds."""
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        """Which stage."""
        return self.rank // self.tp % self.pp

    @property
    def dp_rank(self) -> int:
        """Which replica."""
        return self.rank // (self.tp * self.pp)

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the head."""
        return self.pp_rank == self.pp - 1

    @property
    def speaks(self) -> bool:
        """Whether its samples and answers stand for its replica: one rank of the last stage."""
        return self.is_last_stage and self.tp_rank == 0

    def at(self, dp_rank: int, pp_rank: int, tp_rank: int) -> int:
        """The rank at a place."""
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

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """Ranks of this replica."""
        return tuple(self.at(self.dp_rank, stage, place) for stage in range(self.pp) for place in range(self.tp))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group along an axis (`tensor`, `pipeline` or `data`), in the same order on every rank."""
        found = {getattr(Grid(self.dp, self.tp, self.pp, rank), f"{axis}_ranks") for rank in range(self.world_size)}
        return sorted(found)
