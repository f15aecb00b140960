"""When a run has done enough: after so many steps, at a time, at a loss, or by the measuring rules of the study.

    bounds = Bounds(workload, context)
    while not bounds.reached(done):                 # done: a Done
        ...

Ranks must stop after the same step. What they all know alike (steps, losses of the global batch) needs no agreement.
Their clocks differ, so the slowest rank's counts; asking for it in each step would cost a collective in each step, so
the ranks look again when, by the mean step so far, half of what is left will have passed. A run of n steps then asks
about log2(n) times and makes no step too many unless a step takes twice its mean.
"""

from dataclasses import dataclass

from configs.training import TrainWorkload
from engine.agreement import largest
from engine.context import Context

MEMORY_STEPS = 2
"""The second one holds the optimizer's states from its beginning."""
PROFILE_WARMUP_STEPS = 3
"""DistributedDataParallel arranges its buckets anew in the second step."""
RECENT_STEPS = 10
"""Without validation data, `target_loss` is compared with the mean loss of so many steps, each time they are over."""


@dataclass(frozen=True)
class Done:
    """What a run has behind it. steps: by all attempts; here: by this one.

    trained_seconds: of all attempts' steps and the waits for their checkpoints, on this rank; measured_seconds: of this
    attempt's steps after its warm-up. loss: what `target_loss` is compared with, the same on all ranks.
    """

    steps: int
    here: int
    trained_seconds: float
    measured_seconds: float
    loss: float | None


class Bounds:
    """The end of one visit; remembers when ranks are to look at their clocks again."""

    def __init__(self, workload: TrainWorkload, context: Context) -> None:
        self.workload, self.context, self.rules = workload, context, context.job.measuring
        self._look_at = 0
        self._was_low = False

    @property
    def by_time(self) -> bool:
        """Whether it is the workload that says how long."""
        return self.workload.min_period_seconds is not None or self.workload.max_period_seconds is not None

    def reached(self, done: Done) -> bool:
        """Whether the visit has all its steps. All ranks call it after each step, and hear the same."""
        work = self.workload
        if self.context.memory_pass:
            return done.here >= MEMORY_STEPS
        if self.context.profiling:
            return done.here > PROFILE_WARMUP_STEPS
        if work.steps is not None:
            return done.steps >= work.steps or self._low_enough(done)
        if self.by_time:
            return self._period_over(done)
        measured = done.here - self.rules.warmup
        if measured < self.rules.least_passes:
            return False
        return self._passed(self.rules.least_seconds, done.measured_seconds, measured, done.here)

    def _low_enough(self, done: Done) -> bool:
        target = self.workload.target_loss
        return target is not None and done.loss is not None and done.loss <= target

    def _period_over(self, done: Done) -> bool:
        """At the most, at the least where the loss is low enough or neither it nor a most is given."""
        work = self.workload
        if done.steps == 0:
            return False
        low = self._low_enough(done)
        if low and not self._was_low:
            self._look_at = 0  # the limit has come nearer
        self._was_low = low
        soon = low or (work.target_loss is None and work.max_period_seconds is None)
        limit = (work.min_period_seconds or 0.0) if soon else work.max_period_seconds
        assert limit is not None, "configs.training lets no target loss be without a longest period"
        return self._passed(limit, done.trained_seconds, done.steps, done.here)

    def _passed(self, limit_seconds: float, own_seconds: float, steps: int, here: int) -> bool:
        """Whether the slowest rank's seconds, of so many steps, have reached the limit."""
        if self.context.world_size == 1:
            return own_seconds >= limit_seconds
        if here < self._look_at:
            return False
        agreed = largest(own_seconds, self.context)
        if agreed >= limit_seconds:
            return True
        left = (limit_seconds - agreed) * steps / max(agreed, 1e-9)
        self._look_at = here + max(1, int(left / 2))
        return False
