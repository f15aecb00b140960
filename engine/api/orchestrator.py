"""One process of a group of ranks: device, group, health check, and recovery after a lost rank.

    orchestrator = MultiGPUOrchestrator(rank=rank, world_size=4)         # a process for each rank
    orchestrator.initialize(master_addr="10.0.0.1", master_port=29500)
    orchestrator.barrier()
    if not orchestrator.check_health():
        orchestrator.attempt_recovery()          # the remaining ranks continue
    orchestrator.cleanup()

Groups are those of `engine.parallel`, with their time limit and their errors for a lost peer. After a recovery ranks
are renumbered without gaps.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.api.current_group import TIMEOUT_SECONDS, set_world_communicator
from engine.api.membership import Membership
from engine.parallel.communicator import (
    CommunicationEvent,
    Communicator,
    Communicators,
    PeerLostError,
    choose_backend,
    open_communicators,
)
from engine.parallel.grid import Grid
from engine.rank.devices import Claim, claim_device
from engine.rank.gloo_threads import wait_at_exit

BACKENDS = ("nccl", "gloo", "mpi")
_log = logging.getLogger(__name__)
_in_use: set[Claim] = set()
"""Devices of groups, which scripts use by functions too, whatever became of the orchestrator."""


@dataclass
class _Times:
    """Durations of this rank's operations, including waiting for other ranks; with NCCL of their submission."""

    count: int = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0
    size_bytes: int = 0

    def add(self, event: CommunicationEvent) -> None:
        seconds = event.ended - event.began
        self.least = min(self.least, seconds) if self.count else seconds
        self.most = max(self.most, seconds)
        self.count += 1
        self.total += seconds
        self.size_bytes += event.size_bytes


