"""Process place in a multi-node job, and basic collectives for scripts.

    if is_master_process():
        print(get_node_info())
    loss = all_reduce_tensor(loss, op="mean")

They use the default process group, if there is one; without one this process is alone. Places come from the
environment: MASTER_ADDR, MASTER_PORT, NNODES, NPROC_PER_NODE, NODE_RANK, LOCAL_RANK, WORLD_SIZE, with torchrun's names
as fallback. Every process of the job must make the collective calls.
"""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from engine.rank.gloo_threads import wait_at_exit

_OPERATIONS = ("mean", "sum", "min", "max", "product")


def barrier() -> None:
    """Return when every process of the job has called it."""
    if dist.is_initialized():
        wait_at_exit()
        dist.barrier()


def all_reduce_tensor(tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
    """Return a new tensor of the same shape: the `mean`, `sum`, `min`, `max` or `product` over all processes.

    A mean of integers or booleans is a float. Raises ValueError for another `op`.
    """
    if op not in _OPERATIONS:
        raise ValueError(f"op: {op!r} is not one of {', '.join(_OPERATIONS)}")
    # Processes exchange elements in the order of memory, which a clone takes from its source: it may differ among them.
    reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
    if op == "mean":
        reduced = reduced.to(_summed_in(tensor.dtype))
    if dist.is_initialized():
        wait_at_exit()
        ways = dist.ReduceOp
        way = {"min": ways.MIN, "max": ways.MAX, "product": ways.PRODUCT}.get(op, ways.SUM)
        dist.all_reduce(reduced, op=way)
    if op != "mean":
        return reduced
    mean = reduced / _world_size_now()
    return mean.to(tensor.dtype) if tensor.dtype.is_floating_point else mean


def gather_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every process's tensor, in order of ranks; shapes and types must be equal."""
    own = tensor.detach().contiguous()
    if not dist.is_initialized():
        return [own.clone()]
    wait_at_exit()
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return gathered


def is_master_node() -> bool:
    """Return whether this process runs on the first node."""
    return _node_rank() == 0


def is_master_process() -> bool:
    """Return whether this is the first process of the job."""
    return _rank() == 0


def get_node_info() -> dict[str, Any]:
    """Return places and addresses: a dict of the documented variables in lower case, and derived values."""
    initialized = dist.is_initialized()
    return {
        "master_addr": os.environ.get("MASTER_ADDR", "localhost"),
        "master_port": _integer("MASTER_PORT", default=29500),
        "nnodes": _nodes(),
        "nproc_per_node": _processes_per_node(),
        "node_rank": _node_rank(),
        "local_rank": _integer("LOCAL_RANK", default=0),
        "rank": _rank(),
        "world_size": dist.get_world_size() if initialized else _integer("WORLD_SIZE", default=_planned_processes()),
        "hostname": socket.gethostname(),
        "backend": str(dist.get_backend()) if initialized else None,
        "is_initialized": initialized,
        "is_master_node": is_master_node(),
        "is_master_process": is_master_process(),
    }


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values are added for a mean: a sum of them may be too large for their own."""
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    return torch.int64


def _world_size_now() -> int:
    """Return the size of the process group; 1 without one, regardless of the environment."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _nodes() -> int:
    return _integer("NNODES", "GROUP_WORLD_SIZE", default=2)


def _processes_per_node() -> int:
    return _integer("NPROC_PER_NODE", "LOCAL_WORLD_SIZE", default=2)


def _planned_processes() -> int:
    return _nodes() * _processes_per_node()


def _node_rank() -> int:
    return _integer("NODE_RANK", "GROUP_RANK", default=0)


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return _integer("RANK", default=_node_rank() * _processes_per_node() + _integer("LOCAL_RANK", default=0))


def _integer(*names: str, default: int) -> int:
    """Return the first of the variables that is set. Raises ValueError if it is not a whole number."""
    for name in names:
        text = os.environ.get(name)
        if text:
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"{name}={text!r} is not a whole number") from None
    return default
