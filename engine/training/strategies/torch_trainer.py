"""Trainer of torch's strategies: one rank, DDP and FSDP2, which differ only in the model's wrapper.

    trainer = TorchTrainer(task, module, options, context, exchange)

`module` is called; `exchange` sets whether the next micro-batch reduces gradients. All else is shared: precision, loss
scale, norm, clipping, optimizer, states.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from engine.context import Context
from engine.training.strategies.norms import clipping_factor, gradient_norm, scale_gradients
from engine.training.strategies.optimizers import make_optimizer, own_settings, set_rate
from engine.training.strategies.precision import LossScale, autocast
from engine.training.strategies.running_means import agree_on_running_means
from engine.training.trainer import Exposed, StepEnd, Task, TrainerOptions, TrainingBatch

Exchange = Callable[[bool], None]
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class TorchTrainer:
    """A task whose model is called as `module`, with an optimizer over its parameters (or this rank's shards).

    exchange(last): called before each micro-batch. backward_ended: called after each backward pass. autocasts: whether
    16-bit precision is torch.autocast's; FSDP2 gathers weights in 16 bits instead.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        options: TrainerOptions,
        context: Context,
        exposed: Exposed,
        exchange: Exchange = lambda last: None,
        backward_ended: Callable[[], None] = lambda: None,
        autocasts: bool = True,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """undo: called by `close`."""
        self.module = module
        self.exposed = exposed
        self.loss_scale = LossScale() if options.dtype == "float16" else None
        self._task, self._options, self._device = task, options, context.device
        self._exchange, self._backward_ended, self._undo = exchange, backward_ended, undo
        self._autocasts, self._ranks = autocasts, context.world_size
        self._optimizer = task.make_optimizer(module) if task.make_optimizer else make_optimizer(module, options)
        self._parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        self._begun = 0  # micro-batches of this step
        module.train()

    def forward(self, batch: TrainingBatch) -> Tensor:
        """Return the mean loss of a micro-batch, in float32, unscaled."""
        self._begun += 1
        self._exchange(self._begun == self._options.accumulation)
        with self._precision():
            return self._task.loss(self.module, batch)

    def backward(self, loss: Tensor, batch: TrainingBatch, last: bool) -> None:
        """Add the micro-batch's gradients. Gradients are reduced in the last one only; FSDP2 keeps unsharded ones until
        then, and gathers weights in each.
        """
        assert last == (self._begun == self._options.accumulation), (
            f"micro-batch {self._begun} of {self._options.accumulation} was {'' if last else 'not '}called the last"
        )
        weight = batch.share * (self.loss_scale.scale if self.loss_scale else 1.0)
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        self._backward_ended()

    def step(self, rate: float) -> StepEnd:
        """Clip, update with this learning rate, clear the gradients; no update if their norm is not finite."""
        self._begun = 0
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        norm = gradient_norm(self._parameters, self._device, self.exposed) / scale
        finite = math.isfinite(norm)
        applied = self.loss_scale.take(finite) if self.loss_scale else True
        if finite:
            scale_gradients(self._parameters, clipping_factor(norm, self._options.gradient_clipping) / scale)
            set_rate(self._optimizer, rate)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepEnd(norm, applied, scale if self.loss_scale else None)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Disable gradients and dropout, in the precision of training."""
        agree_on_running_means(self.module, self._ranks)
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), self._precision():
                yield
        finally:
            self.module.train(training)
            if isinstance(self.module, FSDPModule):
                self.module.reshard()  # the root stays gathered after a forward pass and would become stale

    def state(self) -> dict[str, Any]:
        """Return model and optimizer by the plain model's names; tensors share memory with the trained ones."""
        agree_on_running_means(self.module, self._ranks)
        fresh = not self._optimizer.state
        self._create_missing_states()
        state: dict[str, Any] = {
            "model": get_model_state_dict(self.module),
            "optimizer": get_optimizer_state_dict(self.module, self._optimizer, options=_BY_NAME),
        }
        if fresh:
            # torch ran a step without gradients to create the state, and counted it.
            for kept in self._optimizer.state.values():
                if "step" in kept:  # SGD has no step count
                    kept["step"].zero_()
        if self.loss_scale:
            state["loss_scale"] = self.loss_scale.state()
        return state

    def _create_missing_states(self) -> None:
        """Give parameters that had no gradient yet their optimizer states, as torch does before a first step.

        A resuming run has states of all parameters, and asks the checkpoint for each.
        """
        held, groups = self._optimizer.state, self._optimizer.param_groups
        without = [one for one in self._parameters if one.requires_grad and one not in held]
        if not held or not without:
            return
        with own_settings(self._optimizer):
            for group in groups:
                # Adam and others add the decay to the gradient, which would then not be zero.
                group |= {name: 0.0 for name in ("lr", "weight_decay") if name in group}
            for parameter in without:
                parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        for parameter in without:
            if "step" in held[parameter]:
                held[parameter]["step"].zero_()

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state`, of this or another of torch's strategies; the optimizer keeps its own settings."""
        set_model_state_dict(self.module, state["model"])
        with own_settings(self._optimizer):
            set_optimizer_state_dict(self.module, self._optimizer, state["optimizer"], options=_BY_NAME)
        if self.loss_scale and "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])

    def whole_model(self) -> dict[str, Tensor]:
        """Return weights and buffers, unsharded, on the CPU of rank 0; {} elsewhere.

        On a CPU they may be the live ones.
        """
        agree_on_running_means(self.module, self._ranks)
        return get_model_state_dict(self.module, options=_WHOLE)  # type: ignore[return-value]

    def close(self) -> None:
        """Release model, gradients and states."""
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        self._undo()
        self._exchange, self._backward_ended, self._undo = (lambda last: None), (lambda: None), (lambda: None)
        self._parameters = []
        del self.module, self._optimizer, self._task

    def _precision(self) -> AbstractContextManager[None]:
        return autocast(self._device, self._options.dtype) if self._autocasts else nullcontext()
