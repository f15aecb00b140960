"""A cell: one point to measure, with a stable key.

A cell says everything that fixes the measurement: model, workload, layout, precision, engine and
the share of the machine that each rank gets. What changes from run to run (environment, prices,
which experiment asked for it) is not in the key, so that two experiments that need the same point
share one measurement.
"""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.base import SCHEMA_VERSION, Frozen, content_hash
from configs.training import TrainWorkload

Dtype = Literal["float32", "bfloat16", "float16"]
Engine = Literal["rankwise", "transformers", "deepspeed", "onnxruntime"]
EngineMode = Literal["eager", "static", "compiled"]
PageCache = Literal["cold", "warm"]
Transport = Literal["auto", "shared memory", "gloo", "nccl"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "point_to_point"]
Strategy = Literal["none", "ddp", "fsdp", "zero1", "zero2", "zero3"]
Fault = Literal["raise", "kill", "hang", "out_of_memory"]
NonNegative = Annotated[int, Field(ge=0)]
PROMPTED = ("generate", "seq2seq", "encode")
"""Kinds of workloads that work through prompts."""

StageBalance = Literal["memory", "speed"]


class Layout(Frozen):
    """How ranks share the work: data (`dp`), tensor (`tp`) and pipeline (`pp`) parallel degrees.

    `strategy` says how data-parallel training keeps replicas equal; `none` where there is nothing
    to keep equal (one rank, or inference). `stage_balance` means something for inference with `pp` above 1 alone.
    """

    dp: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    strategy: Strategy = "none"
    stage_balance: StageBalance = Field(
        "memory",
        description="stages are made equal in bytes that they hold (memory), or that a decode step reads (speed)",
    )

    @model_validator(mode="after")
    def _one_stage_is_balanced(self) -> "Layout":
        """So that a sweep over `pp` measures one stage once."""
        if self.pp == 1 and self.stage_balance != "memory":
            object.__setattr__(self, "stage_balance", "memory")
        return self

    @property
    def ranks(self) -> int:
        """Processes in the group."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        degrees = [f"{axis}={n}" for axis, n in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if n > 1]
        return (" x ".join(degrees) or "1 rank") + (" by speed" if self.stage_balance == "speed" else "")


class PromptedWorkload(Frozen):
    """What workloads that work through prompts share.

    The prompts are shared out over the replicas; `num_prompts` counts all replicas'. A replica is `tp` x `pp`
    ranks; with `pp` above 1 several micro-batches of a batch are under way at once, so that all stages work.
    """

    prompts: str | None = Field(None, description="JSONL file with a `prompt` a line; none: random token ids")
    variant: str | None = Field(None, description="only lines whose `variant` is this")
    limit: PositiveInt | None = Field(None, description="only the first so many lines")
    num_prompts: PositiveInt | None = Field(None, description="prompts over all replicas; the file is repeated")
    prompt_tokens: PositiveInt | None = Field(None, description="cut or repeat each prompt to this length")
    batch_size: PositiveInt = Field(1, description="sequences that one replica works on at once")
    micro_batch_size: PositiveInt | None = Field(
        None, description="sequences that pass a stage together; none: the batch shared out over the stages"
    )
    answers: bool = Field(False, description="keep what the model answers, to judge correctness")
    noise_dtypes: tuple[Dtype, ...] = Field(
        (), description="with answers, engine transformers: precisions whose reduction-order noise is measured"
    )
    noise_orders: PositiveInt = Field(4, description="orders of reduction that the noise is measured with")

    def in_micro_batches(self, stages: int) -> int:
        """Sequences of a micro-batch on so many stages."""
        return min(self.batch_size, self.micro_batch_size or -(-self.batch_size // stages))

    def scaled(self, factor: int) -> Self:
        """The same work a rank for `factor` times as many ranks."""
        return self.model_copy(update={"num_prompts": (self.num_prompts or 1) * factor})


class GenerateWorkload(PromptedWorkload):
    """Greedy generation by a decoder of exactly `new_tokens` tokens for each prompt, in batches of equal size."""

    kind: Literal["generate"] = "generate"
    new_tokens: PositiveInt = 32
    read_probe: bool = Field(False, description="also time a plain read of as many bytes as the weights have")


class Seq2SeqWorkload(PromptedWorkload):
    """Greedy generation by an encoder-decoder: each prompt is a source, `new_tokens` tokens are decoded from it."""

    kind: Literal["seq2seq"] = "seq2seq"
    new_tokens: PositiveInt = 32


Pooling = Literal["mean", "first"]


class EncodeWorkload(PromptedWorkload):
    """Embeddings by an encoder: one vector for each prompt."""

    kind: Literal["encode"] = "encode"
    pooling: Pooling = Field("mean", description="of the last hidden states: of all tokens, or the first token's")
    normalize: bool = Field(True, description="bring embeddings to length 1")


class NoopWorkload(Frozen):
    """Sleep and allocate as told: it times and tests the pipeline, not a model.

    `fault` makes `fault_rank` misbehave for real, on the first `fault_attempts` attempts.
    """

    kind: Literal["noop"] = "noop"
    seconds: Annotated[float, Field(ge=0)] = 0.01
    allocate_bytes: NonNegative = 0
    items: PositiveInt = Field(1, description="work items over all ranks; each takes `seconds`")
    label: str | None = Field(None, description="tells cells apart that do the same")
    fault: Fault | None = None
    fault_rank: NonNegative = 0
    fault_attempts: PositiveInt = 1_000_000

    def scaled(self, factor: int) -> "NoopWorkload":
        """The same work a rank for `factor` times as many ranks."""
        return self.model_copy(update={"items": self.items * factor})


class CommunicationWorkload(Frozen):
    """Collectives and point-to-point transfers over sizes, among `layout.tp` ranks; it needs no model."""

    kind: Literal["communication"] = "communication"
    operations: tuple[Collective, ...] = Field(get_args(Collective), min_length=1)
    sizes_bytes: tuple[PositiveInt, ...] = Field(
        (1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216), min_length=1
    )
    transport: Transport = Field("auto", description="auto: what the engine would choose")

    def scaled(self, factor: int) -> "CommunicationWorkload":
        """Sizes are those of a rank already."""
        return self


class PreflightWorkload(Frozen):
    """What each node computes and reads, and what each pair of nodes exchanges: a test of nodes, not of a study."""

    kind: Literal["preflight"] = "preflight"
    seconds: PositiveFloat = Field(1.0, description="of computing, and of reading, on each rank")

    def scaled(self, factor: int) -> "PreflightWorkload":
        """Every rank does the same, however many there are."""
        return self


Workload = Annotated[
    GenerateWorkload | Seq2SeqWorkload | EncodeWorkload | TrainWorkload | NoopWorkload | CommunicationWorkload,
    Field(discriminator="kind"),
]
"""What a study may ask for."""

Compression = Annotated[
    str, Field(pattern=r"^(int8|int8_dynamic|int4|prune_2_4|prune_[1-9][0-9]|balanced|aggressive)$")
]
"""A pass over the weights after loading; `docs/compression.md` defines each. The last two are lists of passes that
follow what the hardware can do (`engine.compression.passes`)."""
LEVELS = ("balanced", "aggressive")


class Cell(Frozen):
    """One point to measure."""

    model: str | None = Field(None, description="model identity, resolved; none for noop")
    workload: Annotated[Workload | PreflightWorkload, Field(discriminator="kind")]
    layout: Layout = Layout()
    dtype: Dtype = "float32"
    engine: Engine = "rankwise"
    engine_mode: EngineMode = Field("eager", description="of engine transformers: how it decodes")
    page_cache: PageCache | None = Field(None, description="state of the model's files before loading; none: as found")
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
        layout, kind = self.layout, self.workload.kind
        self._layout_supported()
        self._compression_supported()
        if kind == "train" and layout.dp > 1 and layout.strategy == "none":
            object.__setattr__(self, "layout", layout.model_copy(update={"strategy": "ddp"}))
        elif kind != "train" and layout.strategy != "none":
            raise ValueError(f"layout.strategy: {layout.strategy} is for training; a {kind} workload takes none")
        if self.engine != "rankwise" and not isinstance(self.workload, PromptedWorkload):
            raise ValueError(f"engine: {self.engine} measures {', '.join(PROMPTED)}; use engine rankwise here")
        if self.engine_mode != "eager" and (self.engine != "transformers" or layout.ranks > 1):
            raise ValueError(
                f"engine_mode: {self.engine_mode} is for engine transformers on one rank; leave it out here"
            )
        if isinstance(self.workload, TrainWorkload):
            self._training_supported(self.workload)
        if isinstance(self.workload, PromptedWorkload) and (self.workload.num_prompts or 1) < layout.dp:
            raise ValueError(
                f"workload.num_prompts: {self.workload.num_prompts or 1} leaves ranks of dp={layout.dp} without work; "
                f"use at least {layout.dp}"
            )
        if isinstance(self.workload, NoopWorkload) and self.workload.fault_rank >= layout.ranks:
            raise ValueError(f"workload.fault_rank: {self.workload.fault_rank} is not below {layout.ranks} ranks")
        return self

    def _training_supported(self, work: TrainWorkload) -> None:
        layout, strategy = self.layout, self.layout.strategy
        if work.global_batch_size % layout.dp:
            raise ValueError(
                f"workload.global_batch_size: {work.global_batch_size} cannot be shared equally "
                f"by dp={layout.dp}; use a multiple of {layout.dp}"
            )
        share = work.global_batch_size // layout.dp
        if work.micro_batch_size is not None and share % work.micro_batch_size:
            raise ValueError(
                f"workload.micro_batch_size: {share} sequences of a rank are no multiple of {work.micro_batch_size}"
            )
        if work.offload != "none" and strategy in ("none", "ddp"):
            raise ValueError(f"workload.offload: {strategy} offloads nothing; use fsdp, zero1, zero2 or zero3")
        if work.offload == "nvme" and strategy != "zero3":
            raise ValueError(f"workload.offload: {strategy} offloads to the CPU only; use cpu, or zero3 for nvme")
        if work.compiled and strategy == "zero3":
            raise ValueError(
                "workload.compiled: zero3 gathers weights in hooks that torch.compile cannot follow; use fsdp or zero2"
            )
        if work.sharding == "hybrid" and strategy != "fsdp":
            raise ValueError(f"workload.sharding: hybrid is a way of fsdp, not of {strategy}")
        if layout.pp > 1:
            raise ValueError("layout.pp: training is not pipelined by this version; use dp and tp")
        if layout.tp > 1 and work.task != "causal_lm":
            raise ValueError(f"layout.tp: {work.task} is trained without tensor parallelism; use dp, or causal_lm")

    def _layout_supported(self) -> None:
        layout, kind = self.layout, self.workload.kind
        if kind == "communication":
            if layout.dp > 1 or layout.pp > 1 or layout.tp < 2:
                raise ValueError("layout: a communication workload runs among the ranks of tp; use tp of 2 or more")
        elif (layout.tp > 1 or layout.pp > 1) and kind not in (*PROMPTED, "train"):
            raise ValueError(f"layout: a {kind} workload is measured without tp and pp by this version; use dp")
        elif self.engine == "transformers" and (layout.dp > 1 or min(layout.tp, layout.pp) > 1):
            raise ValueError(
                "layout: engine transformers is measured on one rank, with tp or with pp; use engine rankwise here"
            )
        elif self.engine == "deepspeed" and (layout.dp > 1 or layout.pp > 1 or layout.tp < 2):
            raise ValueError("layout: engine deepspeed is measured with tp of 2 or more; use engine rankwise here")
        elif self.engine == "onnxruntime" and layout.ranks > 1:
            raise ValueError("layout: engine onnxruntime is measured on one rank; use engine rankwise here")
        work = self.workload
        if isinstance(work, PromptedWorkload) and (work.micro_batch_size or 1) > work.batch_size:
            raise ValueError(
                f"workload.micro_batch_size: {work.micro_batch_size} is more than the batch of {work.batch_size}"
            )

    def _compression_supported(self) -> None:
        if not self.compression:
            return
        if not isinstance(self.workload, PromptedWorkload):
            raise ValueError(f"compression: a {self.workload.kind} workload takes none; use {', '.join(PROMPTED)}")
        if self.engine != "rankwise":
            raise ValueError(f"compression: engine {self.engine} is measured without; use engine rankwise here")
        if len(self.compression) > 1 and set(self.compression) & set(LEVELS):
            raise ValueError("compression: balanced and aggressive are lists of passes themselves; name one alone")
        for kind in ("int", "prune"):
            chosen = [one for one in self.compression if one.startswith(kind)]
            if len(chosen) > 1:
                raise ValueError(f"compression: {' and '.join(chosen)} do the same twice; name one of them")
        if [one for one in self.compression if one.startswith("prune")] != list(self.compression[:1]) and (
            len(self.compression) > 1
        ):
            raise ValueError("compression: weights are pruned before they are quantised; name the pruning first")

    @property
    def key(self) -> str:
        """16 hexadecimal digits that name this measurement for ever.

        Hash of canonical JSON of all fields, defaults left out (so that a new field with a default
        leaves old keys as they are), plus the schema version.
        """
        fields = self.model_dump(mode="json", exclude_defaults=True)
        fields["workload"]["kind"] = self.workload.kind
        return content_hash({"schema_version": SCHEMA_VERSION, "cell": fields})

    @property
    def pack_key(self) -> str:
        """What fixes weights or process state: cells that share it can share a launch."""
        fixed = self.model_dump(mode="json", exclude={"workload"})
        if isinstance(self.workload, CommunicationWorkload):
            fixed["transport"] = self.workload.transport  # groups are opened once a launch
        if isinstance(self.workload, TrainWorkload):
            fixed["prepared"] = self.workload.prepared
        return content_hash({**fixed, "kind": self.workload.kind}, digits=8)

    @property
    def place(self) -> str:
        """The layout, what is not plain about its replicas, and how many nodes it lies on: `dp=2 fsdp on 2 nodes`."""
        strategy = "" if self.layout.strategy in ("none", "ddp") else f" {self.layout.strategy}"
        return f"{self.layout}{strategy}" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")

    @property
    def label(self) -> str:
        """A short name for tables: what a person would call this cell."""
        work = self.workload
        if isinstance(work, PromptedWorkload):
            pieces = "" if work.micro_batch_size is None else f" in {work.micro_batch_size}s"
            size = f"batch {work.batch_size}{pieces}"
            size = f"encode {size}" if isinstance(work, EncodeWorkload) else f"{size}, {work.new_tokens} tokens"
        elif isinstance(work, CommunicationWorkload):
            size = "communication" if work.transport == "auto" else f"communication by {work.transport}"
        elif isinstance(work, TrainWorkload):
            size = work.label
        elif isinstance(work, PreflightWorkload):
            size = "preflight"
        else:
            size = work.label or f"noop {work.seconds:g} s"
        engine = "" if self.engine == "rankwise" else f", {self.engine}"
        if self.engine_mode != "eager":
            engine += f" {self.engine_mode}"
        cache = f", {self.page_cache} cache" if self.page_cache else ""
        passes = f", {' + '.join(self.compression)}" if self.compression else ""
        return f"{self.place}, {self.dtype}{passes}, {size}{engine}{cache}"
