"""Table of strategies: plain functions that return a Trainer for a task.

    trainer = STRATEGIES[options.strategy](task, options, context)

none: one replica. ddp: whole replicas, gradients summed during the backward pass. fsdp: sharded over the replicas, or
over those of a node (hybrid). zero1, zero2, zero3: DeepSpeed's, imported only when chosen. All support activation
checkpointing; torch's support torch.compile, and tensor parallelism of our Llama.
"""

from torch.nn.parallel import DistributedDataParallel

from engine.context import Context
from engine.training.strategies.exposed import BucketHook, time_collectives, time_stream_waits
from engine.training.strategies.fsdp import data_mesh, is_replicated, replicate_parts, shard, tensor_mesh
from engine.training.strategies.recompute import compile_blocks, recompute
from engine.training.strategies.tensor import check_split, gather_logits, split
from engine.training.strategies.torch_trainer import TorchTrainer
from engine.training.trainer import Exposed, MakeTrainer, Task, Trainer, TrainerOptions


def _none(task: Task, options: TrainerOptions, context: Context) -> Trainer:
    _prepare(task, options, context)
    if options.tp > 1:
        gather_logits(task)
    return TorchTrainer(task, task.model, options, context, Exposed.of(options, context.device))


def _ddp(task: Task, options: TrainerOptions, context: Context) -> Trainer:
    """DistributedDataParallel; of buffers only running means are trained, on which ranks agree before they are used.

    It waits for the gradient of every weight, so that it must look for those without one where there are any.
    """
    if options.dp == 1:
        return _none(task, options, context)
    _prepare(task, options, context)
    exposed = Exposed.of(options, context.device)
    if options.tp > 1:
        replicas = replicate_parts(task, data_mesh(options, context))
        gather_logits(task)
        return TorchTrainer(task, task.model, options, context, exposed, replicas.set_requires_gradient_sync)
    devices = [context.device] if context.device.type == "cuda" else None
    module = DistributedDataParallel(
        task.model,
        device_ids=devices,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        find_unused_parameters=task.leaves_weights_out,
    )
    hook = BucketHook(exposed, module.process_group)
    module.register_comm_hook(None, hook.hand_over)

    def exchange(last: bool) -> None:
        # Equivalent to DistributedDataParallel.no_sync, which must wrap the forward pass.
        module.require_backward_grad_sync = last

    return TorchTrainer(task, module, options, context, exposed, exchange, hook.backward_ended)


def _fsdp(task: Task, options: TrainerOptions, context: Context) -> Trainer:
    """FSDP2; gradients of inner micro-batches are kept unsharded, so that only the last one reduces them."""
    _prepare(task, options, context)
    mesh = data_mesh(options, context)
    exposed = Exposed.of(options, context.device)
    module = shard(task, options, mesh, pinned=context.device.type == "cuda")
    if exposed.known:
        time_collectives(task.model, exposed, is_replicated(mesh))
    undo = time_stream_waits(exposed) if exposed.known else lambda: None
    if options.tp > 1:
        gather_logits(task)
    exchange = module.set_requires_gradient_sync
    return TorchTrainer(task, task.model, options, context, exposed, exchange, autocasts=False, undo=undo)


def _zero(task: Task, options: TrainerOptions, context: Context) -> Trainer:
    from engine.training.zero.trainer import make_zero

    return make_zero(task, options, context)


STRATEGIES: dict[str, MakeTrainer] = {
    "none": _none, "ddp": _ddp, "fsdp": _fsdp, "zero1": _zero, "zero2": _zero, "zero3": _zero,
}  # fmt: skip


def _prepare(task: Task, options: TrainerOptions, context: Context) -> None:
    if options.tp > 1:
        check_split(task, options.tp)
        split(task, tensor_mesh(options, context))
    recompute(task.blocks, options.activation_checkpointing)
    if options.compiled:
        compile_blocks(task.blocks)
