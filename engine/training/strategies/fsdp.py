"""FSDP2: every block's weights, gradients and optimizer states are sharded over the replicas.

    module = shard(task, options, data_mesh(options, context), pinned=False)

The model stays the same object; its parameters become DTensors. Blocks first, then the rest (embedding, last norm,
head), which stays gathered from the forward to the backward pass. Weights are kept in float32; for 16-bit cells, they
are gathered in 16 bits (those of batch norms in float32) and gradients are reduced in float32. Gradients are summed,
not averaged: losses are weighted by their shares of the step.
"""

import warnings

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from engine.context import Context
from engine.models.weights import DTYPES
from engine.training.strategies.meshes import mesh_of
from engine.training.trainer import Task, TrainerOptions


def shard(task: Task, options: TrainerOptions, mesh: DeviceMesh, pinned: bool) -> FSDPModule:
    """Shard the task's model in place. pinned: whether offloaded weights are in pinned memory for a GPU."""
    half = None if options.dtype == "float32" else DTYPES[options.dtype]
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=pinned) if options.offload == "cpu" else OffloadPolicy()
    if half is not None:
        # Their weights must have the type of their running means, which stay in float32.
        whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for norm in [module for module in task.model.modules() if isinstance(module, _BatchNorm)]:
            fully_shard(norm, mesh=mesh, mp_policy=whole, offload_policy=offload)
    for module in (*task.blocks, task.model):
        if not isinstance(module, FSDPModule):  # a block may be a batch norm
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return _summing(task)


def replicate_parts(task: Task, mesh: DeviceMesh) -> FSDPModule:
    """Replicate a model split by tensor parallelism, which DistributedDataParallel does not support.

    torch's `replicate` for DTensors: FSDP2 without sharding.
    """
    for module in (*task.blocks, task.model):
        replicate(module, mesh=mesh)
    return _summing(task)


def _summing(task: Task) -> FSDPModule:
    # A warning about logits that are a view; our losses do not write to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for module in [one for one in task.model.modules() if isinstance(one, FSDPModule)]:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    assert isinstance(task.model, FSDPModule)
    return task.model


def data_mesh(options: TrainerOptions, context: Context) -> DeviceMesh:
    """Return the data-parallel axes of the mesh, which also has `tensor` with tensor parallelism.

    One axis; for hybrid sharding two: replicas over nodes, shards over the ranks of a node. Raises ValueError if hybrid
    sharding has a single node or uneven nodes.
    """
    axes = {"shards": options.dp}
    if options.sharding == "hybrid":
        on_node = context.job.ranks_per_node // options.tp
        if on_node < 1 or options.dp % on_node or options.dp == on_node:
            raise ValueError(
                f"workload.sharding: hybrid shards over the {on_node} replicas of a node and replicates over nodes, "
                f"which dp={options.dp} does not fill; use at least two full nodes, or full"
            )
        axes = {"replicas": options.dp // on_node, "shards": on_node}
    if options.tp == 1:
        return mesh_of(context, axes)
    return mesh_of(context, axes | {"tensor": options.tp})[tuple(axes)]


def tensor_mesh(options: TrainerOptions, context: Context) -> DeviceMesh:
    """Return the axis of tensor parallelism."""
    return data_mesh(options, context)._get_root_mesh()["tensor"]


def is_replicated(mesh: DeviceMesh) -> bool:
    """Return whether shards are summed over replicas (hybrid sharding)."""
    return mesh.ndim == 2
