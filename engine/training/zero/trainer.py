"""DeepSpeed's ZeRO 1, 2 and 3 as a trainer: optimizer states, gradients and weights sharded over the replicas.

    trainer = make_zero(task, options, context)        # layout.strategy zero1, zero2 or zero3

Master weights are always float32; bfloat16 and float16 are the format of the working weights, and of the gradients,
which are summed in that type over micro-batches (the library's default). Stage 1 reduces in the last micro-batch of a
step only; stages 2 and 3 keep no whole gradients and reduce in each. Offloading: the optimizer in stages 1 and 2, the
weights too in stage 3; NVMe in stage 3 only. Tensor parallelism is the library's own (AutoTP): blocks of our Llama are
split as `strategies.tensor` splits them, embedding and head are whole on each rank.

A prepared model cannot be reused: its weights have another type, or are partitioned.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from engine.context import Context
from engine.models.weights import DTYPES
from engine.rank.agreement import raise_on_all_ranks
from engine.training.strategies.exposed import time_stream_waits
from engine.training.strategies.fsdp import data_mesh, tensor_mesh
from engine.training.strategies.optimizers import make_optimizer, set_rate
from engine.training.strategies.recompute import compile_blocks, recompute
from engine.training.strategies.running_means import agree_on_running_means
from engine.training.strategies.tensor import check_split
from engine.training.trainer import Exposed, StepEnd, Task, TrainerOptions, TrainingBatch
from engine.training.zero import checkpoint as zero_checkpoint
from engine.training.zero.settings import zero_config
from engine.training.zero.start import need_supported, set_groups, start_deepspeed
from engine.training.zero.swap import SwapFolder
from engine.training.zero.waits import record_waits


def make_zero(task: Task, options: TrainerOptions, context: Context) -> "ZeroTrainer":
    """Prepare the task's model.

    Raises, before any change, NotImplementedError for unsupported features, ValueError for a model that tp ranks cannot
    split, and on all ranks what keeps one from making its folder for NVMe.
    """
    deepspeed = start_deepspeed(context)
    need_supported(options, context)
    if options.dtype != "float32" and any(isinstance(module, _BatchNorm) for module in task.model.modules()):
        raise NotImplementedError(
            f"dtype: {options.dtype} with DeepSpeed gives batch norms 16-bit weights beside running means in float32, "
            "which torch does not compute; use ddp or fsdp, or float32"
        )
    if options.tp > 1:
        check_split(task, options.tp, vocabulary=False)
        tensor, data = (mesh(options, context).get_group() for mesh in (tensor_mesh, data_mesh))
        set_groups(tensor, data)
    else:
        set_groups(None, None)  # an earlier measurement's
    elements = sum(parameter.numel() for parameter in task.model.parameters())
    # Agreed on: a rank that fails alone leaves the others waiting in the library.
    swap = raise_on_all_ranks(lambda: SwapFolder(context), context) if options.offload == "nvme" else None
    recompute(task.blocks, options.activation_checkpointing)
    if options.compiled:
        compile_blocks(task.blocks)
    # Stage 3 replaces functions of torch, which the next measurement must not use.
    linear = functional.linear
    engine, *_ = deepspeed.initialize(
        model=task.model,
        optimizer=task.make_optimizer(task.model) if task.make_optimizer else make_optimizer(task.model, options),
        config=zero_config(options, elements, swap.path if swap else None),
    )
    casting = _cast_inputs(task.model, DTYPES[options.dtype])
    exposed = Exposed.of(options, context.device)
    stop_watching, stop_timing = record_waits(deepspeed, exposed), time_stream_waits(exposed)

    def undo() -> None:
        casting.remove()
        stop_watching()
        stop_timing()
        functional.linear = linear
        if swap is not None:
            swap.close()

    return ZeroTrainer(engine, task, options, context, exposed, undo)


def _cast_inputs(model: nn.Module, dtype: torch.dtype) -> RemovableHandle:
    """Cast a model's floating-point inputs to the type of its working weights, as FSDP2 does: not all models of images
    do it themselves.
    """

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(cast, given)), {name: cast(value) for name, value in named.items()}

    return model.register_forward_pre_hook(before, with_kwargs=True)


class ZeroTrainer:
    """A DeepSpeed engine as `engine.training.trainer.Trainer`, with its own checkpoints."""

    def __init__(
        self,
        engine: Any,
        task: Task,
        options: TrainerOptions,
        context: Context,
        exposed: Exposed,
        undo: Callable[[], None],
    ) -> None:
        self.module: nn.Module = engine
        self.exposed = exposed
        self._engine, self._task, self._options, self._context = engine, task, options, context
        self._undo = undo

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Return the mean loss of a micro-batch."""
        return self._task.loss(self.module, batch)

    def backward(self, loss: Tensor, batch: TrainingBatch, last: bool) -> None:
        """Add the micro-batch's gradients. The library averages over replicas; shares are of the sum."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * (batch.share * self._options.dp), scale_wrt_gas=False)

    def step(self, rate: float) -> StepEnd:
        """Clip, update, clear the gradients; weights are unchanged if these are not finite."""
        set_rate(self._engine.optimizer, rate)
        scaled = self._options.dtype == "float16"
        scale = float(self._engine.optimizer.loss_scale) if scaled else None
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        return StepEnd(norm, applied=not scaled or self._engine.was_step_applied(), loss_scale=scale)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Disable gradients; weights already have the precision of training."""
        agree_on_running_means(self._engine.module, self._context.world_size)
        training = self._engine.module.training
        self._engine.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.module.train(training)

    def state(self) -> dict[str, Any]:
        """Raises ValueError: states are flat partitions that no other strategy can read; use `save`."""
        raise ValueError(
            f"layout.strategy: {self._options.strategy} goes on from checkpoints of its own only; use the strategy "
            "that wrote the checkpoint, or remove it to begin anew"
        )

    def load(self, state: dict[str, Any]) -> None:
        """Raises ValueError, as `state`; use `restore`."""
        self.state()

    def save(self, folder: Path) -> None:
        """Save each rank's part in `folder`, which all ranks see; on disk when this returns."""
        agree_on_running_means(self._engine.module, self._context.world_size)
        zero_checkpoint.save(self._engine, folder)

    def restore(self, folder: Path) -> None:
        """Restore from `save`, on the same number of ranks. Raises ValueError for another number of ranks."""
        zero_checkpoint.restore(self._engine, folder, self._options.tp)

    def whole_model(self) -> dict[str, Tensor]:
        """Return float32 weights by name, on rank 0."""
        agree_on_running_means(self._engine.module, self._context.world_size)
        return zero_checkpoint.whole_model(self._task.model, self._options.tp, keep=self._context.rank == 0)

    def close(self) -> None:
        """Release hooks, swap files and memory."""
        self._engine.destroy()
        self._undo()
        # Stage 3's objects reference each other through autograd, invisibly to Python's collector: large ones are freed
        # explicitly.
        vars(self._engine.basic_optimizer).clear()
        vars(self._engine.optimizer).clear()
        for parameter in self._task.model.parameters():
            vars(parameter).clear()
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
        del self.module, self._engine, self._task, self._undo
        gc.collect()
