"""The process's default communicator, for callers without a communicator.

`MultiGPUOrchestrator.initialize` sets it; if a script has called `torch.distributed.init_process_group` itself, a
communicator is opened over that group at the first call, which all ranks must then make, and used while the group is
that one.

    world_communicator().all_reduce(tensor)
"""

import torch
import torch.distributed as dist

from engine.parallel.communicator import Communicator, open_communicators
from engine.parallel.grid import Grid

TIMEOUT_SECONDS = 60.0
_current: Communicator | None = None
_group_of_script: dist.ProcessGroup | None = None
"""The group over which `_current` was opened; None for an orchestrator's, which unsets it."""


def world_communicator() -> Communicator:
    """Return this process's communicator of all ranks; of one rank without a group."""
    global _group_of_script
    if _current is not None and _group_of_script in (None, dist.group.WORLD):
        return _current
    if dist.is_initialized() and dist.get_world_size() > 1:
        grid = Grid(dp=1, tp=dist.get_world_size(), pp=1, rank=dist.get_rank())
        device, backend = device_and_backend()
        communicator = open_communicators(grid, device, backend, TIMEOUT_SECONDS).world
        set_world_communicator(communicator)
        _group_of_script = dist.group.WORLD
        return communicator
    return Communicator((0,), 0)


def device_and_backend() -> tuple[torch.device, str]:
    """Return the device whose tensors the process's group exchanges, this process's GPU if it can, and their backend.

    A group made without a backend, or with one for each type of device, has no backend of one name.
    """
    by_type = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    if by_type.get("cuda") == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), "nccl"
    return torch.device("cpu"), by_type.get("cpu", str(dist.get_backend()))


def set_world_communicator(communicator: Communicator | None) -> None:
    """Set this process's communicator; None unsets it."""
    global _current, _group_of_script
    _current, _group_of_script = communicator, None


def check_device(communicator: Communicator, device: torch.device, what: str) -> None:
    """Raise ValueError for memory of a GPU in a group that shares memory of the host: C would read a wrong address."""
    if device.type != "cpu" and "shared memory" in communicator.transport:
        raise ValueError(
            f"{what}: is on {device}, but the ranks of this group exchange tensors on the CPU "
            f"({communicator.transport}); use the CPU, or a MultiGPUOrchestrator whose device is a GPU"
        )
