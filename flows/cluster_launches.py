"""Launches on clusters: many jobs in the scheduler's queue at once, within the limits of their targets.

    run_on_clusters(session, launches, retries, budget)

Launches keep their order by blocks. Launches of one block with equal resources are submitted together as a job
array. Whenever jobs end, the queue is refilled. If the run is interrupted, all active jobs are ended; if it is
killed, the next run adopts them.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import plural
from configs.plans.job import Job
from configs.plans.packing import Launch
from configs.plans.plan import Stop
from configs.records.record import Status
from configs.targets.resources import ClusterTarget
from flows.held_groups import HeldGroup, HeldGroups, asked_of
from flows.outcomes import collect, give_up_job, leave_out, resolve_retries, row_of, several
from slurm.schedulers.adapter import adapter_for
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.inventory import usable_nodes
from slurm.schedulers.refusals import Unavailable
from slurm.schedulers.waiting import note_waiting
from tasks.campaign.launches.active_jobs import ActiveJobs, Flown
from tasks.campaign.launches.jobs import write_job
from tasks.campaign.launches.leftovers import mark_collected
from tasks.campaign.progress import ProgressRow
from tasks.campaign.records import Collected
from tasks.campaign.repeats import Budget
from tasks.campaign.retries import Retries, nodes_to_leave_out
from tasks.campaign.session import Session
from tasks.prefect_api.events import Happened, tell
from tasks.submit import submit_launches
from tasks.wait import wait_for_jobs

_USABLE_SECONDS = 30.0
"""Validity of a list of usable nodes."""
_AGAIN_SECONDS = 2.0
"""Before a scheduler that did not answer is asked again to end jobs."""


def run_on_clusters(
    session: Session, launches: Sequence[tuple[Launch, ProgressRow]], retries: Retries, budget: Budget
) -> None:
    """Make the launches and those that are adopted, until each measurement has a record or is given up."""
    if launches or session.adopted:
        began = time.monotonic()
        budget.leave()
        SubmissionQueue(session, launches, retries, budget).run()
        budget.elsewhere(time.monotonic() - began)


class SubmissionQueue:
    """What waits to be submitted, by target in order, and what is in flight."""

    def __init__(
        self, session: Session, launches: Sequence[tuple[Launch, ProgressRow]], retries: Retries, budget: Budget
    ) -> None:
        self._session, self._retries, self._budget = session, retries, budget
        self._waiting: dict[str, deque[tuple[Launch, ProgressRow]]] = {}
        for launch, row in launches:
            self._waiting.setdefault(launch.measurements[0].cell.target, deque()).append((launch, row))
        self._held = HeldGroups()
        self._active_jobs = ActiveJobs()
        self._usable: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._told: set[str] = set()

    def run(self) -> None:
        """Submit, wait and collect until nothing is left; whatever ends this ends everything in flight."""
        try:
            self._adopt()
            while self._open() or self._active_jobs.jobs:
                ended_by = self._spent()
                if ended_by is not None:
                    self._leave_out_rest(ended_by)
                else:
                    self._fill()
                if self._active_jobs.jobs or self._held.groups:
                    for name in self._wait():
                        self._land(name)
        except BaseException:
            for held in self._held.take_all():
                self._cancel_unsubmitted(held)
            self._active_jobs.abandon(self._session)
            raise

    def _open(self) -> bool:
        return bool(self._held.groups) or any(self._waiting.values())

    def _wait(self) -> list[str]:
        """Names of jobs that have ended, as soon as there are any."""
        graph, titles = self._session.graph, [flown.row.title for flown in self._active_jobs.jobs.values()]
        ended, waited = wait_for_jobs.after(*graph.before_wait())(
            several(titles) if titles else "the scheduler", self._active_jobs, self._session, self._enough
        )
        graph.waited(ended, waited)
        return ended

    def _adopt(self) -> None:
        """Jobs of an earlier run fly on as if they were ours."""
        session = self._session
        for name in session.adopted:
            job = read_model(session.run.job(name).job, Job, PLAN_BYTES)
            row = row_of(Launch(job.measuring_pass, job.measurements), session.plan)
            session.run_progress.rows.append(row)
            self._active_jobs.add([(job, row)])
        session.adopted = []

    # Money and time

    def _spent(self) -> Stop | None:
        running = [(flown.job.target.name, flown.node_seconds) for flown in self._active_jobs.jobs.values()]
        return self._budget.spent(running, here=False)

    def _enough(self) -> bool:
        """What ends the waiting although no job has ended: a budget, or that it is time to submit again."""
        if self._held.due(time.monotonic()):
            return True
        waits = any(flown.running_since is None for flown in self._active_jobs.jobs.values())
        return self._spent() is not None and (self._open() or waits)

    def _leave_out_rest(self, ended_by: Stop) -> None:
        """No launch is begun any more: not those that wait here, nor those that wait in the queue."""
        session = self._session
        for held in self._held.take_all():
            if not self._cancel_unsubmitted(held):
                # Perhaps it is in the queue after all: with a record here, what it measures would not count.
                count = plural(len(held.jobs), "job")
                told = f"{held.target} did not answer: {count} may be in its queue. The next run adopts or ends them"
                session.run_progress.notes.append(told)
                for _, row in held.jobs:
                    row.state, row.note = "left out", ""
                continue
            for job, row in held.jobs:
                mark_collected(session.run, job.name)
                leave_out(session, Launch(job.measuring_pass, job.measurements), row, ended_by)
        for queue in self._waiting.values():
            for launch, row in queue:
                leave_out(session, launch, row, ended_by)
            queue.clear()
        names = [name for name, flown in self._active_jobs.jobs.items() if flown.running_since is None]
        try:
            self._active_jobs.cancel(names, session)
        except Unavailable:
            time.sleep(_AGAIN_SECONDS)  # the scheduler is asked again; what runs goes on meanwhile
            return
        for name in names:
            flown = self._active_jobs.jobs.pop(name)
            collected = collect(session, name, flown.row)
            if collected.unreached:
                leave_out(session, Launch(flown.job.measuring_pass, tuple(collected.unreached)), flown.row, ended_by)

    # Into the queue

    def _fill(self) -> None:
        """Submit as much as the targets' bounds and the scheduler allow."""
        for name in self._in_order():
            target = self._session.target(name)
            assert isinstance(target, ClusterTarget)
            self._give_up_overdue(target)
            for held in self._held.take_due(name, time.monotonic()):
                if len(held.jobs) <= room_for(target, self._active_jobs):
                    self._submit(target, held)
                else:
                    self._held.put_back(held, time.monotonic())
            while not self._held.is_away(name) and (jobs := self._next_jobs(target)):
                self._submit(target, HeldGroup(name, jobs))

    def _give_up_overdue(self, target: ClusterTarget) -> None:
        """Record what the scheduler has refused for longer than the target allows, while nothing of the run ran."""
        now = time.monotonic()
        if any(flown.running_since is not None for flown in self._active_jobs.jobs.values()):
            self._held.restart_clocks(target.name, now)
        limit = target.max_queue_minutes
        for held in self._held.take_overdue(target.name, now, None if limit is None else 60 * limit):
            if not self._cancel_unsubmitted(held):
                self._held.put_back(held, now)  # perhaps the scheduler has it after all
                continue
            message = f"target.max_queue_minutes {limit:g} of {target.name}: not submitted in time: {held.reason}"
            for job, row in held.jobs:
                give_up_job(self._session, job, row, Status.CANCELLED, message)

    def _cancel_unsubmitted(self, held: HeldGroup) -> bool:
        """End what a scheduler may have taken although it did not say so. Returns whether it is sure to be ended."""
        folders = [self._session.run.job(job.name).folder for job, _ in held.jobs]
        try:
            adapter_for(held.jobs[0][0].target.adapter).cancel_many(folders)
        except OSError:
            return False
        return True

    def _in_order(self) -> list[str]:
        """Targets, those first that have most to do yet: drift of what they share then hits all alike."""
        return sorted(self._waiting, key=lambda name: -len(self._waiting[name]))

    def _next_jobs(self, target: ClusterTarget) -> list[tuple[Job, ProgressRow]]:
        """Write the jobs of the next launches of one shape, of one block, no more than may be in the queue.

        Shapes that the scheduler refuses now are passed over; others go on.
        """
        session, queue = self._session, self._waiting[target.name]
        room = room_for(target, self._active_jobs)
        refused = self._held.shapes(target.name)
        if not queue or room < 1:
            return []
        taken = take_alike(
            queue,
            room if target.has_arrays else 1,
            target.max_queued,
            lambda launch: (*shape_of(launch), self._exclude(target, launch)),
            passed_over=lambda launch: asked_of(launch) in refused,
        )
        exclude = self._exclude(target, taken[0][0]) if taken else ()
        return [
            (write_job(launch, session.placed_plan, session.run, session.cache, exclude), row) for launch, row in taken
        ]

    def _exclude(self, target: ClusterTarget, launch: Launch) -> tuple[str, ...]:
        blamed = self._retries.blamed(launch)
        slow = self._session.excluded.get(target.name, frozenset())
        if not blamed and not slow:
            return ()
        left_out = nodes_to_leave_out(blamed, slow, self._nodes(target), launch.measurements[0].cell.nodes)
        for node in sorted(set(left_out) - slow - self._told):
            self._told.add(node)
            message = f"{target.name}: a launch was lost on {node}; its measurements are made elsewhere"
            tell(Happened.NODE_AVOIDED, self._session.plan.study, message, target=target.name, node=node)
        return left_out

    def _nodes(self, target: ClusterTarget) -> tuple[str, ...]:
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

    def _submit(self, target: ClusterTarget, held: HeldGroup) -> None:
        """Hand a group over. One that the scheduler does not take now is kept; of a limited one half is tried."""
        session, names = self._session, [job.name for job, _ in held.jobs]
        for _, row in held.jobs:
            row.state, row.note, row.reason = "starting", "", ""
        # In flight from here on: whatever happens meanwhile, they are looked for when the run is ended.
        self._active_jobs.add(held.jobs)
        refusal, done = submit_launches.after(*session.graph.before_submit())(
            several([row.title for _, row in held.jobs]), names, target.adapter, session
        )
        session.graph.submitted(names, done)
        if refusal is None:
            self._held.accepted(held)
            return
        for name in names:
            self._active_jobs.jobs.pop(name)
        if refusal.final:
            for job, row in held.jobs:
                give_up_job(session, job, row, refusal.status, refusal.message)
            return
        for job, row in held.jobs:
            row.state, row.note = "waiting", f"the scheduler accepts no such jobs now: {refusal.message}"
            row.reason = refusal.message
            note_waiting(session.run.job(job.name), "", refusal.message)
        if refusal.limited and len(held.jobs) > 1:
            first, rest = held.halves()
            self._held.refused(rest, refusal, time.monotonic())
            self._submit(target, first)
        else:
            self._held.refused(held, refusal, time.monotonic())

    # Out of it

    def _land(self, name: str) -> None:
        """Records of a job that has ended, and what is to be done with measurements that have none."""
        session, flown = self._session, self._active_jobs.jobs.pop(name)
        collected = collect(session, name, flown.row)
        target = flown.job.target
        self._budget.paid(target.name, _node_seconds(flown, collected))
        _, again = resolve_retries(session, self._retries, collected, flown.launch, flown.row)
        if again is not None:
            self._waiting.setdefault(target.name, deque()).appendleft(again)
            self._usable.pop(target.name, None)


