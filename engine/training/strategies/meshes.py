"""Device meshes over the ranks of a launch, cached for the launch: every measurement uses the same process groups.

mesh = mesh_of(context, {"replicas": 2, "shards": 4})      # the last axis has neighbouring ranks mesh["shards"]
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from engine.context import Context
from engine.parallel.communicator import choose_backend


def mesh_of(context: Context, axes: dict[str, int]) -> DeviceMesh:
    """Return a mesh of all ranks with this shape.

    It uses plain groups: `init_device_mesh` on gloo may abort a process at exit.

    All ranks call it in the same order.
    """
    shape = tuple(axes.values())
    key = f"mesh {axes}"
    if key not in context.kept:
        context.kept[key] = _made(context, tuple(axes), torch.arange(context.world_size).view(shape))
    mesh: DeviceMesh = context.kept[key]
    return mesh


def _made(context: Context, names: tuple[str, ...], ranks: torch.Tensor) -> DeviceMesh:
    if not dist.is_initialized():
        # Sharding over a single rank is measured too; it needs a group of one.
        assert context.world_size == 1
        dist.init_process_group(
            choose_backend(context.device), store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
        )
    limit = timedelta(seconds=context.job.measuring.group_timeout_seconds)
    mine: list[dist.ProcessGroup] = []
    for axis in range(ranks.dim()):
        for row in ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist():
            group = dist.new_group(row, timeout=limit)
            if context.rank in row:
                mine.append(group)
    if len(mine) == 1:
        return DeviceMesh.from_group(mine[0], context.device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(mine, context.device.type, mesh=ranks, mesh_dim_names=names)
