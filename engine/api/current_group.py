"""The process's default communicator, for callers without a communicator.

`MultiGPUOrchestrator.initialize` sets it; if a script has called `torch.distributed.init_process_group` itself, a
communicator is opened over that group at the first call, which all ranks must then make.

    world_communicator().all_reduce(tensor)
"""

import torch
import torch.distributed as dist

from engine.parallel.communicator import Communicator, open_communicators
from engine.parallel.grid import Grid

TIMEOUT_SECONDS = 60.0
_current: Communicator | None = None


def world_communicator() -> Communicator:
    """Return this process's communicator of all ranks; of one rank without a group."""
    if _current is not None:
        return _current
    if dist.is_initialized() and dist.get_world_size() > 1:
        grid = Grid(dp=1, tp=dist.get_world_size(), pp=1, rank=dist.get_rank())
        backend = str(dist.get_backend())
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        communicator = open_communicators(grid, device, backend, TIMEOUT_SECONDS).world
        set_world_communicator(communicator)
        return communicator
    return Communicator((0,), 0)


def set_world_communicator(communicator: Communicator | None) -> None:
    """Set this process's communicator; None unsets it."""
    global _current
    _current = communicator
