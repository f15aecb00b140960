"""Interfaces of training: tasks, batches, and trainers created by strategies.

    task = make_task(workload, context)                     # engine.training.task_types: model, loss, data
    trainer = STRATEGIES[strategy](task, options, context)  # engine.training.trainers
    loss = trainer.forward(batch); trainer.backward(loss, batch, last=True)
    end = trainer.step(rate)

The loop (`engine.training.steps`) defines the order of a step, the strategy synchronises replicas, and the task defines
the computation. The three depend only on the interfaces in this module.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from configs.common.execution import Dtype, Strategy
from configs.spec.cell import Cell
from configs.workloads.train import ActivationCheckpointing, Offload, Sharding, TrainWorkload
from engine.context import Context
from engine.rank.agreement import total
from engine.training.marks import Mark, between, mark

BETAS = (0.9, 0.95)
EPSILON = 1e-8
_MIN_LOSS_SCALE = 2.0**-14
"""Below the smallest normal number of float16, a smaller scale avoids no overflow."""


@dataclass(frozen=True)
class TrainingBatch:
    """One micro-batch of one rank, on its device: `inputs` by name, as the task's loss reads them.

    share: weight of its mean loss in the mean of the whole step (shares of all micro-batches and replicas sum to 1): 1
    / (dp x accumulation) if all have equally many targets. sequences, tokens: of this micro-batch; tokens counts
    computed positions.
    """

    inputs: dict[str, Tensor]
    share: float
    sequences: int
    tokens: int


@dataclass
class Task:
    """A training task: a model in float32 with gradients, on its device, and its loss.

    `blocks` are the modules that strategies shard and checkpoint one by one, in order. `loss(module, batch)` calls the
    module (which a strategy may have wrapped) and returns the mean loss over the batch's targets, in float32.
    `metrics(module, batch)`: for evaluation, sums by name (`loss`, `targets`, and `correct` where a class is
    predicted). `config`: of the exported Hugging Face folder; `export(state, folder)` writes it from a whole state.
    `make_optimizer`: for the wrapped model, instead of the options'; supported by torch's strategies only.
    `leaves_weights_out`: whether the loss does not depend on every trained weight, as on a token that only pretraining
    uses; computed where the strategy has to know it (ddp).
    """

    model: nn.Module
    blocks: list[nn.Module]
    loss: Callable[[nn.Module, TrainingBatch], Tensor]
    metrics: Callable[[nn.Module, TrainingBatch], dict[str, Tensor]]
    config: dict[str, Any]
    export: Callable[[dict[str, Tensor], Any], None]
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None
    leaves_weights_out: bool = False


@dataclass(frozen=True)
class TrainerOptions:
    """Options of a strategy, derived from a cell, with the accumulation computed.

    dtype: float32; bfloat16 and float16: of products (`torch.autocast`, float32 weights) for none and ddp, of gathered
    weights (MixedPrecisionPolicy, DeepSpeed) for the sharded ones, whose master weights stay float32. float16 uses loss
    scaling. gradient_clipping: the largest norm of the step's gradients over all parameters; None: never clipped.
    """

    strategy: Strategy
    dtype: Dtype
    dp: int
    tp: int
    micro_batch_size: int
    accumulation: int
    gradient_clipping: float | None
    optimizer: str
    learning_rate: float
    weight_decay: float
    activation_checkpointing: ActivationCheckpointing = "none"
    sharding: Sharding = "full"
    offload: Offload = "none"
    compiled: bool = False

    @classmethod
    def of(cls, cell: Cell) -> "TrainerOptions":
        """Return the options of a `train` cell."""
        work, layout = cell.workload, cell.layout
        assert isinstance(work, TrainWorkload)
        accumulation = work.accumulation(layout.dp)
        return cls(
            strategy=layout.strategy,
            dtype=cell.dtype,
            dp=layout.dp,
            tp=layout.tp,
            micro_batch_size=work.global_batch_size // layout.dp // accumulation,
            accumulation=accumulation,
            gradient_clipping=work.gradient_clipping,
            optimizer=work.optimizer,
            learning_rate=work.learning_rate,
            weight_decay=work.weight_decay,
            activation_checkpointing=work.activation_checkpointing,
            sharding=work.sharding,
            offload=work.offload,
            compiled=work.compiled,
        )


@dataclass(frozen=True)
class StepEnd:
    """Outcome of a step. norm: of the mean gradients over all parameters, before clipping, without any loss scale.

    applied: False if float16's gradients overflowed; weights are then unchanged and the loss scale is lowered.
    """

    norm: float
    applied: bool = True
    loss_scale: float | None = None


def check_finite(step: int, loss: float, end: StepEnd, rate: str, dtype: Dtype) -> None:
    """Raise FloatingPointError for a loss or norm that is no number, unless float16 may avoid it by a lower loss scale.

    rate: what the user calls the learning rate. dtype: of the run.
    """
    if not math.isfinite(loss) or (end.applied and not math.isfinite(end.norm)):
        wider = "" if dtype == "float32" else " or use dtype float32"
        raise FloatingPointError(f"step {step}: loss {loss}, gradient norm {end.norm}; lower {rate}{wider}")
    if not end.applied and end.loss_scale is not None and end.loss_scale < _MIN_LOSS_SCALE:
        raise FloatingPointError(
            f"step {step}: gradients are not finite at a loss scale of {end.loss_scale:g}; lower {rate} or use dtype "
            "bfloat16"
        )


@dataclass
class Exposed:
    """Exposed communication of this rank's step in seconds, and the bytes sent.

    Only waiting of the computing thread, or on a GPU of the computing stream, counts; overlapped communication does
    not. bytes: payload of this rank's collectives (for all-gather and reduce-scatter the whole tensor). known: False if
    waiting is not observable (within a model that is split by tensors). stream: the GPU's computing stream; its waits
    are `pending`, as pairs of events, until `settle` reads them.
    """

    seconds: float = 0.0
    bytes: int = 0
    calls: int = 0
    known: bool = True
    stream: torch.cuda.Stream | None = None
    pending: list[tuple[Mark, Mark]] = field(default_factory=list)

    @classmethod
    def of(cls, options: TrainerOptions, device: torch.device) -> "Exposed":
        """Return the one of a run that computes in the device's current stream."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(known=device.type in ("cpu", "cuda") and options.tp == 1, stream=stream)

    @contextmanager
    def waiting(self, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Time a block in which the thread, or the stream (None: the current one), only waits for other ranks.

        Other streams than the computing one may wait without holding it up.
        """
        if self.stream is not None and (stream or torch.cuda.current_stream()) != self.stream:
            yield
            return
        began = mark(self.stream is not None, self.stream)
        try:
            yield
        finally:
            self.waited(began)

    def waited(self, began: Mark) -> None:
        """Count the time since `began` as waiting."""
        if self.stream is None:
            self.seconds += between(began, mark(False))
        else:
            self.pending.append((began, mark(True, self.stream)))

    def settle(self) -> list[float]:
        """Return the seconds of the waits since the last call, and count them; the device must be synchronised."""
        found = [between(*pair) for pair in self.pending]
        self.pending.clear()
        self.seconds += sum(found)
        return found


class Trainer(Protocol):
    """A task trained with a strategy. All ranks make the same calls in the same order.

    `module` is what evaluation calls (through `Task.metrics`, on every rank alike: a sharded one gathers weights).
    """

    module: nn.Module
    exposed: Exposed

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Return the mean loss of a micro-batch, in float32, unscaled."""

    def backward(self, loss: Tensor, batch: TrainingBatch, last: bool) -> None:
        """Add the micro-batch's gradients, weighted by its share. Ranks reduce in the `last` one of the step only,
        except strategies that cannot keep whole gradients (see their docstrings).
        """

    def step(self, rate: float) -> StepEnd:
        """Clip, update with this learning rate, clear the gradients."""

    def evaluating(self) -> Any:
        """Return a context for calling `module` without gradients, in the precision of training."""

    def state(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint: {"model": ..., "optimizer": ...} with the names of the plain model, whole
        tensors or DTensors, so that torch's strategies can load each other's states.
        """

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state from `state`."""

    def whole_model(self) -> dict[str, Tensor]:
        """Return float32 weights by the plain model's names, unsharded, on the CPU of rank 0; {} elsewhere.

        All ranks call it.
        """

    def close(self) -> None:
        """Release hooks, files and memory; the task's model may be prepared again afterwards."""


MakeTrainer = Callable[[Task, TrainerOptions, Context], Trainer]


@dataclass
class TrainingHistory:
    """History of a run, including earlier attempts; part of every checkpoint.

    losses: of each step, the mean over the global batch (all ranks hold the same). norms: `StepEnd.norm`.
    evaluations: (steps done, sums of metrics). Seconds are of steps that this and earlier attempts measured.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    skipped: int = 0
    trained_seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Completed steps."""
        return len(self.losses)


def reduce_losses(history: TrainingHistory, unreduced: list[float], context: Context, copies: int = 1) -> None:
    """Append the latest steps' losses, summed over all ranks, to the history and forget them; ranks call it together.

    copies: ranks that hold the same loss, as those of a tensor-parallel group do.
    """
    if unreduced:
        history.losses += (total(torch.tensor(unreduced, dtype=torch.float64), context) / copies).tolist()
        unreduced.clear()
