"""The kinds of experiments of a study and the choice of their points.

`configs.spec.study` reads them from a file, `configs.plans.expand` expands them into cells.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from configs.common.base import Frozen
from configs.common.execution import Compression, Degree, Dtype, Engine, Layout
from configs.load.objectives import RequestObjectives
from configs.workloads.communication import Collective, CommunicationWorkload, TransportName

Grow = Literal["dp", "tp", "pp", "nodes"]
Overrides = dict[str, Any]


class _Experiment(Frozen):
    """Common fields of all experiments: models and changes of the base cell."""

    models: list[str] | None = Field(None, description="names of models; none: all")
    base: Overrides = Field({}, description="dotted field of the cell -> value, for this experiment only")

    @property
    def num_values(self) -> tuple[int, ...]:
        """Numbers of values along the axes of the grid; their product is the number of points of a model."""
        raise NotImplementedError


class _Scaling(_Experiment):
    grow: Grow = Field(description="the scaled axis")
    to: Degree | None = Field(None, description="maximum degree; the points are 1, 2, 4 ... to")
    points: list[Degree] | None = Field(None, description="explicit degrees instead; the first is the baseline")

    @model_validator(mode="after")
    def _has_points(self) -> "_Scaling":
        if (self.to is None) == (self.points is None):
            raise ValueError("expected either `to` (maximum degree) or `points` (a list of degrees)")
        if self.points is not None and (len(set(self.points)) != len(self.points) or not self.points):
            raise ValueError("points: expected at least one degree and no duplicates")
        return self

    @property
    def degrees(self) -> list[int]:
        """Return the degrees of the scaled axis, baseline first."""
        if self.points is not None:
            return list(self.points)
        assert self.to is not None
        powers = [1 << bit for bit in range(self.to.bit_length()) if 1 << bit < self.to]
        return [*powers, self.to]

    @property
    def num_values(self) -> tuple[int, ...]:
        return (len(self.degrees),)


class StrongScaling(_Scaling):
    """Strong scaling: constant total work on increasing numbers of ranks."""

    kind: Literal["strong"] = "strong"


class WeakScaling(_Scaling):
    """Weak scaling: constant work per rank on increasing numbers of ranks."""

    kind: Literal["weak"] = "weak"


class Sweep(_Experiment):
    """All combinations of the values of one or more fields of the cell."""

    kind: Literal["sweep"] = "sweep"
    over: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)

    @property
    def num_values(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.over.values())


class Optimization(_Experiment):
    """Named variants, each measured interleaved with its baseline."""

    kind: Literal["optimization"] = "optimization"
    baseline: Overrides = {}
    variants: dict[str, Overrides] = Field(min_length=1)

    @property
    def num_values(self) -> tuple[int, ...]:
        return (1 + len(self.variants),)


class Correctness(_Experiment):
    """Compare answers with those of unmodified transformers on one rank in float32. Measured once.

    The reference also measures how much the reduction order changes its answers in each precision; candidates are
    judged by this noise instead of a constant. Layouts checked in 16 bits are also checked in float32, where
    rounding cannot mask a small defect. Batches, sequences and decode steps are as large as those of the study's other
    cells of the model, within bounds; the report names what was not reached.
    """

    kind: Literal["correctness"] = "correctness"
    prompts: PositiveInt | None = Field(
        None, description="number of prompts; none: 20, or a batch of the study's cells"
    )
    new_tokens: PositiveInt | None = Field(
        None, description="decoded tokens; none: as many as the study's cells, at most 64"
    )
    positions: PositiveInt | None = Field(
        None, description="tokens of the longest sequence; none: as many as the study's cells, at most 2048"
    )
    reference: str | None = Field(
        None,
        description="file of `rankwise verify --save-reference`: its prompts are answered, transformers is not run",
    )
    layouts: list[Layout] = Field([Layout()], min_length=1, description="layouts to check")
    engines: list[Engine] = Field(["rankwise"], min_length=1, description="engines to check")
    noise_orders: PositiveInt = Field(4, description="reduction orders for measuring the noise")
    dtypes: list[Dtype] = Field(["float32"], min_length=1, description="precisions to check")

    @model_validator(mode="after")
    def _of_the_file(self) -> "Correctness":
        given = [name for name in ("prompts", "new_tokens", "positions") if getattr(self, name) is not None]
        if self.reference is not None and given:
            raise ValueError(f"{given[0]}: determined by the file of `reference`. Leave one of the two out")
        return self

    @property
    def num_values(self) -> tuple[int, ...]:
        return (len(self.engines), len(self.layouts), len({*self.dtypes, "float32"}))


PASSES = ("int8", "int8_dynamic", "int4", "prune_50", "prune_2_4", "prune_2_4+int8", "balanced", "aggressive")
_PASS: TypeAdapter[str] = TypeAdapter(Compression)


class CompressionPasses(_Experiment):
    """Effect of each compression pass on size, speed, memory and answers.

    Every pass is measured in every precision and compared with the uncompressed model in the first precision, in
    the same engine and layout. Speed is measured in every repeat; answers, which are deterministic, only once.
    """

    kind: Literal["compression"] = "compression"
    baseline: Overrides = Field({}, description="dotted field of the cell -> value, for all passes and the base")
    passes: list[str] = Field(list(PASSES), min_length=1, description="passes to measure; a sequence is written `a+b`")
    dtypes: list[Dtype] | None = Field(None, min_length=1, description="precisions; the first is that of the base")
    prompts: PositiveInt | None = Field(None, description="number of prompts with compared answers; none: all")

    @field_validator("passes")
    @classmethod
    def _known(cls, passes: list[str]) -> list[str]:
        for one in passes:
            for part in one.split("+"):
                try:
                    _PASS.validate_python(part)
                except ValidationError as error:
                    known = f"{', '.join(PASSES)}, float8, prune_NN"
                    raise ValueError(f"unknown pass {part!r}; use one of: {known}") from error
        return list(dict.fromkeys(passes))

    @property
    def num_values(self) -> tuple[int, ...]:
        return (2, len(set(self.dtypes or ("",))), 1 + len(self.passes))


class Communication(_Experiment):
    """Latency and bandwidth of collectives and of point-to-point transfers, over sizes."""

    kind: Literal["communication"] = "communication"
    ranks: list[Degree] = Field([2], min_length=1, description="numbers of ranks")
    operations: list[Collective] = Field(list(get_args(Collective)), min_length=1)
    sizes_bytes: list[PositiveInt] = Field(list(CommunicationWorkload().sizes_bytes), min_length=1)
    transports: list[TransportName] = Field(["auto"], min_length=1)

    @property
    def num_values(self) -> tuple[int, ...]:
        return (len(self.ranks), len(self.transports))


class ServerLoad(_Experiment):
    """Requests against a server: latencies over rates or users, or the highest rate under objectives.

    Its fields are those of the workload `serve`, and set them for this experiment.
    """

    kind: Literal["load"] = "load"
    over: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field({}, description="dotted field -> values")
    arrivals: Literal["poisson", "gamma", "constant"] | None = Field(None, description="gaps of an open loop")
    rate: PositiveFloat | None = Field(None, description="requests per second")
    burstiness: PositiveFloat | None = Field(None, description="shape of gamma gaps")
    users: PositiveInt | None = Field(None, description="closed loop")
    think_seconds: NonNegativeFloat | None = Field(None, description="mean pause of a user, and between turns")
    trace: str | None = Field(None, description="JSONL file with times and lengths of requests")
    duration_seconds: PositiveFloat | None = Field(None, description="of a run")
    max_requests: PositiveInt | None = Field(None, description="ends a run earlier")
    find: Literal["max_rate"] | None = Field(None, description="search for the highest rate under the objectives")
    objectives: dict[str, float] | None = Field(None, description="ttft_seconds, tpot_seconds, e2e_seconds")
    share: float | None = Field(None, gt=0, lt=1, description="of requests that must meet all objectives")
    tolerance: float | None = Field(None, gt=0, lt=1, description="width of the interval that a search looks for")
    max_runs: PositiveInt | None = Field(None, description="runs of a search")

    @model_validator(mode="after")
    def _objectives_have_bounds(self) -> "ServerLoad":
        if self.share is not None and self.objectives is None:
            raise ValueError("share: expected objectives beside it, for example {ttft_seconds: 0.5}")
        if self.objectives is not None:
            RequestObjectives.model_validate(self.asked["objectives"])
        return self

    @property
    def asked(self) -> Overrides:
        """The fields of the workload that the experiment sets."""
        own = ("arrivals", "rate", "burstiness", "users", "think_seconds", "trace", "duration_seconds", "max_requests")
        found = {name: getattr(self, name) for name in (*own, "find", "tolerance", "max_runs")}
        if self.objectives is not None:
            found["objectives"] = {**self.objectives, **({} if self.share is None else {"share": self.share})}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def num_values(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.over.values()) or (1,)


class Layouts(_Experiment):
    """Rank all layouts by prediction and measure those predicted fastest."""

    kind: Literal["layouts"] = "layouts"
    ranks: Degree | None = Field(None, description="maximum ranks of a layout; none: all ranks of the target")
    best: PositiveInt = Field(3, description="number of measured layouts")

    @property
    def num_values(self) -> tuple[int, ...]:
        return (self.best,)


Experiment = Annotated[
    StrongScaling
    | WeakScaling
    | Sweep
    | Optimization
    | Correctness
    | CompressionPasses
    | Communication
    | Layouts
    | ServerLoad,
    Field(discriminator="kind"),
]
