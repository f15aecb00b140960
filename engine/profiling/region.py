"""Record the region that a workload marks: what the profile, perf and nsys passes share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from configs.plans.job import Measurement
from configs.workloads import kinds_with
from engine.context import Context, RankResult, WorkloadFunction


def run_recorded(
    measurement: Measurement,
    context: Context,
    workload: WorkloadFunction,
    record: Callable[[], AbstractContextManager[None]],
) -> RankResult:
    """Run a workload with its first marked region inside `record()`; later regions are not recorded.

    Raises NotImplementedError where the workload marks no region.
    """
    recorded = False

    @contextmanager
    def region() -> Iterator[None]:
        nonlocal recorded
        if recorded:
            yield
            return
        with record():
            yield
        recorded = True

    context.region = region
    try:
        outcome = workload(measurement, context)
    finally:
        context.region = nullcontext
    if not recorded:
        field = "profile" if context.measuring_pass == "profile" else "profiler"
        *marking, last = kinds_with("marks_work")
        raise NotImplementedError(
            f"measuring.{field}: a {measurement.cell.workload.kind} workload by engine {measurement.cell.engine} marks "
            f"nothing to record; {', '.join(marking)} and {last} by engine rankwise do"
        )
    return outcome
