"""A rank whose steps are ours and another's in turn, so that both meet the same machine, second and process.

    torchrun --nproc-per-node 2 -m benchmarks.training.side_by_side PARTNER JOB_JSON

It is `engine.worker` but for the workload: after each of our steps, outside of what is timed of it, the partner makes
one of the same work; ranks begin every step together. Partners: `bare`, a plain loop in PyTorch (`bare_loop`); `apart`,
the same training on each rank for itself, with the rank's share of the batch and no process group: processes that stand
side by side and do not know of each other. Used by `benchmarks.training.bench`.
"""

import itertools
import sys
import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from benchmarks.training.bare_loop import LoopPlan, bare_loop
from configs.common.execution import Layout
from configs.plans.job import Measurement
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from engine import worker
from engine.context import Context, RankResult, WorkloadFunction
from engine.models.weights import required_manifest
from engine.rank.processes import leave
from engine.training.live import LiveStreams
from engine.training.schedule import learning_rate
from engine.training.steps import Stopwatch, one_step, train
from engine.workloads import train as ours

TimedStep = Callable[[], float]
"""Makes a step and gives its seconds."""
_KEPT = "apart"


class Turns(LiveStreams):
    """Listens to our loop after each step, as a live stream does, and lets the partner make one."""

    def __init__(self, step: TimedStep, barrier: Callable[[], None]) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._step, self._barrier = step, barrier

    @property
    def wants(self) -> bool:
        """Every step."""
        return True

    def tell(self, **_: object) -> None:
        """A step of ours is over."""
        self._barrier()
        self.seconds.append(self._step())
        self._barrier()


def bare(measurement: Measurement, work: TrainWorkload, context: Context) -> TimedStep:
    """The measurement's cell by the plain loop."""
    cell = measurement.cell
    assert cell.layout.tp == 1
    accumulation = work.accumulation(cell.layout.dp)
    plan = LoopPlan(
        config=required_manifest(context).config,
        strategy=cell.layout.strategy,
        dtype=cell.dtype,
        dp=cell.layout.dp,
        accumulation=accumulation,
        micro_batch=work.global_batch_size // cell.layout.dp // accumulation,
        length=work.sequence_length,
    )
    return bare_loop(plan, context.rank)


def apart(measurement: Measurement, work: TrainWorkload, context: Context) -> TimedStep:
    """Each rank trains its own share alone, by our own step."""
    cell = measurement.cell
    share = work.model_copy(update={"global_batch_size": work.global_batch_size // cell.layout.dp})
    alone = measurement.model_copy(update={"cell": cell.model_copy(update={"workload": share, "layout": Layout()})})
    kept: dict[str, Tensor] = context.kept.setdefault(_KEPT, {})
    job = context.job.model_copy(update={"measurements": (alone,) * 2, "ranks_per_node": 1})
    one = Context(
        job, context.paths, 0, 1, context.device, context.manifest, lambda: None, kept=kept, region=context.region
    )
    running = ours.prepare(alone, share, one)
    watch, numbers = Stopwatch(running.trainer.exposed, one.device), itertools.count()

    def step() -> float:
        number = next(numbers)
        began = time.perf_counter()
        one_step(running, number, learning_rate(share, number), watch)
        return time.perf_counter() - began

    return step


PARTNERS: dict[str, Callable[[Measurement, TrainWorkload, Context], TimedStep]] = {"bare": bare, "apart": apart}


def in_turn(partner: str) -> Callable[[Cell], WorkloadFunction]:
    """What `engine.worker.load_workload` is replaced by: measurements with `step_seconds` and `partner_seconds`."""

    def run(measurement: Measurement, context: Context) -> RankResult:
        work, warmup = measurement.cell.workload, context.job.measuring.warmup
        assert isinstance(work, TrainWorkload)
        running = ours.prepare(measurement, work, context)
        turns = running.live = Turns(PARTNERS[partner](measurement, work, context), context.barrier)
        train(running)
        running.feed.close()
        running.trainer.close()
        samples = {
            "step_seconds": np.array(running.columns.step[warmup:]),
            "partner_seconds": np.array(turns.seconds[warmup:]),
        }
        return RankResult({"tokens_per_step": running.step_tokens}, samples)

    return lambda cell: run


if __name__ == "__main__":
    worker.load_workload = in_turn(sys.argv[1])  # type: ignore[assignment]
    leave(worker.main(sys.argv[2:]))
