"""What the parts of training agree on: a task, its batches, and a trainer that a strategy makes of them.

    task = make_task(workload, context)                     # engine.training.task_types: model, loss, data
    trainer = STRATEGIES[strategy](task, options, context)  # engine.training.strategies.table
    loss = trainer.forward(batch); trainer.backward(loss, batch, last=True)
    end = trainer.step(rate)

The order of a step is the loop's (`engine.training.steps`); how ranks keep replicas equal is the strategy's; what is
computed is the task's. None of the three knows the other two beyond what stands here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from configs.cell import Cell, Dtype, Strategy
from configs.training import ActivationCheckpointing, Offload, Sharding, TrainWorkload
from engine.context import Context

BETAS = (0.9, 0.95)
EPSILON = 1e-8


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, on its device: `inputs` by name, as the task's loss reads them.

    share: what its mean loss counts in the mean of the whole step (over micro-batches and replicas, where the shares
    sum up to 1): 1 / (dp x accumulation) where all hold as many targets. sequences, tokens: of this micro-batch; tokens
    counts positions that are computed.
    """

    inputs: dict[str, Tensor]
    share: float
    sequences: int
    tokens: int


@dataclass
class Task:
    """What is trained: a model in float32 with gradients on, on its device, and how a batch becomes a loss.

    `blocks` are the modules that strategies shard and checkpoint one by one, in order. `loss(module, batch)` calls the
    module (which a strategy may have wrapped) and returns the mean loss over the batch's targets, in float32.
    `metrics(module, batch)`: for evaluation, sums by name (`loss`, `targets`, and `correct` where a class is
    predicted). `config`: of the exported Hugging Face folder; `export(state, folder)` writes it from a whole state.
    `make_optimizer`: of the wrapped model, where the options' is not wanted; torch's strategies alone take it.
    """

    model: nn.Module
    blocks: list[nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    metrics: Callable[[nn.Module, Batch], dict[str, Tensor]]
    config: dict[str, Any]
    export: Callable[[dict[str, Tensor], Any], None]
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None


@dataclass(frozen=True)
class Options:
    """What a strategy is asked to do; of a cell, with the accumulation worked out.

    dtype: float32; bfloat16 and float16: of products (`torch.autocast`, float32 weights) for none and ddp, of gathered
    weights (MixedPrecisionPolicy, DeepSpeed) for the sharded ones, whose master weights stay float32. float16 scales
    its losses. gradient_clipping: the largest norm of the step's gradients over all parameters; None: never clipped.
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
    def of(cls, cell: Cell) -> "Options":
        """Of a `train` cell."""
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
    """How a step ended. norm: of the mean gradients over all parameters, before clipping, without any loss scale.

    applied: False where float16's gradients overflowed, so that weights stayed and the loss scale was lowered.
    """

    norm: float
    applied: bool = True
    loss_scale: float | None = None


@dataclass
class Exposed:
    """Seconds in which this rank's step stood still for communication, and what it sent for it.

    Only what is waited for in the thread that computes counts: communication behind computing costs nothing here.
    bytes: payload that this rank handed to collectives (of an all-gather and a reduce-scatter the whole tensor).
    known: False where waiting cannot be seen from here (CUDA: the profile pass tells).
    """

    seconds: float = 0.0
    bytes: int = 0
    calls: int = 0
    known: bool = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what only waits for other ranks."""
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - began


class Trainer(Protocol):
    """A task in the hands of a strategy. All ranks make the same calls in the same order.

    `module` is what evaluation calls (through `Task.metrics`, on every rank alike: a sharded one gathers weights).
    """

    module: nn.Module
    exposed: Exposed

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch, in float32, unscaled."""

    def backward(self, loss: Tensor, batch: Batch, last: bool) -> None:
        """Add the micro-batch's gradients, weighed by its share. Ranks exchange in the `last` one of the step only,
        but for strategies that have no place to keep whole gradients (their docstrings say so)."""

    def step(self, rate: float) -> StepEnd:
        """Clip, update with this learning rate, forget the gradients."""

    def evaluating(self) -> Any:
        """A context in which `module` is called without gradients, in the precision of training."""

    def state(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint: {"model": ..., "optimizer": ...} with the names of the plain model, whole
        tensors or DTensors, so that any strategy of torch's can load what another has saved."""

    def load(self, state: dict[str, Any]) -> None:
        """Take up a state of the form that `state` gives."""

    def whole_model(self) -> dict[str, Tensor]:
        """Float32 weights by the plain model's names, whole, on the CPU of rank 0; {} elsewhere. All ranks call."""

    def close(self) -> None:
        """Give up hooks, files and memory; the task's model may be prepared anew afterwards."""


MakeTrainer = Callable[[Task, Options, Context], Trainer]


@dataclass
class History:
    """What a run has done so far: part of every checkpoint, so that a resumed run tells one story.

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
        """Steps done."""
        return len(self.losses)
