"""The `train` workload: a task is trained with a strategy until its bounds, measured step by step.

Master weights are float32 with any precision of products. The global batch of a step is independent of the number of
ranks and the accumulation, so that all strategies and sizes reproduce the losses of one rank. Every measurement of a
launch starts from the same weights. Started by `engine.worker` as

    outcome = run(measurement, context)
"""

from contextlib import suppress

from configs.plans.job import Measurement
from configs.records.record import Figure
from configs.workloads.train import TrainWorkload
from engine.context import Context, RankResult
from engine.models.weights import load_figures
from engine.training.checkpoints.measurement import open_checkpoints
from engine.training.figures import figures, samples
from engine.training.live import open_live
from engine.training.shares import make_feed, make_validation
from engine.training.steps import TrainingRun, evaluate_now, train
from engine.training.task_types import make_task, preprocess_seconds
from engine.training.trainer import TrainerOptions, TrainingHistory
from engine.training.trainers import STRATEGIES


def run(measurement: Measurement, context: Context) -> RankResult:
    """Train one measurement. Raises ValueError for unsuitable data, FloatingPointError for a non-finite loss."""
    workload = measurement.cell.workload
    assert isinstance(workload, TrainWorkload)
    workload.check_warmup(context.job.measuring.warmup)
    running, timed = prepare(measurement, workload, context), context.measuring_pass == "timed"
    try:
        with running.live:
            train(running)
            if timed:
                evaluate_now(running)
    except Exception:
        if context.world_size == 1:  # the launch goes on, and the next measurement needs the memory
            with suppress(Exception):
                running.trainer.close()
        raise
    finally:
        running.feed.close()
    running.checkpoints.close()
    outcome = RankResult(_figures(running), samples(running) if timed else {})
    if timed and workload.export:
        _export(running, measurement)
    running.trainer.close()
    return outcome


def prepare(measurement: Measurement, workload: TrainWorkload, context: Context) -> TrainingRun:
    """Everything that the first step needs. All ranks call it."""
    options = TrainerOptions.of(measurement.cell)
    task = make_task(workload, context)
    feed = make_feed(workload, options, context, task)
    validation = make_validation(workload, options, context, task)
    trainer = STRATEGIES[options.strategy](task, options, context)
    checkpoints = open_checkpoints(trainer, feed, measurement, context, task)
    history = checkpoints.resume() or TrainingHistory()
    live = open_live(measurement, context)
    return TrainingRun(workload, options, context, task, trainer, feed, validation, checkpoints, live, history)


def _figures(running: TrainingRun) -> dict[str, Figure]:
    """All figures of the measurement. All ranks call it."""
    context = running.context
    return {
        **figures(running, running.task.config),
        **running.checkpoints.figures(),
        **running.live.figures(),
        "preprocess_seconds": preprocess_seconds(running.workload, context),
        **load_figures(context),
    }


def _export(running: TrainingRun, measurement: Measurement) -> None:
    """Leave the trained model as a Hugging Face folder. All ranks call it."""
    state = running.trainer.whole_model()
    if running.context.rank == 0:
        running.task.export(state, running.context.paths.exports / measurement.cell.key)
    running.context.barrier()
