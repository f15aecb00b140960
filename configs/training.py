"""The `train` workload: what is learnt from which data, in which steps, until when, and what is kept of it.

    TrainWorkload(data="stdlib", global_batch_size=32, micro_batch_size=4, steps=100)

How the ranks keep their replicas equal is the layout's (`layout.strategy`); the precision is the cell's `dtype`.
"""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from configs.base import Frozen

NonNegative = Annotated[int, Field(ge=0)]
TrainingTask = Literal["causal_lm", "masked_lm", "seq2seq", "text_classification", "image_classification"]
ActivationCheckpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
Sharding = Literal["full", "hybrid"]
RateScaling = Literal["none", "linear", "square_root"]
TEXT_TASKS = ("causal_lm", "masked_lm")
"""Tasks that learn from one long text; the others learn from examples, one in each line of a file."""

_PERIOD = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h)?\s*")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def period_seconds(value: object) -> object:
    """Seconds of `30s`, `2m`, `1.5h` or a number; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    found = _PERIOD.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is no period; write seconds, or 30s, 2m, 1h")
    return float(found[1]) * _SECONDS[found[2]]


Period = Annotated[PositiveFloat, BeforeValidator(period_seconds)]


class TrainWorkload(Frozen):
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
    learning_rate_warmup_steps: NonNegative = 0
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
            raise ValueError(f"workload.min_period_seconds: {low:g} is more than max_period_seconds of {high:g}")
        if self.steps is not None and (low is not None or high is not None):
            raise ValueError("workload.steps: a run of exactly so many steps takes no period; leave one of them out")
        if (self.learning_rate_scaling != "none") != (self.reference_batch_size is not None):
            raise ValueError(
                "workload.learning_rate_scaling: needs reference_batch_size, the global batch that learning_rate is "
                "for; set both or neither"
            )
        if self.heldout_share and self.validation_data is not None:
            raise ValueError("workload.heldout_share: validation_data is given; leave one of them out")
        if self.target_loss is not None:
            if self.steps is None and high is None:
                raise ValueError(
                    "workload.target_loss: it may never be reached; set steps or max_period_seconds as well"
                )
            if self.evaluate_every is None and (self.heldout_share or self.validation_data is not None):
                raise ValueError(
                    "workload.evaluate_every: target_loss is that of the validation data; say after how many steps "
                    "it is evaluated"
                )
        return self

    @property
    def prepared(self) -> dict[str, object]:
        """What fixes how a model is wrapped and what it holds: visits that share it can share one prepared model."""
        return self.model_dump(
            mode="json",
            include={"task", "optimizer", "micro_batch_size", "activation_checkpointing", "sharding", "offload",
                     "compiled"},
        )  # fmt: skip

    @property
    def label(self) -> str:
        """What a table calls it: what differs from the plainest training is said."""
        task = "" if self.task == "causal_lm" else f"{self.task} "
        length = "" if self.task == "image_classification" else f" x {self.sequence_length}"
        pieces = "" if self.micro_batch_size is None else f" in {self.micro_batch_size}s"
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