class MultiGPUOrchestrator:
    """This process as rank `rank` of `world_size`.

    backend: nccl, gloo or mpi; if unavailable on this device, the engine's default is used, see `self.backend`. device:
    such as cuda:0 or cpu; None selects an idle accelerator that no other run has locked, else the CPU. timeout_seconds:
    of one collective, and of waiting for the other ranks.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str = "nccl",
        device: str | None = None,
        enable_monitoring: bool = True,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank: {rank} is not one of world_size={world_size}; ranks are numbered from 0")
        if backend not in BACKENDS:
            raise ValueError(f"backend: {backend!r} is not known; use one of: {', '.join(BACKENDS)}")
        self._claim = claim_device(device)
        self.requested_backend = backend
        self.backend = _usable_backend(backend, self._claim.device)
        if self.backend != backend:
            _log.info("backend %s is not to be had on %s: %s is used", backend, self._claim.device, self.backend)
        self._first_rank, self._first_world_size = rank, world_size
        self._timeout_seconds = timeout_seconds
        self._monitoring = enable_monitoring
        self._members = list(range(world_size))
        self._generation = 0
        self._lost: set[int] = set()
        self._meeting: Membership | None = None
        self._communicators: Communicators | None = None
        self._began: float | None = None
        self._times = _Times()
        self._failures = 0
        self._recoveries = 0

    def initialize(self, master_addr: str = "127.0.0.1", master_port: int = 29500) -> None:
        """Join the other ranks at rank 0's address; returns when all have arrived.

        Raises TimeoutError naming the missing ranks, ValueError if the port is taken or the process has a group
        already, RuntimeError if a rank is lost meanwhile. After cleanup() all `world_size` ranks may join again, those
        lost before included, at another port; each takes its device again, and shares it where another run has
        taken it since.
        """
        if self._communicators is not None:
            raise ValueError("initialize: this orchestrator is initialized already; call cleanup() first")
        if dist.is_initialized():
            raise ValueError(
                "initialize: this process has a group of torch.distributed already, and can have one; "
                "destroy it first, or use it through engine.barrier and its neighbours"
            )
        if self._claim.released:  # by cleanup(): other runs would take the device for idle
            self._claim = claim_device(str(self._claim.device))
        if self._claim.device.type == "cuda":
            torch.cuda.set_device(self._claim.device)
        # A recovery has renumbered the ranks; those that join now do not know of it.
        self._members, self._lost, self._generation = list(range(self._first_world_size)), set(), 0
        try:
            if self._first_world_size > 1:
                self._meeting = Membership(
                    self._first_rank, self._first_world_size, master_addr, master_port, self._timeout_seconds
                )
                self._meeting.wait_for_all()
            self._began = time.monotonic()
            self._form()
            _in_use.add(self._claim)
        except BaseException:
            # Else a further attempt would find the port taken, or a group, by this one.
            self._leave_group()
            if self._meeting is not None:
                self._meeting.close()
                self._meeting = None
            self._began = None
            raise

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._communicator().barrier()

    def get_rank(self) -> int:
        """Return this rank's current number."""
        return self._members.index(self._first_rank)

    def get_world_size(self) -> int:
        """Return the current number of ranks."""
        return len(self._members)

    def get_device(self) -> torch.device:
        """Return the device of this rank."""
        return self._claim.device

    def is_master(self) -> bool:
        """Return whether this is currently rank 0."""
        return self.get_rank() == 0

    def cleanup(self) -> None:
        """Leave the group and release the device; may be called again."""
        self._leave_group()
        self._meeting = None
        _in_use.discard(self._claim)
        self._claim.release()

    def check_health(self) -> bool:
        """Return whether an all-reduce over all ranks is correct within the time limit. All ranks must call it."""
        if self._communicators is None:
            return False
        try:
            ones = self._communicator().all_reduce(torch.ones(1, device=self.get_device()))
            healthy = int(ones.item()) == self.get_world_size()
        except RuntimeError as error:
            _log.warning("rank %d: %s", self.get_rank(), error)
            if isinstance(error, PeerLostError) and error.rank is not None and not error.silent:
                self._lost.add(self._members[error.rank])
            healthy = False
        self._failures += not healthy
        return healthy

    def attempt_recovery(self) -> bool:
        """Recreate the group with the remaining ranks; return whether this rank is in a healthy one.

        All live ranks must call it. It waits for ranks not known to be lost, up to the time limit; ranks are
        renumbered. Also False if this orchestrator has no group.
        """
        if self._began is None or (self._meeting is None and self._first_world_size > 1):
            return False
        expected = set(self._members) - self._lost
        self._leave_group()
        self._generation += 1
        try:
            if self._meeting is not None:
                found = self._meeting.assemble(self._generation, expected)
                if found is None:
                    _log.warning("recovery: the other ranks cannot be reached, or went on without this one")
                    return False
                self._members = found
            self._form()
        except RuntimeError as error:  # a rank was lost in the meantime
            _log.warning("recovery failed: %s", error)
            return False
        self._recoveries += 1
        return self.check_health()

    def get_performance_stats(self) -> dict[str, Any]:
        """Return statistics since initialize(). Times are seconds; without any operation they are 0.

        `communication_time` is of this rank's operations with count, total, mean, min and max; with
        enable_monitoring=False its count is 0. With NCCL it is the time to submit them to the GPU, which is not waited
        for; a barrier waits.
        """
        times = self._times
        return {
            "uptime_seconds": 0.0 if self._began is None else time.monotonic() - self._began,
            "failure_count": self._failures,
            "recovery_count": self._recoveries,
            "rank": self.get_rank(),
            "world_size": self.get_world_size(),
            "device": str(self.get_device()),
            "backend": self.backend,
            "requested_backend": self.requested_backend,
            "transport": "none" if self._communicators is None else self._communicators.world.transport,
            "communication_bytes": times.size_bytes,
            "communication_time": {
                "count": times.count,
                "total": times.total,
                "mean": times.total / times.count if times.count else 0.0,
                "min": times.least,
                "max": times.most,
            },
        }

    def _communicator(self) -> Communicator:
        if self._communicators is None:
            raise ValueError("this orchestrator has no group; call initialize() first")
        return self._communicators.world

    def _form(self) -> None:
        rank, size = self.get_rank(), self.get_world_size()
        if size > 1:
            assert self._meeting is not None
            wait_at_exit()
            dist.init_process_group(
                self.backend,
                store=self._meeting.store(f"group-{self._generation}"),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=self._timeout_seconds),
            )
        grid = Grid(dp=1, tp=size, pp=1, rank=rank)
        self._communicators = open_communicators(grid, self.get_device(), self.backend, self._timeout_seconds)
        world = self._communicators.world
        if self._monitoring:
            world.listener = self._times.add
        set_world_communicator(world)
        world.barrier()

    def _leave_group(self) -> None:
        if self._communicators is not None:
            self._communicators.close()
            self._communicators = None
            set_world_communicator(None)
        if dist.is_initialized():
            with suppress(RuntimeError):  # a group that lost a rank may raise again
                if self.backend == "nccl":
                    # Closing would wait for kernels that wait for the lost rank.
                    dist.distributed_c10d._abort_process_group()
                else:
                    dist.destroy_process_group()


def _usable_backend(wanted: str, device: torch.device) -> str:
    usable = {
        "nccl": device.type == "cuda" and dist.is_nccl_available(),
        "gloo": dist.is_gloo_available(),
        "mpi": dist.is_mpi_available(),
    }
    return wanted if usable[wanted] else choose_backend(device)
