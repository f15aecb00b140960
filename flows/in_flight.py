"""Launches on clusters: many in the scheduler's queue at once, within the bounds that their targets set.

    work_off_there(session, launches, retries, budget)

Launches keep their order by blocks. Of one block those that ask the scheduler for the same are handed over
together, as an array. Whenever jobs end, the queue is filled up again. What is in flight when the run is
interrupted is ended, all at once; what is in flight when it is killed is adopted by the next run.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

from configs.job import Job
from configs.packing import Launch
from configs.plan import Stop
from configs.record import Status
from configs.target import SlurmTarget
from flows.outcomes import collect, give_up, give_up_job, leave_out, row_of
from slurm.partitions import ClusterError, usable_nodes
from tasks.adopt import mark_collected
from tasks.board import Row
from tasks.flight import Flight, Flown
from tasks.jobs import write_job
from tasks.merge import Collected
from tasks.repeats import Budget
from tasks.retries import Retries, nodes_to_leave_out
from tasks.session import Session
from tasks.submit import submit_launches
from tasks.wait import wait_for_jobs

_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0
"""Between two tries to submit to a scheduler that takes nothing now."""
_USABLE_SECONDS = 30.0
"""So long an answer of which nodes can be used is believed."""


@dataclass
class Group:
    """Jobs that are submitted together. `jobs`: written already, where the scheduler took none of them before."""

    launches: list[tuple[Launch, Row]]
    exclude: tuple[str, ...]
    jobs: list[tuple[Job, Row]] | None = None


def work_off_there(session: Session, launches: Sequence[tuple[Launch, Row]], retries: Retries, budget: Budget) -> None:
    """Make the launches and those that are adopted, until each visit has a record or is given up."""
    if launches or session.adopted:
        began = time.monotonic()
        Cluster(session, launches, retries, budget).work_off()
        budget.elsewhere(time.monotonic() - began)


class Cluster:
    """What waits to be submitted, by target in order, and what is in flight."""

    def __init__(
        self, session: Session, launches: Sequence[tuple[Launch, Row]], retries: Retries, budget: Budget
    ) -> None:
        self._session, self._retries, self._budget = session, retries, budget
        self._waiting: dict[str, deque[tuple[Launch, Row]]] = {}
        for launch, row in launches:
            self._waiting.setdefault(launch.visits[0].cell.target, deque()).append((launch, row))
        self._held: dict[str, Group] = {}
        self._flight = Flight()
        self._pause_seconds, self._try_again_at = _FIRST_PAUSE_SECONDS, 0.0
        self._usable: dict[str, tuple[float, tuple[str, ...]]] = {}

    def work_off(self) -> None:
        """Submit, wait and collect until nothing is left; whatever ends this ends everything in flight."""
        try:
            self._adopt()
            while self._open() or self._flight.jobs:
                ended_by = self._spent()
                if ended_by is not None:
                    self._leave_out_rest(ended_by)
                else:
                    self._fill()
                if self._flight.jobs or self._held:
                    for name in wait_for_jobs(self._what(), self._flight, self._session, self._enough):
                        self._land(name)
        except BaseException:
            self._flight.abandon(self._session)
            raise

    def _open(self) -> bool:
        return bool(self._held) or any(self._waiting.values())

    def _what(self) -> str:
        """What is waited for, for the name of the task."""
        return several(list(self._flight.jobs)) if self._flight.jobs else "the scheduler"

    def _adopt(self) -> None:
        """Jobs of an earlier run fly on as if they were ours."""
        session = self._session
        for name in session.adopted:
            job = Job.model_validate_json(session.run.job(name).job.read_bytes())
            row = row_of(Launch(job.measuring_pass, job.visits), session.plan)
            session.board.rows.append(row)
            self._flight.add([(job, row)])
        session.adopted = []

    # Money and time

    def _spent(self) -> Stop | None:
        running = [(flown.job.target.name, flown.node_seconds) for flown in self._flight.jobs.values()]
        return self._budget.spent(running, here=False)

    def _enough(self) -> bool:
        """What ends the waiting although no job has ended: a budget, or that it is time to submit again."""
        if self._held and time.monotonic() >= self._try_again_at:
            return True
        waits = any(flown.running_since is None for flown in self._flight.jobs.values())
        return self._spent() is not None and (self._open() or waits)

    def _leave_out_rest(self, ended_by: Stop) -> None:
        """No launch is begun any more: not those that wait here, nor those that wait in the queue."""
        session = self._session
        for group in self._held.values():
            for job, row in group.jobs or ():
                mark_collected(session.run, job.name)
                leave_out(session, Launch(job.measuring_pass, job.visits), row, ended_by)
        self._held = {}
        for queue in self._waiting.values():
            for launch, row in queue:
                leave_out(session, launch, row, ended_by)
            queue.clear()
        names = [name for name, flown in self._flight.jobs.items() if flown.running_since is None]
        self._flight.cancel(names, session)
        for name in names:
            flown = self._flight.jobs.pop(name)
            collected = collect(session, name, flown.row)
            if collected.unvisited:
                leave_out(session, Launch(flown.job.measuring_pass, tuple(collected.unvisited)), flown.row, ended_by)

    # Into the queue

    def _fill(self) -> None:
        """Submit as much as the targets' bounds allow."""
        if time.monotonic() < self._try_again_at:
            return
        for name in self._in_order():
            target = self._session.target(name)
            assert isinstance(target, SlurmTarget)
            while group := self._held.pop(name, None) or self._next_group(target):
                if not self._submit(target, group):
                    return

    def _in_order(self) -> list[str]:
        """Targets, those first that have most to do yet: drift of what they share then hits all alike."""
        return sorted(self._waiting, key=lambda name: -len(self._waiting[name]))

    def _next_group(self, target: SlurmTarget) -> Group | None:
        """The next launches of one shape, of one block, and no more than may be in the queue."""
        queue = self._waiting[target.name]
        room = room_for(target, self._flight)
        if not queue or room < 1:
            return None
        exclude = self._exclude(target, queue[0][0])
        taken = take_alike(
            queue, room, target.max_queued, lambda launch: (*shape_of(launch), self._exclude(target, launch))
        )
        return Group(taken, exclude)

    def _exclude(self, target: SlurmTarget, launch: Launch) -> tuple[str, ...]:
        blamed = self._retries.blamed(launch)
        slow = self._session.excluded.get(target.name, frozenset())
        if not blamed and not slow:
            return ()
        return nodes_to_leave_out(blamed, slow, self._nodes(target), launch.visits[0].cell.nodes)

    def _nodes(self, target: SlurmTarget) -> tuple[str, ...]:
        """Nodes that the scheduler would use now; none where it cannot say."""
        now = time.monotonic()
        asked, nodes = self._usable.get(target.name, (-_USABLE_SECONDS, ()))
        if now - asked >= _USABLE_SECONDS:
            try:
                nodes = usable_nodes(target)
            except ClusterError:
                nodes = ()
            self._usable[target.name] = (now, nodes)
        return nodes

    def _submit(self, target: SlurmTarget, group: Group) -> bool:
        """Hand a group over. False where the scheduler takes nothing now; the group is kept."""
        session = self._session
        if group.jobs is None:
            group.jobs = [
                (write_job(launch, session.plan, session.run, session.cache, group.exclude), row)
                for launch, row in group.launches
            ]
        names = [job.name for job, _ in group.jobs]
        for _, row in group.jobs:
            row.state, row.note = "starting", ""
        # In flight from here on: whatever happens meanwhile, they are looked for when the run is ended.
        self._flight.add(group.jobs)
        refusal = submit_launches(several(names), names, target.kind, session)
        if refusal is not None:
            for name in names:
                self._flight.jobs.pop(name)
        if refusal is not None and refusal.final:
            for job, row in group.jobs:
                give_up_job(session, job, row, Status.FAILED, refusal.message)
        elif refusal is not None:
            for _, row in group.jobs:
                row.state, row.note = "waiting", f"the scheduler takes nothing now: {refusal.message}"
            self._held[target.name] = group
            self._try_again_at = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
            return False
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        return True

    # Out of it

    def _land(self, name: str) -> None:
        """Records of a job that has ended, and what is to be done with visits that have none."""
        session, flown = self._session, self._flight.jobs.pop(name)
        collected = collect(session, name, flown.row)
        target, measuring_pass = flown.job.target, flown.job.measuring_pass
        self._budget.paid(target.name, _node_seconds(flown, collected))
        outcome = self._retries.after(collected, measuring_pass, target)
        # A visit that is tried again was counted as made, and failed; it is neither yet.
        tried_again = len(outcome.again) + len(outcome.given_up) - len(collected.unvisited)
        session.board.done -= tried_again
        session.board.failed -= tried_again
        if outcome.given_up:
            give_up(session, Launch(measuring_pass, outcome.given_up), flown.row, outcome.status, outcome.message)
        if outcome.again:
            again = Launch(measuring_pass, outcome.again)
            row = row_of(again, session.plan)
            session.board.rows.append(row)
            self._waiting.setdefault(target.name, deque()).appendleft((again, row))
            self._usable.pop(target.name, None)


