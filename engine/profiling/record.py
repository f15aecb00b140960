"""One measurement of the profile pass: the workload runs as usual, and its marked region is recorded once.

    outcome = profiled_measurement(measurement, context, workload)

The workload marks one pass, after its warm-up, with `with context.profiled():`. Ranks begin the region together, after
the profiler has started on each. Results: figures of this rank, columns of its collectives (the report compares them
over ranks) and a Chrome trace beside its part.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from configs.plans.job import Measurement
from configs.records.record import Figure
from engine.context import Context, RankResult, WorkloadFunction
from engine.profiling.collectives import collectives, columns
from engine.profiling.communicators import Listening
from engine.profiling.events import REGION, read_events
from engine.profiling.native import native_calls
from engine.profiling.region import run_recorded
from engine.profiling.split import split_region
from engine.profiling.trace import write_trace
from engine.prompts.decoded import synchroniser


def profiled_measurement(measurement: Measurement, context: Context, workload: WorkloadFunction) -> RankResult:
    """Run the workload and split the time of its marked region.

    Figures are the workload's and the split's; samples are the collectives alone, because times under a profiler are
    not valid samples. Raises NotImplementedError if the workload marks no region.
    """
    recorder = _Recorder(context, context.paths.trace(measurement.name, context.rank))
    outcome = run_recorded(measurement, context, workload, recorder.record)
    assert recorder.outcome is not None
    return RankResult(outcome.figures | recorder.outcome.figures, recorder.outcome.samples)


class _Recorder:
    """Profiles one region of a measurement."""

    def __init__(self, context: Context, trace: Path) -> None:
        self.outcome: RankResult | None = None
        self._context = context
        self._trace = trace

    @contextmanager
    def record(self) -> Iterator[None]:
        """Profile the block."""
        context = self._context
        synchronise = synchroniser(context.device)
        activities = [ProfilerActivity.CPU]
        if context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with (
            native_calls(),
            Listening(context.communicators) as listening,
            profile(activities=activities, record_shapes=True) as profiler,
        ):
            synchronise()
            context.barrier()
            with record_function(REGION):
                # The profiler uses the system's clock, our code and the communicators this one.
                epoch = time.time_ns() - time.perf_counter_ns()
                began = time.perf_counter_ns()
                yield
                synchronise()
                ended = time.perf_counter_ns()
        self.outcome = self._read(profiler, listening, began, ended, epoch)

    def _read(self, profiler: profile, listening: Listening, began: int, ended: int, epoch: int) -> RankResult:
        """Return figures, columns and the trace. Nanoseconds of perf_counter; with `epoch` added they are Unix time."""
        assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
        seen = profiler.profiler.kineto_results.events()
        wall_seconds = (ended - began) * 1e-9
        events = [event for event in read_events(seen, began + epoch) if 0 <= event.began < wall_seconds]
        reported = listening.collectives(began * 1e-9)
        found = collectives(events, reported)
        parts = split_region(wall_seconds, events, found)
        sizes = [item.size_bytes for item in found if item.size_bytes is not None]
        figures: dict[str, Figure] = {
            "profile_wall_seconds": wall_seconds,
            "compute_share": parts.compute_share,
            "communication_share": parts.communication_share,
            "exposed_communication_share": parts.exposed_communication_share,
            "idle_share": parts.idle_share,
            "collectives": len(found),
            "communication_bytes": sum(sizes) if sizes or not found else None,
        }
        write_trace(profiler, self._trace, reported, began + epoch)
        return RankResult(figures, columns(found))
