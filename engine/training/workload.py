"""The `train` workload: a task in the hands of a strategy, trained until its bounds, measured step by step.

Master weights are float32, whatever the precision of products. The global batch of a step does not depend on the
number of ranks nor on the accumulation, so that all strategies and sizes follow the losses of one rank. Every visit
of a launch starts from the same weights. Started by `engine.worker` as

    outcome = run(visit, context)
"""

from configs.job import Visit
from configs.record import Figure
from configs.training import TrainWorkload
from engine.context import Context, Outcome
from engine.training.checkpoints.visit import open_checkpoints
from engine.training.data.feed import make_feed
from engine.training.data.validation import make_validation
from engine.training.figures import figures, samples
from engine.training.live import open_live
from engine.training.steps import Run, evaluate_now, train
from engine.training.strategies.table import STRATEGIES
from engine.training.task_types import make_task, preprocess_seconds
from engine.training.trainer import History, Options
from engine.weights import load_figures, the_manifest


def run(visit: Visit, context: Context) -> Outcome:
    """Train one visit. Raises ValueError for data that does not do, FloatingPointError for a loss that is no number."""
    workload = visit.cell.workload
    assert isinstance(workload, TrainWorkload)
    check_steps(workload, context)
    running, timed = prepare(visit, workload, context), context.measuring_pass == "timed"
    try:
        with running.live:
            train(running)
            if timed:
                evaluate_now(running)
    finally:
        running.feed.close()
    running.checkpoints.close()
    outcome = Outcome(_figures(running), samples(running) if timed else {})
    if timed and workload.export:
        _export(running, visit)
    running.trainer.close()
    return outcome


def check_steps(workload: TrainWorkload, context: Context) -> None:
    """Raises ValueError where all steps would be warm-up."""
    warmup = context.job.measuring.warmup
    if workload.steps is not None and workload.steps <= warmup:
        raise ValueError(
            f"workload.steps: {workload.steps} leaves none to measure after measuring.warmup of {warmup}; "
            f"use at least {warmup + 1}"
        )


def prepare(visit: Visit, workload: TrainWorkload, context: Context) -> Run:
    """Everything that the first step needs. All ranks call it."""
    options = Options.of(visit.cell)
    task = make_task(workload, context)
    feed = make_feed(workload, options, context, task)
    validation = make_validation(workload, options, context, task)
    trainer = STRATEGIES[options.strategy](task, options, context)
    checkpoints = open_checkpoints(trainer, feed, visit, context, task)
    history = checkpoints.resume() or History()
    live = open_live(visit, context)
    return Run(workload, options, context, task, trainer, feed, validation, checkpoints, live, history)


def _figures(running: Run) -> dict[str, Figure]:
    """All figures of the visit. All ranks call it."""
    context = running.context
    return {
        **figures(running, the_manifest(context).config),
        **running.checkpoints.figures(),
        **running.live.figures(),
        "preprocess_seconds": preprocess_seconds(running.workload, context),
        **load_figures(context),
    }


def _export(running: Run, visit: Visit) -> None:
    """Leave the trained model as a Hugging Face folder. All ranks call it."""
    state = running.trainer.whole_model()
    if running.context.rank == 0:
        running.task.export(state, running.context.paths.exports / visit.cell.key)
    running.context.barrier()
