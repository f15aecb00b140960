"""A cell: one point to measure, with a stable key.

A cell contains everything that defines the measurement: model, workload, layout, precision, engine and
the share of the machine of each rank. The key excludes what changes from run to run (environment, prices,
the requesting experiment), so experiments that need the same point share one measurement.
"""

from pydantic import Field, PositiveInt, field_validator, model_validator

from configs.common.base import SCHEMA_VERSION, Frozen, content_hash
from configs.common.execution import LEVELS, Compression, Dtype, Engine, EngineMode, Layout, PageCache
from configs.spec.engines import check_engine_layout, check_engine_prompts
from configs.workloads import STUDIED, AnyWorkload, descriptor_of, kinds_with


class Cell(Frozen):
    """One point to measure."""

    model: str | None = Field(None, description="model identity, resolved; none for noop")
    workload: AnyWorkload
    layout: Layout = Layout()
    dtype: Dtype = "float32"
    engine: Engine = "rankwise"
    engine_mode: EngineMode = Field("eager", description="decoding mode of engine transformers")
    page_cache: PageCache | None = Field(
        None, description="page-cache state of the model's files before loading; none: unchanged"
    )
    compression: tuple[Compression, ...] = Field(
        (), description="passes over the weights, in order; `int8` or `prune_2_4+int8` or a list"
    )
    target: str = "local"
    nodes: PositiveInt = 1
    cores_per_rank: PositiveInt = 1
    env: dict[str, str] = {}

    @field_validator("compression", mode="before")
    @classmethod
    def _passes(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(value.split("+")) if value != "none" else ()
        return () if value is None else value

    @model_validator(mode="after")
    def _supported(self) -> "Cell":
        layout, known = self.layout, descriptor_of(self.workload)
        self._layout_supported()
        self._compression_supported()
        if known.has_strategy and layout.dp > 1 and layout.strategy == "none":
            object.__setattr__(self, "layout", layout.model_copy(update={"strategy": "ddp"}))
        elif not known.has_strategy and layout.strategy != "none":
            raise ValueError(
                f"layout.strategy: got {layout.strategy}, but a {known.kind} workload supports none only. Leave it out"
            )
        if self.engine not in known.engines:
            measured = [kind for kind, other in STUDIED.items() if self.engine in other.engines]
            raise ValueError(f"engine: {self.engine} supports {', '.join(measured)} only. Use `engine: rankwise`")
        if self.engine_mode != "eager" and (self.engine != "transformers" or layout.ranks > 1):
            raise ValueError(f"engine_mode: {self.engine_mode} requires engine transformers on one rank. Leave it out")
        if self.page_cache is not None and not known.takes_prompts:
            use = ", ".join(kinds_with("takes_prompts"))
            raise ValueError(f"page_cache: not supported by a {known.kind} workload, only by {use}. Leave it out")
        self.workload.check(self.layout)
        return self

    def _layout_supported(self) -> None:
        layout, known = self.layout, descriptor_of(self.workload)
        if known.layout_rule is not None:
            known.layout_rule(layout)
            return
        if known.starts_server:
            check_engine_layout(self.engine, layout)
            check_engine_prompts(self.engine, getattr(self.workload, "prompts", None))
            return
        if known.axes == ("dp",) and (layout.tp > 1 or layout.pp > 1):
            raise ValueError(f"layout: a {known.kind} workload does not support tp and pp. Use dp")
        if self.engine == "transformers" and (layout.dp > 1 or min(layout.tp, layout.pp) > 1):
            raise ValueError("layout: engine transformers supports one rank, tp or pp only. Use `engine: rankwise`")
        elif self.engine == "deepspeed" and (layout.dp > 1 or layout.pp > 1 or layout.tp < 2):
            raise ValueError("layout: engine deepspeed requires tp of 2 or more. Use `engine: rankwise`")
        elif self.engine == "onnxruntime" and layout.ranks > 1:
            raise ValueError("layout: engine onnxruntime supports one rank only. Use `engine: rankwise`")

    def _compression_supported(self) -> None:
        if not self.compression:
            return
        if not descriptor_of(self.workload).compressible:
            use = ", ".join(kinds_with("compressible"))
            raise ValueError(f"compression: not supported by a {self.workload.kind} workload. Use {use}")
        if self.engine not in ("rankwise", "endpoint"):
            raise ValueError(f"compression: not supported by engine {self.engine}. Use `engine: rankwise`")
        if len(self.compression) > 1 and set(self.compression) & set(LEVELS):
            raise ValueError("compression: balanced and aggressive cannot be combined with other passes. Use one alone")
        for kind in (("int", "float"), ("prune",)):
            chosen = [one for one in self.compression if one.startswith(kind)]
            if len(chosen) > 1:
                raise ValueError(f"compression: {' and '.join(chosen)} are mutually exclusive. Use one of them")
        if [one for one in self.compression if one.startswith("prune")] != list(self.compression[:1]) and (
            len(self.compression) > 1
        ):
            raise ValueError("compression: pruning must precede quantisation. Name the pruning pass first")

    @property
    def key(self) -> str:
        """Return 16 hexadecimal digits that identify this measurement permanently.

        Hash of the canonical JSON of all fields without defaults (so a new field with a default
        keeps old keys valid), plus the schema version.
        """
        fields = self.model_dump(mode="json", exclude_defaults=True)
        fields["workload"]["kind"] = self.workload.kind
        return content_hash({"schema_version": SCHEMA_VERSION, "cell": fields})

    @property
    def processes(self) -> int:
        """Processes that its launch starts: its ranks, or the one that starts a server with them."""
        return self.nodes if descriptor_of(self.workload).starts_server else self.layout.ranks

    @property
    def pack_key(self) -> str:
        """Fields that determine weights or process state: cells that share them can share a launch."""
        fixed = self.model_dump(mode="json", exclude={"workload"})
        return content_hash({**fixed, **self.workload.process_state, "kind": self.workload.kind}, digits=8)

    @property
    def place(self) -> str:
        """Return the layout with strategy and number of nodes: `dp=2 fsdp on 2 nodes`."""
        strategy = "" if self.layout.strategy in ("none", "ddp") else f" {self.layout.strategy}"
        return f"{self.layout}{strategy}" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")

    @property
    def label(self) -> str:
        """Return a short readable name for tables."""
        engine = "" if self.engine == "rankwise" else f", {self.engine}"
        if self.engine_mode != "eager":
            engine += f" {self.engine_mode}"
        cache = f", {self.page_cache} cache" if self.page_cache else ""
        passes = f", {' + '.join(self.compression)}" if self.compression else ""
        dtype = f", {self.dtype}" if self.workload.shows_dtype else ""
        return f"{self.place}{dtype}{passes}, {self.workload.summary}{engine}{cache}"
