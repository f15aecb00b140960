"""One job on hosts that are reached by SSH, from its hosts' choice to its end; it goes on without this process.

    job = SshJob(folder, turns)
    job.begin()                         # or go on with it where an earlier process began it; on the loop
    job.state                           # waiting, running, ended

All that is known of it lies in its folder: `hosts.json`, written before anything is carried, names the hosts and its
folder on them. On each host a launcher waits for that machine's lock, in an order that is the same for everyone, so
that two jobs never wait for each other; when all hold theirs, the ranks start. What the hosts write is brought here as
it appears.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import some_of
from configs.plans.job import HostPlacement, Job, JobEnd, Submission
from configs.plans.paths import JobPaths
from configs.records.record import Accounting, Status
from configs.targets.target import SshTarget
from slurm.launcher.job_files import measurement_under_way, reserve_end, write_end
from slurm.schedulers.job_files import node_launcher
from slurm.schedulers.refusals import JobState
from slurm.schedulers.ssh.ending import EndedFromOutside, concluded
from slurm.schedulers.ssh.node import NodeJob
from slurm.schedulers.ssh.turns import Turns
from slurm.ssh.connection import HostAway, HostError, HostRefused, host_of
from slurm.staging.packages import run_name

_Answer = TypeVar("_Answer")
_SOON_SECONDS, _SOON_FOR_SECONDS = 0.3, 10.0
"""A job that has just begun is looked at more often."""
_PEERS_SECONDS = 45.0
"""From a node's end to that of the others, which end by themselves when they notice."""
_BLAMED_SECONDS = 30.0
"""So long a host is waited for that cannot be reached and that the others have lost too."""
_CANCEL_SECONDS = 7.0