def _node_seconds(flown: Flown, collected: Collected) -> float:
    """What a job is paid for: as the scheduler counts it, else as it was seen."""
    told = [record.accounting.elapsed_seconds for record in collected.records if record.accounting]
    elapsed = next((seconds for seconds in told if seconds is not None), None)
    return flown.node_seconds if elapsed is None else elapsed * flown.job.cell.nodes


def room_for(target: ClusterTarget, active_jobs: ActiveJobs) -> int:
    """How many jobs of one shape may be added to a target's queue now, as one array.

    With `max_running` an array runs at most so many of its jobs, but arrays know nothing of each other, nor of those
    on another target, which may be the same machines: beside others there is room only for what may run at once, and
    for a long array only where nothing else is. Where there are no arrays, each job is bounded here.
    """
    room = target.max_queued - active_jobs.queued(target.name)
    if target.max_running is None or (not active_jobs.jobs and target.has_arrays):
        return room
    return min(room, target.max_running - active_jobs.may_run())


def take_alike(
    queue: deque[tuple[Launch, ProgressRow]],
    most: int,
    window: int,
    alike: Callable[[Launch], Hashable],
    passed_over: Callable[[Launch], bool] = lambda launch: False,
) -> list[tuple[Launch, ProgressRow]]:
    """Take the first launch off the queue that is not passed over, and of the next ones those that are like it."""
    first = next((place for place, (launch, _) in enumerate(queue) if not passed_over(launch)), None)
    if first is None:
        return []
    near = [alike(launch) for launch, _ in islice(queue, first, first + window)]
    chosen = [first + place for place, shape in enumerate(near) if shape == near[0]][:most]
    taken = [queue[position] for position in chosen]
    for position in reversed(chosen):
        del queue[position]
    return taken


def shape_of(launch: Launch) -> tuple[Hashable, ...]:
    """Block and pass, and what the scheduler is asked for."""
    return launch.measuring_pass, launch.block, *asked_of(launch)
