"""The experiments of a study: one question each, and how its points are chosen.

`configs.study` reads them from a file, `configs.expand` makes cells of them.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError, field_validator, model_validator

from configs.base import Frozen
from configs.cell import Collective, CommunicationWorkload, Compression, Dtype, Engine, Layout, Transport

Grow = Literal["dp", "tp", "pp", "nodes"]
Overrides = dict[str, Any]


class _Experiment(Frozen):
    """What every experiment may say: of which models, and how its base cell differs from the study's."""

    models: list[str] | None = Field(None, description="names of models; none: all")
    base: Overrides = Field({}, description="dotted field of the cell -> value, for this experiment only")


class _Scaling(_Experiment):
    grow: Grow = Field(description="the axis that grows")
    to: PositiveInt | None = Field(None, description="largest degree; the points are 1, 2, 4 ... to")
    points: list[PositiveInt] | None = Field(None, description="or the degrees themselves, the first is the baseline")

    @model_validator(mode="after")
    def _has_points(self) -> "_Scaling":
        if (self.to is None) == (self.points is None):
            raise ValueError("say either `to` (largest degree) or `points` (a list of degrees)")
        if self.points is not None and (len(set(self.points)) != len(self.points) or not self.points):
            raise ValueError("points: name each degree once, and at least one")
        return self

    @property
    def degrees(self) -> list[int]:
        """Degrees of the growing axis, the baseline first."""
        if self.points is not None:
            return list(self.points)
        assert self.to is not None
        powers = [1 << bit for bit in range(self.to.bit_length()) if 1 << bit < self.to]
        return [*powers, self.to]


class StrongScaling(_Scaling):
    """The same total work on more and more ranks."""

    kind: Literal["strong"] = "strong"


class WeakScaling(_Scaling):
    """The same work for each rank, on more and more ranks."""

    kind: Literal["weak"] = "weak"


class Sweep(_Experiment):
    """Every combination of the values of one or more fields of the cell."""

    kind: Literal["sweep"] = "sweep"
    over: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)


class Optimization(_Experiment):
    """Named changes, each measured interleaved with the baseline that it changes."""

    kind: Literal["optimization"] = "optimization"
    baseline: Overrides = {}
    variants: dict[str, Overrides] = Field(min_length=1)


class Correctness(_Experiment):
    """Our answers against those of unmodified transformers, one rank, float32. Visited once.

    The reference also measures how much the order of reductions changes its answers, in each precision; that
    noise, not a constant, is what a candidate is judged by. A layout that is checked in 16 bits is checked in
    float32 too, where a small defect cannot hide in rounding.
    """

    kind: Literal["correctness"] = "correctness"
    prompts: PositiveInt = Field(20, description="so many prompts of the workload")
    new_tokens: PositiveInt = 16
    layouts: list[Layout] = Field([Layout()], min_length=1, description="layouts to check")
    engines: list[Engine] = Field(["rankwise"], min_length=1, description="engines to check")
    noise_orders: PositiveInt = Field(4, description="orders of reduction that the noise is measured with")
    dtypes: list[Dtype] = Field(["float32"], min_length=1, description="precisions to check")


PASSES = ("int8", "int8_dynamic", "int4", "prune_50", "prune_2_4", "prune_2_4+int8", "balanced", "aggressive")
_PASS: TypeAdapter[str] = TypeAdapter(Compression)


class CompressionPasses(_Experiment):
    """What each way to compress the weights does to size, speed, memory and answers.

    Every pass is measured in every precision; all are compared with the uncompressed model in the first precision, in
    the same engine and layout. Speed is measured in every repeat; answers, which are deterministic, are kept once.
    """

    kind: Literal["compression"] = "compression"
    baseline: Overrides = Field({}, description="dotted field of the cell -> value, for all passes and the base")
    passes: list[str] = Field(list(PASSES), min_length=1, description="passes to measure; several in order: `a+b`")
    dtypes: list[Dtype] | None = Field(None, min_length=1, description="precisions; the first is the base's")
    prompts: PositiveInt | None = Field(None, description="so many prompts are answered to be compared; none: all")

    @field_validator("passes")
    @classmethod
    def _known(cls, passes: list[str]) -> list[str]:
        for one in passes:
            for part in one.split("+"):
                try:
                    _PASS.validate_python(part)
                except ValidationError as error:
                    raise ValueError(f"{part!r} is no pass; use one of: {', '.join(PASSES)}") from error
        return list(dict.fromkeys(passes))


class Communication(_Experiment):
    """Latency and bandwidth of collectives and of point-to-point transfers, over sizes."""

    kind: Literal["communication"] = "communication"
    ranks: list[PositiveInt] = Field([2], min_length=1, description="numbers of ranks")
    operations: list[Collective] = Field(list(get_args(Collective)), min_length=1)
    sizes_bytes: list[PositiveInt] = Field(list(CommunicationWorkload().sizes_bytes), min_length=1)
    transports: list[Transport] = Field(["auto"], min_length=1)


class Layouts(_Experiment):
    """Every layout that the ranks allow, ranked by prediction; those predicted fastest are measured."""

    kind: Literal["layouts"] = "layouts"
    ranks: PositiveInt | None = Field(None, description="most ranks of a layout; none: all that the target holds")
    best: PositiveInt = Field(3, description="so many are measured, of those that this version can measure")


Experiment = Annotated[
    StrongScaling | WeakScaling | Sweep | Optimization | Correctness | CompressionPasses | Communication | Layouts,
    Field(discriminator="kind"),
]
