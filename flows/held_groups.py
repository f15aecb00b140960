"""Jobs that a scheduler has refused for now: when they are tried again, and what may be submitted beside them.

A scheduler that cannot be reached takes nothing, and is asked more and more seldom. One that has answered with a limit
refuses jobs of a shape: others go on, and of an array that is too large half is tried.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from configs.plans.job import Job
from configs.plans.packing import Launch
from tasks.campaign.progress import ProgressRow
from tasks.submit import Refusal

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class HeldGroup:
    """Jobs of one shape of a target, submitted together; their folders are written. Times are of one clock."""

    target: str
    jobs: list[tuple[Job, ProgressRow]]
    reason: str = ""
    limited: bool = False
    since: float | None = None
    """When it was refused first; None: it was not yet."""
    pause: float = FIRST_PAUSE_SECONDS
    again_at: float = 0.0

    @property
    def shape(self) -> Hashable:
        """What a limit may be about."""
        job = self.jobs[0][0]
        return asked_of(Launch(job.measuring_pass, job.measurements))

    def halves(self) -> "tuple[HeldGroup, HeldGroup]":
        """Two groups of the same jobs, in their order."""
        middle = (len(self.jobs) + 1) // 2
        return replace(self, jobs=self.jobs[:middle]), replace(self, jobs=self.jobs[middle:])


@dataclass
class HeldGroups:
    """All groups that wait, in the order in which they are to be tried."""

    groups: list[HeldGroup] = field(default_factory=list)

    def refused(self, group: HeldGroup, refusal: Refusal, now: float) -> None:
        """Keep a group for later."""
        since = now if group.since is None else group.since
        pause = group.pause if group.since is None else min(2 * group.pause, LONGEST_PAUSE_SECONDS)
        kept = replace(
            group, reason=refusal.message, limited=refusal.limited, since=since, pause=pause, again_at=now + pause
        )
        # Whatever is like it is refused as well: one call for all of them.
        self.groups = [
            replace(each, again_at=max(each.again_at, kept.again_at))
            if each.target == kept.target and each.shape == kept.shape
            else each
            for each in self.groups
        ]
        self.groups.append(kept)

    def accepted(self, group: HeldGroup) -> None:
        """The scheduler takes such jobs again: the others of its shape are tried at once."""
        self.groups = [
            replace(each, again_at=0.0, pause=FIRST_PAUSE_SECONDS)
            if each.target == group.target and (each.shape == group.shape or not each.limited)
            else each
            for each in self.groups
        ]

    def take_due(self, target: str, now: float) -> list[HeldGroup]:
        """Take those of a target whose time has come, the smallest of each shape; of all where it was away."""
        taken: list[HeldGroup] = []
        for each in sorted(self.groups, key=lambda group: len(group.jobs)):
            known = any(other.shape == each.shape or not other.limited for other in taken)
            if each.target == target and each.again_at <= now and not known:
                taken.append(each)
        self._drop(taken)
        return taken

    def take_overdue(self, target: str, now: float, limit_seconds: float | None) -> list[HeldGroup]:
        """Take those of a target that were refused for longer than the limit."""
        if limit_seconds is None:
            return []
        taken = [
            each
            for each in self.groups
            if each.target == target and each.since is not None and now - each.since > limit_seconds
        ]
        self._drop(taken)
        return taken

    def take_all(self) -> list[HeldGroup]:
        """Take all."""
        taken, self.groups = self.groups, []
        return taken

    def put_back(self, group: HeldGroup, now: float) -> None:
        """Keep one that was taken and not tried."""
        self.groups.insert(0, replace(group, again_at=max(group.again_at, now + FIRST_PAUSE_SECONDS)))

    def _drop(self, taken: list[HeldGroup]) -> None:
        self.groups = [each for each in self.groups if not any(each is other for other in taken)]

    def restart_clocks(self, target: str, now: float) -> None:
        """What waits while jobs of the run run does not wait in vain."""
        self.groups = [
            replace(each, since=now) if each.target == target and each.since is not None else each
            for each in self.groups
        ]

    def due(self, now: float) -> bool:
        """Whether it is time to try one again."""
        return any(each.again_at <= now for each in self.groups)

    def is_away(self, target: str) -> bool:
        """Whether the scheduler of a target gave no answer when it was asked last."""
        return any(each.target == target and not each.limited for each in self.groups)

    def shapes(self, target: str) -> set[Hashable]:
        """Shapes of a target that are refused now."""
        return {each.shape for each in self.groups if each.target == target}


def asked_of(launch: Launch) -> tuple[Hashable, ...]:
    """What a scheduler is asked for: nodes, ranks, cores of a rank."""
    cell = launch.measurements[0].cell
    return cell.nodes, cell.layout.ranks, cell.cores_per_rank
