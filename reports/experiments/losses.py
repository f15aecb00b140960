"""What training learnt: the losses of each cell in a table, and by step for a figure.

losses_table(study), loss_curves(study)
"""

import numpy as np

from configs.common.arrays import Floats
from configs.records.rates import by_rank
from reports.reading.load import StudyResult, short_titles
from reports.reading.read import Reading
from reports.text import UNKNOWN, Table, count, escaped, number, percent
from reports.training.cells import trained_cells


def losses_table(study: StudyResult) -> Table | None:
    """What was learnt: the first and last loss, and how it does on data that it was not trained on. First repeats."""
    rows = []
    for result in trained_cells(study):
        measurement = result.completed[min(result.completed)]
        losses = loss_curve(study, measurement)
        rows.append(
            (
                escaped(result.model),
                escaped(result.name),
                f"{len(losses):,}" if losses is not None else UNKNOWN,
                number(float(losses[0])) if losses is not None else UNKNOWN,
                number(float(losses[-1])) if losses is not None else UNKNOWN,
                *_validated(measurement),
                number(measurement.figure("heldout_loss")),
                number(measurement.figure("heldout_perplexity"), 4),
                count(measurement.figure("heldout_tokens")),
                *_stepped(measurement),
            )
        )
    columns = (
        "model",
        "cell",
        "steps",
        "first loss, nats",
        "last loss, nats",
        "validation loss, nats",
        "validation perplexity",
        "validation accuracy",
        "held-out loss, nats",
        "held-out perplexity",
        "held-out tokens",
        "learning rate",
        "times the one given",
        "steps skipped, gradients overflowed",
        "loss scale at the end",
        "went on from step",
    )
    return Table(columns, tuple(rows), text_columns=2).without_empty_columns() if rows else None


def _validated(measurement: Reading) -> tuple[str, ...]:
    """Loss, perplexity and accuracy on the validation data; held-out text has columns of its own."""
    if measurement.figure("heldout_loss") is not None:
        return (UNKNOWN,) * 3
    loss, perplexity = (
        number(measurement.figure("validation_loss")),
        number(measurement.figure("validation_perplexity"), 4),
    )
    return loss, perplexity, percent(measurement.figure("validation_accuracy"))


def _stepped(measurement: Reading) -> tuple[str, ...]:
    """What is worth a column where something other than the file's own rate and precision decided."""
    factor, scale = measurement.figure("learning_rate_scaling"), measurement.figure("loss_scale")
    scaled = factor is not None and factor != 1
    return (
        number(measurement.figure("learning_rate")) if scaled else UNKNOWN,
        number(factor) if scaled else UNKNOWN,
        count(measurement.figure("skipped_steps")) if scale is not None else UNKNOWN,
        number(scale, 6),  # a power of two
        count(measurement.figure("resumed_from_step")),
    )


def loss_curve(study: StudyResult, measurement: Reading) -> Floats | None:
    """Loss by step, the mean over ranks; None where the measurement kept none."""
    samples = study.samples(measurement, ("loss",))
    if not samples:
        return None
    losses: Floats = np.mean([np.asarray(array, dtype=np.float64) for array in by_rank(samples, "loss")], axis=0)
    return losses if len(losses) else None


def loss_curves(study: StudyResult) -> dict[str, Floats]:
    """Short title of each cell that kept its losses -> loss by step, of its first repeat."""
    curves, cells = {}, trained_cells(study)
    for result, title in zip(cells, short_titles(cells), strict=True):
        losses = loss_curve(study, result.completed[min(result.completed)])
        if losses is not None:
            curves[title] = losses
    return curves
