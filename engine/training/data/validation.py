"""Evaluate a model on validation rows.

    held = validation_batches(rows, micro_batch_size, (replicas, mine), device)      # one replica's share
    sums = evaluate(trainer, task, held, context, options)          # over all rows; all ranks call it
    figures = means(sums)

A sharded model gathers weights in every call, so all ranks make the same number of calls: missing rows are padded with
rows without targets.
"""

import math

import numpy as np
import torch

from configs.records.record import Figure
from engine.context import Context
from engine.models.sharding import even_share
from engine.rank.agreement import total
from engine.training.data.examples import IGNORED, Examples
from engine.training.trainer import Task, Trainer, TrainerOptions, TrainingBatch

_LARGEST_EXPONENT = 700
"""Losses above this many nats overflow the exponential."""


def validation_batches(
    held: Examples, size: int, replicas: tuple[int, int], device: torch.device
) -> list[TrainingBatch]:
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
        batches.append(TrainingBatch(inputs, 0.0, real, real * held.positions))
    return batches


def evaluate(
    trainer: Trainer, task: Task, batches: list[TrainingBatch], context: Context, options: TrainerOptions
) -> dict[str, float]:
    """Sum the task's metrics over all replicas' rows; {} without validation rows. All ranks call it."""
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
    # The ranks of a replica hold the same rows, so each row is counted once per rank.
    whole = total(mine, context) / (context.world_size // options.dp)
    return dict(zip(names, whole.tolist(), strict=True))


def means(sums: dict[str, float]) -> dict[str, Figure]:
    """Return figures of an evaluation: mean loss in nats, perplexity, and accuracy."""
    targets = sums["targets"]
    loss = sums["loss"] / targets
    figures: dict[str, Figure] = {"targets": int(targets), "loss": loss}
    if "correct" in sums:
        return figures | {"accuracy": sums["correct"] / targets}
    return figures | {"perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else None}
