"""Stopping conditions of a run: steps, time, loss, or the measuring rules of the study.

    budget = StepBudget(workload, context)
    while not budget.reached(done):                 # done: a TrainingProgress
        ...

All ranks must stop after the same step. Shared values (steps, losses of the global batch) need no agreement. Clocks
differ, so the slowest rank's counts. A check in every step would cost a collective in every step, so ranks check again
when, by the mean step time, half of the remaining time has passed. A run of n steps checks about log2(n) times and
makes no extra step unless a step takes twice its mean.
"""

from dataclasses import dataclass

from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.rank.agreement import max_over_ranks_of

MEMORY_STEPS = 2
"""The second step has the optimizer's states from its start."""
PROFILE_WARMUP_STEPS = 3
"""DistributedDataParallel rebuilds its buckets in the second step."""
RECENT_STEPS = 10
"""Without validation data, `target_loss` is compared with the mean loss of this many steps, after each such period."""


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run. steps: by all attempts; here: by this one.

    trained_seconds: of all attempts' steps and the waits for their checkpoints, on this rank; measured_seconds: of this
    attempt's steps after its warm-up. loss: what `target_loss` is compared with, the same on all ranks.
    """

    steps: int
    here: int
    trained_seconds: float
    measured_seconds: float
    loss: float | None


class StepBudget:
    """Stopping condition of one measurement; stores when ranks check their clocks again."""

    def __init__(self, workload: TrainWorkload, context: Context) -> None:
        self.workload, self.context, self.rules = workload, context, context.job.measuring
        self._look_at = 0
        self._was_low = False

    @property
    def by_time(self) -> bool:
        """Whether the workload sets a duration."""
        return self.workload.min_period_seconds is not None or self.workload.max_period_seconds is not None

    def reached(self, done: TrainingProgress) -> bool:
        """Return whether the measurement is complete. All ranks call it after each step, and get the same result."""
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
        if measured < self.rules.min_passes:
            return False
        return self._passed(self.rules.min_seconds, done.measured_seconds, measured, done.here)

    def _low_enough(self, done: TrainingProgress) -> bool:
        target = self.workload.target_loss
        return target is not None and done.loss is not None and done.loss <= target

    def _period_over(self, done: TrainingProgress) -> bool:
        """End at the maximum period, or at the minimum period if the loss is low enough or no other bound is set."""
        work = self.workload
        if done.steps == 0:
            return False
        low = self._low_enough(done)
        if low and not self._was_low:
            self._look_at = 0  # the limit is now nearer
        self._was_low = low
        soon = low or (work.target_loss is None and work.max_period_seconds is None)
        limit = (work.min_period_seconds or 0.0) if soon else work.max_period_seconds
        assert limit is not None, "configs.workloads.train lets no target loss be without a longest period"
        return self._passed(limit, done.trained_seconds, done.steps, done.here)

    def _passed(self, limit_seconds: float, own_seconds: float, steps: int, here: int) -> bool:
        """Return whether the slowest rank's seconds, over this many steps, have reached the limit."""
        if self.context.world_size == 1:
            return own_seconds >= limit_seconds
        if here < self._look_at:
            return False
        agreed = max_over_ranks_of(own_seconds, self.context)
        if agreed >= limit_seconds:
            return True
        left = (limit_seconds - agreed) * steps / max(agreed, 1e-9)
        self._look_at = here + max(1, int(left / 2))
        return False
