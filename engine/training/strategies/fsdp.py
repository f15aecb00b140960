"""FSDP2: every block's weights, gradients and optimizer states shared out over the replicas.

    module = shard(task, options, data_mesh(options, context), pinned=False)

The model stays the same object; its parameters become DTensors. Blocks first, then what is left (embedding, last norm,
head), which stays gathered from the forward to the backward pass. Weights are kept in float32; where the cell asks for
16 bits, they are gathered in them and gradients are reduced in float32. Gradients are summed, not averaged: losses are
weighted by their shares of the step.
"""

import warnings

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from engine.context import Context
from engine.training.strategies.meshes import mesh_of
from engine.training.trainer import Options, Task
from engine.weights import DTYPES


def shard(task: Task, options: Options, mesh: DeviceMesh, pinned: bool) -> FSDPModule:
    """Shard the task's model in place. pinned: whether offloaded weights lie where a GPU can fetch them."""
    half = None if options.dtype == "float32" else DTYPES[options.dtype]
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=pinned) if options.offload == "cpu" else OffloadPolicy()
    for module in (*task.blocks, task.model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return _summing(task)


def replicate_parts(task: Task, mesh: DeviceMesh) -> FSDPModule:
    """Keep whole replicas of a model that tensor parallelism has split, which DistributedDataParallel cannot hold.

    torch's `replicate` for DTensors: the machinery of FSDP2 without its sharding.
    """
    for module in (*task.blocks, task.model):
        replicate(module, mesh=mesh)
    return _summing(task)


def _summing(task: Task) -> FSDPModule:
    # Said of logits that are a view of something; no loss of ours writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for module in (*task.blocks, task.model):
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    assert isinstance(task.model, FSDPModule)
    return task.model


def data_mesh(options: Options, context: Context) -> DeviceMesh:
    """The axes of data parallelism, of a mesh that has `tensor` too where there is tensor parallelism.

    One axis; for hybrid sharding two: nodes hold replicas, the ranks of a node share one out. Raises ValueError where
    hybrid sharding finds no nodes to replicate over, or uneven ones.
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


def tensor_mesh(options: Options, context: Context) -> DeviceMesh:
    """The axis of tensor parallelism."""
    return data_mesh(options, context)._get_root_mesh()["tensor"]


def is_replicated(mesh: DeviceMesh) -> bool:
    """Whether shards are summed over replicas (hybrid sharding)."""
    return mesh.ndim == 2
