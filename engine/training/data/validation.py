"""How well a model does on rows that it never learns from.

    held = make_validation(workload, options, context, task)        # this rank's share; [] where nothing is held out
    sums = evaluate(trainer, task, held, context, options)          # over all rows; all ranks call it
    figures = means(sums)

A sharded model gathers weights in every call, so all ranks make as many: rows that a rank lacks are filled up with some
that ask for nothing.
"""

import math

import numpy as np
import torch

from configs.record import Figure
from configs.training import TrainWorkload
from engine.agreement import total
from engine.context import Context
from engine.inference.sharding import even_share
from engine.training.data.examples import IGNORED, Examples
from engine.training.task_types import load_examples
from engine.training.trainer import Batch, Options, Task, Trainer

_LARGEST_EXPONENT = 700
"""A loss above so many nats overflows the exponential; such a perplexity says no more than the loss."""


def make_validation(workload: TrainWorkload, options: Options, context: Context, task: Task) -> list[Batch]:
    """This rank's share of the rows held out, in micro-batches on its device; equally many on every rank."""
    _, held = load_examples(workload, context)
    if held is None:
        return []
    return validation_batches(held, options.micro_batch_size, (options.dp, context.grid.dp_rank), context.device)


def validation_batches(held: Examples, size: int, replicas: tuple[int, int], device: torch.device) -> list[Batch]:
    """The share of one of `replicas` (how many, which one): their order is the file's, every row is in one of them."""
    mine = even_share(held.count, *replicas)
    calls = -(-len(even_share(held.count, replicas[0], 0)) // size)
    batches = []
    for call in range(calls):
        rows = np.arange(mine.start + call * size, mine.start + (call + 1) * size)
        extra = rows >= mine.stop
        rows = np.where(extra, 0, rows)
        inputs = held.collate(rows, rows)
        inputs["targets"][torch.from_numpy(extra)] = IGNORED
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        real = int((~extra).sum())
        batches.append(Batch(inputs, 0.0, real, real * held.positions))
    return batches


def evaluate(
    trainer: Trainer, task: Task, batches: list[Batch], context: Context, options: Options
) -> dict[str, float]:
    """Sums of the task's metrics over all replicas' rows; {} where nothing is held out. All ranks call it."""
    if not batches:
        return {}
    module = trainer.module
    training = module.training
    module.eval()
    try:
        with trainer.evaluating():
            found = [task.metrics(module, batch) for batch in batches]
    finally:
        module.train(training)
    names = sorted(found[0])
    mine = torch.stack([torch.stack([sums[name].double() for sums in found]).sum() for name in names])
    # The ranks of a replica hold the same rows, and have counted each of them.
    whole = total(mine, context) / (context.world_size // options.dp)
    return dict(zip(names, whole.tolist(), strict=True))


def means(sums: dict[str, float]) -> dict[str, Figure]:
    """Figures of an evaluation: the mean loss in nats, perplexity, and the share of rows whose class is right."""
    targets = sums["targets"]
    loss = sums["loss"] / targets
    figures: dict[str, Figure] = {"targets": int(targets), "loss": loss}
    if "correct" in sums:
        return figures | {"accuracy": sums["correct"] / targets}
    return figures | {"perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else None}
