"""This rank's share of the rows of a task: those to train on, and those held out.

feed = make_feed(workload, options, context, task)
held = make_validation(workload, options, context, task)        # [] where nothing is held out
"""

from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.training.data.feed import Feed
from engine.training.data.validation import validation_batches
from engine.training.task_types import load_examples
from engine.training.trainer import Task, TrainerOptions, TrainingBatch


def make_feed(workload: TrainWorkload, options: TrainerOptions, context: Context, task: Task) -> Feed:
    """The feed of this rank, after `make_task`. On CUDA the next step's rows are made in a thread."""
    train, _ = load_examples(workload, context)
    return Feed(
        train,
        global_batch_size=workload.global_batch_size,
        accumulation=options.accumulation,
        replicas=(options.dp, context.grid.dp_rank),
        seed=context.job.measuring.seed,
        device=context.device,
        ahead=context.device.type == "cuda",
    )


def make_validation(
    workload: TrainWorkload, options: TrainerOptions, context: Context, task: Task
) -> list[TrainingBatch]:
    """This rank's share of the rows held out, in micro-batches on its device; equally many on every rank."""
    _, held = load_examples(workload, context)
    if held is None:
        return []
    return validation_batches(held, options.micro_batch_size, (options.dp, context.grid.dp_rank), context.device)
