"""The `train` workload: task, data, steps, stopping rules and checkpoints.

    TrainWorkload(data="stdlib", global_batch_size=32, micro_batch_size=4, steps=100)

The layout has the data-parallel strategy (`layout.strategy`), the cell has the precision (`dtype`).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.common.base import Period
from configs.common.execution import Layout, Strategy
from configs.common.printable import plural
from configs.workloads.descriptor import BaseWorkload, ComparedLatency, Descriptor, ShownTime

TrainingTask = Literal["causal_lm", "masked_lm", "seq2seq", "text_classification", "image_classification"]
ActivationCheckpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
Sharding = Literal["full", "hybrid"]
RateScaling = Literal["none", "linear", "square_root"]


class TrainWorkload(BaseWorkload):
    """Training of a model: AdamW or SGD, a global batch that does not depend on the number of ranks.

    It ends after `steps`, or by time and loss (`min_period_seconds`, `max_period_seconds`, `target_loss`), or, where
    nothing is said, by the measuring rules of the study.
    """

    kind: Literal["train"] = "train"
    task: TrainingTask = "causal_lm"
    data: str | None = Field(None, description="text file, or `stdlib`: Python's own source; none: random data")
    validation_data: str | None = Field(None, description="file like `data` that is evaluated on, never trained on")
    tokenizer: str | None = Field(None, description="tokenizer.json, where the model brings none")
    global_batch_size: PositiveInt = Field(8, description="sequences in an optimizer step, over all ranks")
    micro_batch_size: PositiveInt | None = Field(
        None, description="sequences that a rank computes at once, gradients are accumulated; none: its whole share"
    )
    sequence_length: PositiveInt = 128
    steps: PositiveInt | None = Field(None, description="exactly so many steps; none: the measuring rules decide")
    min_period_seconds: Period | None = Field(None, description="train at least so long (30s, 2m), whatever the loss")
    max_period_seconds: Period | None = Field(None, description="and at most so long")
    target_loss: PositiveFloat | None = Field(
        None,
        description="stop when the validation loss, or without one the mean of the last 10 steps', is at most this",
    )
    evaluate_every: PositiveInt | None = Field(None, description="steps between evaluations; none: at the end only")
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    learning_rate_warmup_steps: NonNegativeInt = 0
    learning_rate_scaling: RateScaling = Field(
        "none", description="how the rate grows with the global batch, from the one it was chosen for"
    )
    reference_batch_size: PositiveInt | None = Field(None, description="the global batch that learning_rate is for")
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    gradient_clipping: PositiveFloat | None = 1.0
    activation_checkpointing: ActivationCheckpointing = "none"
    sharding: Sharding = Field(
        "full", description="fsdp: over all replicas, or hybrid: over those of a node, replicated over nodes"
    )
    offload: Offload = Field("none", description="fsdp, zero: where optimizer states (and sharded weights) live")
    compiled: bool = Field(False, description="torch.compile on the blocks")
    checkpoint_every: PositiveInt | None = Field(None, description="steps between checkpoints; none: no checkpoints")
    checkpoints_kept: PositiveInt = Field(2, description="the last so many stay")
    checkpoint_mode: Literal["async", "sync"] = "async"
    heldout_share: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of the data kept to evaluate on")
    export: bool = Field(False, description="leave the trained model as a Hugging Face folder in the job folder")

    @model_validator(mode="after")
    def _consistent(self) -> "TrainWorkload":
        low, high = self.min_period_seconds, self.max_period_seconds
        if low is not None and high is not None and low > high:
            raise ValueError(f"workload.min_period_seconds: got {low:g}, more than max_period_seconds ({high:g})")
        if self.steps is not None and (low is not None or high is not None):
            raise ValueError(
                "workload.steps: mutually exclusive with min_ and max_period_seconds. Leave one of them out"
            )
        if (self.learning_rate_scaling != "none") != (self.reference_batch_size is not None):
            raise ValueError(
                "workload.learning_rate_scaling: requires reference_batch_size, the global batch of learning_rate. "
                "Set both or neither"
            )
        if self.heldout_share and self.validation_data is not None:
            raise ValueError("workload.heldout_share: mutually exclusive with validation_data. Leave one of them out")
        if self.validation_data is not None and self.data is None and self.task not in ("causal_lm", "masked_lm"):
            raise ValueError(
                f"workload.validation_data: not evaluated on by {self.task} without data, whose rows are random then. "
                "Set data, or use heldout_share"
            )
        if self.target_loss is not None:
            if self.steps is None and high is None:
                raise ValueError("workload.target_loss: may never be reached. Set steps or max_period_seconds as well")
            if self.evaluate_every is None and (self.heldout_share or self.validation_data is not None):
                raise ValueError(
                    "workload.evaluate_every: required, because target_loss is evaluated on the validation data. "
                    "Set the steps between evaluations"
                )
        return self

    @property
    def prepared(self) -> dict[str, object]:
        """What fixes how a model is wrapped and what it holds: measurements that share it can share one prepared
        model."""
        return self.model_dump(
            mode="json",
            include={"task", "optimizer", "micro_batch_size", "activation_checkpointing", "sharding", "offload",
                     "compiled"},
        )  # fmt: skip

    @property
    def summary(self) -> str:
        """The work in a few words, for a table: what differs from the plainest training is said."""
        task = "" if self.task == "causal_lm" else f"{self.task} "
        length = "" if self.task == "image_classification" else f" x {self.sequence_length}"
        pieces = "" if self.micro_batch_size is None else f" in micro-batches of {self.micro_batch_size}"
        more = [f"{self.activation_checkpointing} checkpointing"] if self.activation_checkpointing != "none" else []
        more += ["hybrid sharding"] if self.sharding == "hybrid" else []
        more += [f"{self.offload} offload"] if self.offload != "none" else []
        more += ["compiled"] if self.compiled else []
        more += ["sgd"] if self.optimizer == "sgd" else []
        return ", ".join([f"train {task}batch {self.global_batch_size}{length}{pieces}", *more])

    def accumulation(self, dp: int) -> int:
        """Micro-batches of a rank in a step, with `dp` replicas."""
        share = self.global_batch_size // dp
        return share // (self.micro_batch_size or share)

    def scaled(self, factor: int) -> "TrainWorkload":
        """The same work a rank for `factor` times as many ranks."""
        return self.model_copy(update={"global_batch_size": self.global_batch_size * factor})

    @property
    def keeps_checkpoints(self) -> bool:
        return self.checkpoint_every is not None

    @property
    def passes(self) -> int | None:
        return self.steps

    def check_warmup(self, warmup: int) -> None:
        """Raise ValueError where a fixed number of steps ends within `warmup`, the study's, or within the schedule's
        warm-up: the rate that the record names would never be reached."""
        if self.steps is not None and self.learning_rate_warmup_steps > self.steps:
            raise ValueError(
                f"workload.learning_rate_warmup_steps: got {self.learning_rate_warmup_steps}, more than the "
                f"{plural(self.steps, 'step')} of training, which never reach the learning rate. "
                f"Use at most {self.steps}, or more steps"
            )
        if self.steps is not None and self.steps <= warmup:
            raise ValueError(
                f"workload.steps: {self.steps} leaves none to measure after measuring.warmup of {warmup}. "
                f"Use at least {warmup + 1}"
            )

    @property
    def lacks_tokenizer(self) -> bool:
        return bool(self.data) and not self.tokenizer and self.task != "image_classification"

    @property
    def without_effect(self) -> dict[str, str]:
        evaluates = bool(self.heldout_share) or self.validation_data is not None
        needed = {
            "evaluate_every": (evaluates, "validation_data or heldout_share"),
            "checkpoints_kept": (self.keeps_checkpoints, "checkpoint_every"),
            "checkpoint_mode": (self.keeps_checkpoints, "checkpoint_every"),
            "sequence_length": (self.task != "image_classification", "a task of texts"),
            # An exported model and its checkpoints have it beside them.
            "tokenizer": (self.data is not None or self.export or self.keeps_checkpoints, "data"),
        }
        return {
            name: what
            for name, (is_used, what) in needed.items()
            if not is_used and getattr(self, name) != type(self).model_fields[name].default
        }

    @property
    def longest_sequence(self) -> tuple[str, int, str] | None:
        if self.task == "image_classification":
            return None
        return "sequence_length", self.sequence_length, f"a sequence takes {self.sequence_length} positions"

    @property
    def process_state(self) -> dict[str, Any]:
        return {"prepared": self.prepared}

    @property
    def sequences(self) -> int | None:
        return self.global_batch_size

    def size_of_pass(self, dp: int) -> tuple[int, int | None, int] | None:
        return max(1, self.global_batch_size // dp), self.sequence_length, 1

    def bytes_per_parameter(self, layout: Layout, width: int) -> int | None:
        if self.offload != "none":
            return None  # on the host or its disk
        states = 16 if self.optimizer == "adamw" else 8  # weights, gradients and AdamW's two moments in float32
        if layout.strategy in ("none", "ddp"):
            return states * layout.dp
        replicated = width if layout.strategy in ("zero1", "zero2") else 0
        return states + replicated * (layout.dp - 1)

    def most_replicas(self) -> tuple[int, str] | None:
        return self.global_batch_size, f"a batch of {plural(self.global_batch_size, 'sequence')} feeds no more ranks"

    def check(self, layout: Layout) -> None:
        strategy = layout.strategy
        if self.global_batch_size % layout.dp:
            raise ValueError(
                f"workload.global_batch_size: {self.global_batch_size} is not divisible "
                f"by dp={layout.dp}. Use a multiple of {layout.dp}"
            )
        share = self.global_batch_size // layout.dp
        if self.micro_batch_size is not None and share % self.micro_batch_size:
            raise ValueError(
                f"workload.micro_batch_size: got {self.micro_batch_size}, which does not divide a rank's share of the "
                f"batch, {share}. Use a divisor of {share}"
            )
        self._check_strategy(strategy)
        if layout.pp > 1:
            raise ValueError("layout.pp: pipeline parallelism is not supported in training. Use dp and tp")
        if layout.tp > 1 and self.task != "causal_lm":
            raise ValueError(
                f"layout.tp: tensor parallelism is not supported in training of {self.task}. Use dp, or causal_lm"
            )

    def _check_strategy(self, strategy: Strategy) -> None:
        if self.offload != "none" and strategy in ("none", "ddp"):
            raise ValueError(f"workload.offload: not supported by {strategy}. Use fsdp, zero1, zero2 or zero3")
        if self.offload == "nvme" and strategy != "zero3":
            raise ValueError(f"workload.offload: {strategy} supports cpu only. Use cpu, or zero3 for nvme")
        if self.compiled and strategy == "zero3":
            raise ValueError(
                "workload.compiled: torch.compile cannot trace the gather hooks of zero3. Use fsdp or zero2"
            )
        if self.sharding == "hybrid" and strategy != "fsdp":
            raise ValueError(f"workload.sharding: hybrid requires fsdp, got {strategy}")


TRAINING_PARTS = (
    "data_seconds",
    "forward_seconds",
    "backward_seconds",
    "exposed_communication_seconds",
    "optimizer_seconds",
)
"""Columns of what a step consists of, in its order; records of the first versions have none."""

DESCRIPTOR = Descriptor(
    kind="train",
    model=TrainWorkload,
    unit="token",
    throughput="tokens_per_second",
    columns=("step_seconds", *TRAINING_PARTS),
    latencies={"step": "step_seconds"},
    latency=ComparedLatency("step_seconds", "ms a step", waited_for="step"),
    times=(ShownTime("step_seconds", "ms a step"),),
    predicted=("tokens_per_second",),  # the step takes the inverse of it: it would count twice
    series="step_seconds",
    pass_name="step",
    axes=("dp", "tp"),
    grows="global_batch_size",
    batch_fields=("global_batch_size",),
    batch="global_batch_size",
    has_strategy=True,
    needs_model=True,
    input_fields=("data", "validation_data", "tokenizer"),
    trains=True,
    marks_work=True,
    repeats_passes=True,
    verb="Train",
    form_title="Train",
)
