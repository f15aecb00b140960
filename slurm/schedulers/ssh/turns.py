"""Which jobs of this process have which hosts: one job a host, first come, first served.

What other processes do on the hosts is seen there: a launcher waits for its machine's lock.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from configs.plans.job import Job
from configs.targets.target import SshTarget
from slurm.ssh.connection import Host, host_of


class WaitingJob(Protocol):
    """A job that wants hosts."""

    job: Job
    target: SshTarget

    def placed(self) -> tuple[str, ...]:
        """Names of the hosts that it has already, from an earlier process; () where it has none."""


class Turns:
    """All hosts of this process."""

    def __init__(self) -> None:
        self._held: dict[Host, WaitingJob] = {}
        self._queue: list[WaitingJob] = []
        self._changed = asyncio.Condition()

    async def take(self, turn: WaitingJob) -> None:
        """Wait for as many hosts as the job needs, none of those that it is kept from; at once where it has some."""
        async with self._changed:
            placed = turn.placed()
            if placed:
                self._held |= {host: turn for host in _named(turn.target, placed)}
                return
            self._queue.append(turn)
            try:
                await self._changed.wait_for(lambda: self._chosen(turn))
                self._held |= dict.fromkeys(self._chosen(turn), turn)
            finally:
                self._queue.remove(turn)

    def held_by(self, turn: WaitingJob) -> list[Host]:
        """The hosts of a job, in its target's order."""
        return [host for host in _all(turn.target) if self._held.get(host) is turn]

    async def give_back(self, turn: WaitingJob) -> None:
        """The job no longer needs its hosts."""
        async with self._changed:
            for host in [host for host, holder in self._held.items() if holder is turn]:
                del self._held[host]
            self._changed.notify_all()

    def _chosen(self, turn: WaitingJob) -> list[Host]:
        """Hosts that the job could have now; [] while it must wait."""
        mine = _all(turn.target)
        before = self._queue[: self._queue.index(turn)]
        if any(set(mine) & set(_all(other.target)) for other in before):
            return []
        there = _named(turn.target, [host.name for host in mine if host.name not in turn.job.exclude])
        free = sorted((host for host in there if host not in self._held), key=lambda host: host.away_seconds > 0)
        return free[: turn.job.cell.nodes] if len(free) >= turn.job.cell.nodes else []


def _all(target: SshTarget) -> list[Host]:
    return [host_of(target, host) for host in target.hosts]


def _named(target: SshTarget, names: Sequence[str]) -> list[Host]:
    return [host for host in _all(target) if host.name in names]