def several(names: Sequence[str]) -> str:
    """Names of jobs for a title."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _node_seconds(flown: Flown, collected: Collected) -> float:
    """What a job is paid for: as the scheduler counts it, else as it was seen."""
    told = [record.accounting.elapsed_seconds for record in collected.records if record.accounting]
    elapsed = next((seconds for seconds in told if seconds is not None), None)
    return flown.node_seconds if elapsed is None else elapsed * flown.job.cell.nodes


def room_for(target: SlurmTarget, flight: Flight) -> int:
    """How many jobs of one shape may be added to a target's queue now, as one array.

    With `max_running` an array runs at most so many of its jobs, but arrays know nothing of each other, nor of those
    on another target, which may be the same machines: beside others there is room only for what may run at once, and
    for a long array only where nothing else is.
    """
    room = target.max_queued - flight.queued(target.name)
    if target.max_running is None or not flight.jobs:
        return room
    return min(room, target.max_running - flight.may_run())


def take_alike(
    queue: deque[tuple[Launch, Row]], most: int, window: int, alike: Callable[[Launch], Hashable]
) -> list[tuple[Launch, Row]]:
    """Take the first launch off the queue, and of the next ones, within a window, those that are like it."""
    near = [alike(launch) for launch, _ in islice(queue, window)]
    chosen = [position for position, shape in enumerate(near) if shape == near[0]][:most]
    taken = [queue[position] for position in chosen]
    for position in reversed(chosen):
        del queue[position]
    return taken


def shape_of(launch: Launch) -> tuple[Hashable, ...]:
    """Block and pass, and what the scheduler is asked for."""
    cell = launch.visits[0].cell
    return launch.measuring_pass, launch.block, cell.nodes, cell.layout.ranks, cell.cores_per_rank
