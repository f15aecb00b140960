"""A rank whose visits are ours and another's in turn, so that both meet the same machine, minute and process.

    torchrun --nproc-per-node 2 -m engine.training.comparison.side_by_side PARTNER JOB_JSON

It is `engine.worker` but for the workload: of each four visits the first and the last are ours, the two between are
the partner's (ABBA), of the same cell. Partners: `bare`, a plain loop in PyTorch (`bare_loop`); `apart`, the same
training on each rank for itself, with the rank's share of the batch and no process group: processes that stand side by
side and do not know of each other. Used by `flows.bench_training`.
"""

import sys
from collections.abc import Callable

import numpy as np
from torch import Tensor

from configs.cell import Layout
from configs.job import Visit
from configs.training import TrainWorkload
from engine import worker
from engine.context import Context, Outcome, Workload
from engine.processes import leave
from engine.training import workload as ours
from engine.training.comparison.bare_loop import Plan, bare_loop
from engine.weights import the_manifest

_KEPT = "apart"


def is_partners(repeat: int) -> bool:
    """Whether the visit with this number is the partner's."""
    return repeat % 4 in (1, 2)


def bare(visit: Visit, context: Context) -> Outcome:
    """The visit's cell by the plain loop; `step_seconds` without the warm-up, as ours."""
    work, cell = visit.cell.workload, visit.cell
    assert isinstance(work, TrainWorkload) and work.steps is not None and cell.layout.tp == 1
    accumulation = work.accumulation(cell.layout.dp)
    plan = Plan(
        config=the_manifest(context).config,
        strategy=cell.layout.strategy,
        dtype=cell.dtype,
        dp=cell.layout.dp,
        accumulation=accumulation,
        micro_batch=work.global_batch_size // cell.layout.dp // accumulation,
        length=work.sequence_length,
        steps=work.steps,
    )
    context.barrier()
    seconds = bare_loop(plan, context.rank)
    measured = np.array(seconds[context.job.measuring.warmup :])
    return Outcome({"tokens_per_step": work.global_batch_size * work.sequence_length}, {"step_seconds": measured})


def apart(visit: Visit, context: Context) -> Outcome:
    """Each rank trains its own share alone; all begin together."""
    cell, work = visit.cell, visit.cell.workload
    assert isinstance(work, TrainWorkload)
    share = work.model_copy(update={"global_batch_size": work.global_batch_size // cell.layout.dp})
    alone = cell.model_copy(update={"workload": share, "layout": Layout()})
    visits = tuple(made.model_copy(update={"cell": alone}) for made in context.job.visits)
    kept: dict[str, Tensor] = context.kept.setdefault(_KEPT, {})
    job = context.job.model_copy(update={"visits": visits, "ranks_per_node": 1})
    one = Context(
        job, context.paths, 0, 1, context.device, context.manifest, lambda: None, kept=kept, region=context.region
    )
    context.barrier()
    outcome = ours.run(replace_cell(visit, alone), one)
    context.barrier()
    return outcome


def replace_cell(visit: Visit, cell: object) -> Visit:
    """The same visit of another cell."""
    return visit.model_copy(update={"cell": cell})


PARTNERS: dict[str, Workload] = {"bare": bare, "apart": apart}


def in_turn(partner: str) -> Callable[[str], Workload]:
    """What `engine.worker.load_workload` is replaced by."""

    def run(visit: Visit, context: Context) -> Outcome:
        return (PARTNERS[partner] if is_partners(visit.repeat) else ours.run)(visit, context)

    return lambda kind: run


if __name__ == "__main__":
    worker.load_workload = in_turn(sys.argv[1])  # type: ignore[assignment]
    leave(worker.main(sys.argv[2:]))