def _clock() -> float:
    """Seconds of a clock that nobody sets, and that goes on while this machine sleeps, as the job does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HostLost(Exception):
    """A host could not be reached for longer than the target allows."""

    def __init__(self, loss: EndedFromOutside) -> None:
        super().__init__(loss.message)
        self.loss = loss


class SshJob:
    """A job that was submitted and has not ended, as this process sees it."""

    def __init__(self, folder: Path, turns: Turns) -> None:
        self.paths = JobPaths(folder)
        self.job = read_model(self.paths.job, Job, PLAN_BYTES)
        assert isinstance(self.job.target, SshTarget), f"{self.job.name} is of target kind {self.job.target.kind}"
        self.target = self.job.target
        self.state: JobState = "waiting"
        self.note = ""
        self.reason = ""
        self.ended = threading.Event()
        self.nodes: list[NodeJob] = []
        self._turns = turns
        self._task: asyncio.Task[None] | None = None
        self._since = _clock()
        self._began: float | None = None
        self._soon_until = 0.0  # of `time.monotonic`
        self._found = False
        """An earlier process began it."""

    def begin(self) -> None:
        """Go on with it; on the loop."""
        self._task = asyncio.create_task(self._through())

    # Its course

    async def _through(self) -> None:
        try:
            await self._turns.take(self)
            self._place()
            await self._start()
            losses = await self._follow()
            await self._end(losses)
        except asyncio.CancelledError:
            raise
        except HostLost as lost:
            await self._end([lost.loss])
        except (HostRefused, HostError) as error:
            await self._end([EndedFromOutside.of_error(error, [node.host.name for node in self.nodes])])
        except Exception as error:  # a fault of ours must not leave a job that nobody looks at
            await self._end(
                [EndedFromOutside(Status.LOST, f"the job cannot be followed: {type(error).__name__}: {error}")]
            )
        finally:
            await self._turns.give_back(self)

    def _place(self) -> None:
        """Write down the hosts whose turn it was, unless an earlier process did."""
        if not self.nodes:
            names = tuple(host.name for host in self._turns.held_by(self))
            run = run_name(self.paths.folder.parents[1])
            placement = HostPlacement(hosts=names, run=run, folder=f"{self.job.name}.{secrets.token_hex(4)}")
            write_atomically(self.paths.hosts, placement.model_dump_json())
            self.nodes = self._nodes(placement)

    def placed(self) -> tuple[str, ...]:
        """Names of the hosts that an earlier process chose; () where none did."""
        try:
            placement = read_model(self.paths.hosts, HostPlacement)
        except FileNotFoundError:
            return ()
        self.nodes, self._found = self._nodes(placement), True
        return placement.hosts

    def _nodes(self, placement: HostPlacement) -> list[NodeJob]:
        known = {host.name: host for host in self.target.hosts}
        return [
            NodeJob(self.paths, self.job, self.target, host_of(self.target, known[name]), placement, rank)
            for rank, name in enumerate(placement.hosts)
        ]

    async def _start(self) -> None:
        """Carry the job to its hosts, start its launchers in turn, and its ranks when all hosts are free."""
        reserve_end(self.paths)
        await asyncio.gather(*(self._patiently(node, node.carry) for node in self.nodes))
        facts = {node.rank: await self._patiently(node, node.host.facts) for node in self.nodes}
        addresses = [node.rendezvous_address(facts[node.rank]) for node in self.nodes]
        starts = f"starts on {some_of([node.host.name for node in self.nodes])}"
        for node in sorted(self.nodes, key=lambda node: facts[node.rank].place):
            await self._patiently(node, partial(node.start, addresses))
            while not await self._patiently(node, node.holds_its_host):
                if node.over:  # it says why; the others would wait for it, or never began
                    await self._end_others({})
                    return
                held = f"waits for {node.host.name}, where another job is measured"
                self.note = held if node.waits else starts
                await asyncio.sleep(_SOON_SECONDS)
        if len(self.nodes) > 1:
            await asyncio.gather(*(self._patiently(node, node.release) for node in self.nodes))
        self.state, self._began, self._soon_until = "running", _clock(), time.monotonic() + _SOON_FOR_SECONDS
        self.note = f"on {some_of([node.host.name for node in self.nodes])}"

    async def _patiently(self, node: NodeJob, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """What the host answers, however often it is away; HostLost where that takes too long."""
        while True:
            try:
                return await work()
            except HostAway as error:
                self._notice_away(node, error)
                if node.host.away_seconds > self.target.lost_after_seconds:
                    raise HostLost(self._loss(node, error)) from error
                await asyncio.sleep(_SOON_SECONDS)

    def _notice_away(self, node: NodeJob, error: HostAway) -> None:
        limit = self.target.lost_after_seconds
        self.note = f"{error.strerror}; given up after {limit:g} s, {node.host.away_seconds:.0f} s have passed"

    def _loss(self, node: NodeJob, error: HostAway) -> EndedFromOutside:
        message = f"host {node.host.name} could not be reached for {node.host.away_seconds:.0f} s: {error.strerror}"
        return EndedFromOutside(Status.NODE_FAILED, message, (node.host.name,), "HostUnreachable")

    async def _follow(self) -> list[EndedFromOutside]:
        """Look at the hosts until the job is over on all of them. Returns what was lost."""
        losses: dict[int, EndedFromOutside] = {}
        first_end: float | None = None
        while left := [node for node in self.nodes if not node.over and node.rank not in losses]:
            await asyncio.gather(*(self._look(node, losses) for node in left))
            if losses or any(node.over and not node.completed for node in self.nodes):
                first_end = first_end or time.monotonic()
                if losses or time.monotonic() - first_end > _PEERS_SECONDS:
                    await self._end_others(losses)
            if any(not node.over and node.rank not in losses for node in self.nodes):
                await asyncio.sleep(self._pause())
        return list(losses.values())

    def _pause(self) -> float:
        young = self._began is not None and time.monotonic() < self._soon_until
        return min(_SOON_SECONDS, self.target.poll_seconds) if young else self.target.poll_seconds

    async def _look(self, node: NodeJob, losses: dict[int, EndedFromOutside]) -> None:
        try:
            await node.look()
            if self.state == "running":
                self.note = f"on {some_of([each.host.name for each in self.nodes])}"
        except HostAway as error:
            self._notice_away(node, error)
            blamed = any(node.host.name in other.blames() for other in self.nodes if other.over)
            limit = min(_BLAMED_SECONDS, self.target.lost_after_seconds) if blamed else self.target.lost_after_seconds
            if node.host.away_seconds > limit:
                losses[node.rank] = self._loss(node, error)
        except (HostRefused, HostError) as error:
            losses[node.rank] = EndedFromOutside.of_error(error, [node.host.name])

    async def _end_others(self, losses: dict[int, EndedFromOutside]) -> None:
        """End what still runs of a job that has lost a part."""
        await _end_on([node for node in self.nodes if not node.over and node.rank not in losses])

    async def _end(self, losses: Sequence[EndedFromOutside], told: JobEnd | None = None) -> None:
        """Keep how the job ended, and remove it from its hosts; where a host is away, when it is back."""
        await _end_on([node for node in self.nodes if losses and not node.over])
        names = [node.host.name for node in self.nodes]
        never_started = [node.rank for node in self.nodes if node.never_started]
        end = told or concluded(self.job, self.paths, names, losses, never_started)
        self._account(end, names)
        write_end(self.paths, end)
        self.state = "ended"
        self.ended.set()
        await asyncio.gather(*map(_clear, self.nodes))

    def _account(self, end: JobEnd, names: Sequence[str]) -> None:
        since, began, ended = (self._times_told(end) if self._found else None) or (
            self._since,
            self._began,
            _clock(),
        )
        accounting = Accounting(
            job_id=self.job.name,
            state=str(end.status).upper(),
            nodes=tuple(names),
            queued_seconds=max(0.0, (began or ended) - since),
            elapsed_seconds=None if began is None else max(0.0, ended - began),
        )
        with suppress(OSError):
            write_atomically(self.paths.accounting, accounting.model_dump_json())

    def _times_told(self, end: JobEnd) -> tuple[float, float, float] | None:
        """When it was submitted, had its hosts and ended, of a job that another process began; None: they do not say.

        It may have ended long before this process looked.
        """
        launchers = [node_launcher(self.paths, rank) for rank in range(len(self.nodes))]
        taken = [launcher.lock_acquired_at for launcher in launchers if launcher and launcher.lock_acquired_at]
        try:
            submitted = read_model(self.paths.submission, Submission).submitted_at
        except (OSError, ValueError):
            return None
        if not taken:
            return None
        since, began, ended = (
            datetime.fromisoformat(at).timestamp() for at in (submitted, max(taken), end.finished_at)
        )
        return since, began, ended

    # Its cancellation

    async def cancel(self, end: JobEnd | None = None) -> None:
        """End it on all hosts. Raises HostAway where one cannot be asked, or has too much to bring.

        The job has no end then, and whoever finds it goes on with it.

        end: what is kept of it; None: that it was cancelled on request.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.paths.end.exists():
            return
        if not self.nodes:
            self.placed()
        asked = [asyncio.wait_for(self._ended_on(node), _CANCEL_SECONDS) for node in self.nodes]
        results = await asyncio.gather(*asked, return_exceptions=True)
        for node, result in zip(self.nodes, results, strict=True):
            if isinstance(result, HostAway | TimeoutError) and node.ended_there:
                told = f"{node.host.name}: {self.job.name} has ended, and what it left could not be brought in time"
                raise HostAway(None, told)
            if isinstance(result, HostAway | TimeoutError):
                late = f"no word within {_CANCEL_SECONDS:g} s that the job is over"
                how = late if isinstance(result, TimeoutError) else "not reached"
                raise HostAway(None, f"{node.host.name}: {how}, so {self.job.name} may still run there")
        await self._end([], end or self._cancelled())

    def _cancelled(self) -> JobEnd:
        return JobEnd(
            status=Status.CANCELLED,
            return_code=None,
            measurement=measurement_under_way(self.paths),
            message="cancelled on request",
            finished_at=utc_now(),
        )

    async def _ended_on(self, node: NodeJob) -> None:
        await node.end()
        with suppress(HostError):
            await node.look()


async def _end_on(nodes: Sequence[NodeJob]) -> None:
    """End what runs of a job on hosts, on all at once: each takes seconds, and the others would go on meanwhile."""

    async def end(node: NodeJob) -> None:
        with suppress(OSError, HostRefused):  # also a full disk here: the end has its place reserved
            await node.end()
            await node.look()

    await asyncio.gather(*map(end, nodes))


async def _clear(node: NodeJob) -> None:
    with suppress(HostAway, HostRefused, HostError):
        await node.clear()
