"""DeepSpeed's ZeRO 1, 2 and 3 as a trainer: optimizer states, gradients and weights shared out over the replicas.

    trainer = make_zero(task, options, context)        # layout.strategy zero1, zero2 or zero3

Float32 master weights whatever the dtype: bfloat16 and float16 are those of the weights that are computed with, and of
the gradients, which are summed in that type over micro-batches (the library's default). Stage 1 exchanges in the last
micro-batch of a step only; stages 2 and 3 have no place for whole gradients and exchange in each. Offloading: of stages
1 and 2 the optimizer, of stage 3 the weights, too; NVMe is stage 3's. Tensor parallelism is the library's own
(AutoTP): blocks of our Llama are split as `strategies.tensor` splits them, embedding and head are whole on each rank.

A prepared model is spent afterwards: its weights have another type, or lie in pieces.
"""

import contextlib
import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.context import Context
from engine.training.strategies.fsdp import data_mesh, tensor_mesh
from engine.training.strategies.optimizers import make_optimizer, set_rate
from engine.training.strategies.recompute import compile_blocks, recompute
from engine.training.strategies.tensor import check_split
from engine.training.trainer import Batch, Exposed, Options, StepEnd, Task
from engine.training.zero import checkpoint as zero_checkpoint
from engine.training.zero.settings import zero_config
from engine.training.zero.start import need_supported, set_groups, start_deepspeed, swap_folder
from engine.training.zero.waits import watch


def make_zero(task: Task, options: Options, context: Context) -> "ZeroTrainer":
    """Prepare the task's model.

    Before anything is changed, raises NotImplementedError for what cannot be done here, and ValueError for a model
    that tp ranks cannot share.
    """
    deepspeed = start_deepspeed(context)
    need_supported(options, context)
    if options.tp > 1:
        check_split(task, options.tp, vocabulary=False)
        tensor, data = (mesh(options, context).get_group() for mesh in (tensor_mesh, data_mesh))
        set_groups(tensor, data)
    else:
        set_groups(None, None)  # an earlier visit's
    elements = sum(parameter.numel() for parameter in task.model.parameters())
    folder = swap_folder(context) if options.offload == "nvme" else None
    recompute(task.blocks, options.activation_checkpointing)
    if options.compiled:
        compile_blocks(task.blocks)
    # Stage 3 puts its own in the place of torch's, which the next visit must not find.
    linear = functional.linear
    engine, *_ = deepspeed.initialize(
        model=task.model,
        optimizer=task.make_optimizer(task.model) if task.make_optimizer else make_optimizer(task.model, options),
        config=zero_config(options, elements, folder),
    )
    exposed = Exposed(known=context.device.type == "cpu" and options.tp == 1)
    stop_watching = watch(deepspeed, exposed)

    def undo() -> None:
        stop_watching()
        functional.linear = linear
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    return ZeroTrainer(engine, task, options, context, exposed, undo)


class ZeroTrainer:
    """A DeepSpeed engine as `engine.training.trainer.Trainer` asks for it, with checkpoints of its own."""

    def __init__(
        self, engine: Any, task: Task, options: Options, context: Context, exposed: Exposed, undo: Callable[[], None]
    ) -> None:
        self.module: nn.Module = engine
        self.exposed = exposed
        self._engine, self._task, self._options, self._context = engine, task, options, context
        self._undo = undo

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch."""
        return self._task.loss(self.module, batch)

    def backward(self, loss: Tensor, batch: Batch, last: bool) -> None:
        """Add the micro-batch's gradients. The library averages over replicas where a share is of their sum."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * (batch.share * self._options.dp), scale_wrt_gas=False)

    def step(self, rate: float) -> StepEnd:
        """Clip, update, forget the gradients; where they are not finite, weights stay as they are."""
        set_rate(self._engine.optimizer, rate)
        scaled = self._options.dtype == "float16"
        scale = float(self._engine.optimizer.loss_scale) if scaled else None
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        return StepEnd(norm, applied=not scaled or self._engine.was_step_applied(), loss_scale=scale)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients; weights have the precision of training already."""
        training = self._engine.module.training
        self._engine.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.module.train(training)

    def state(self) -> dict[str, Any]:
        """Raises ValueError: states lie in flat pieces that no other strategy can read; there is `save` for them."""
        raise ValueError(
            f"layout.strategy: {self._options.strategy} goes on from checkpoints of its own only; use the strategy "
            "that wrote the checkpoint, or remove it to begin anew"
        )

    def load(self, state: dict[str, Any]) -> None:
        """Raises ValueError, as `state` does; there is `restore`."""
        self.state()

    def save(self, folder: Path) -> None:
        """Each rank its own part below `folder`, which all ranks see; on disk when this returns."""
        zero_checkpoint.save(self._engine, folder)

    def restore(self, folder: Path) -> None:
        """What `save` left, by as many ranks. Raises ValueError for another number of ranks."""
        zero_checkpoint.restore(self._engine, folder, self._options.tp)

    def whole_model(self) -> dict[str, Tensor]:
        """Float32 weights by name, on rank 0."""
        return zero_checkpoint.whole_model(self._task.model, self._options.tp, keep=self._context.rank == 0)

    def close(self) -> None:
        """Give up hooks, swap files and memory."""
        self._engine.destroy()
        self._undo()
        # Stage 3's parts hold each other through autograd, where Python cannot see it: what is large goes by hand.
        vars(self._engine.basic_optimizer).clear()
        vars(self._engine.optimizer).clear()
        for parameter in self._task.model.parameters():
            vars(parameter).clear()
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
        del self.module, self._engine, self._task, self._undo
        gc.collect()
