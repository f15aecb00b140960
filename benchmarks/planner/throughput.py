"""How well the planner predicts published training throughput, rows left out, beside two simple rules.

    python -m benchmarks.planner.throughput [docs/measurements/published]

Rows are left out together (a model, a sequence length, a number of GPUs, a kind of GPU, one row) and predicted from all
others, the constants being fitted anew each time. Growth: the row with more GPUs of the same model, sequence length and
kind of GPU, from all rows with at most as many GPUs as the smaller one.

The simple rules: a constant MFU, the median of the other rows with the same kind of GPU; and the tokens/s per GPU of
the smaller row. Both read measured columns of rows that may be read, and none of the row to be predicted.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

from configs.hardware.catalog import accelerator
from engine.planner.check.rows import PublishedRow
from engine.planner.check.table import read_published_rows
from engine.planner.check.throughput import MEASURED, calibrated_on, predict, setup_of
from engine.planner.timing.constants import LEARNT, DeviceConstants, prior_for
from engine.planner.timing.fitting import OF_A_DEVICE, SHARED
from engine.planner.timing.training import step_time

FILE = "mpt_training_throughput.csv"
PUBLISHED = Path("docs/measurements/published")

Key = Callable[[PublishedRow], Hashable]


@dataclass(frozen=True)
class Errors:
    """|predicted - measured| / measured of some rows."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.values)

    @property
    def p90(self) -> float:
        """Nine of ten are below."""
        return float(np.percentile(self.values, 90))

    @property
    def mean(self) -> float:
        """Of all."""
        return mean(self.values)

    def __str__(self) -> str:
        figures = (self.median, self.p90, self.mean, max(self.values))
        return " ".join(f"{100 * figure:8.2f}" for figure in figures)


@dataclass(frozen=True)
class Growth:
    """Two rows that differ in their number of GPUs, and what is said of the larger."""

    smaller: PublishedRow
    larger: PublishedRow
    predicted: float
    same_per_gpu: float

    @property
    def times(self) -> int:
        """By how much it grows."""
        return int(self.larger["num_gpus"]) // int(self.smaller["num_gpus"])


def model_of(row: PublishedRow) -> str:
    """Rows of a model are left out together."""
    return row["model"]


def errors_of(rows: Sequence[PublishedRow], predicted: Sequence[float | None]) -> Errors:
    """Of rows that have a prediction."""
    pairs = zip(rows, predicted, strict=True)
    return Errors(tuple(abs(value / float(row[MEASURED]) - 1) for row, value in pairs if value is not None))


def left_out(rows: Sequence[PublishedRow], key: Key) -> list[float | None]:
    """The planner's prediction of each row, from all rows with another key."""
    found: dict[int, float | None] = {}
    for one in dict.fromkeys(key(row) for row in rows):
        inside = [index for index, row in enumerate(rows) if key(row) == one]
        others = [row for row in rows if key(row) != one]
        for index, prediction in zip(inside, predict([rows[index] for index in inside], others), strict=True):
            found[index] = prediction.predicted
    return [found[index] for index in range(len(rows))]


def constant_mfu(rows: Sequence[PublishedRow], key: Key) -> list[float | None]:
    """Each row's tokens/s at the median MFU of rows with its kind of GPU and another key; None where none has."""
    found: list[float | None] = []
    for row in rows:
        others = [
            float(other[MEASURED]) / _full_rate(other)
            for other in rows
            if key(other) != key(row) and _alike(other, row)
        ]
        found.append(median(others) * _full_rate(row) if others else None)
    return found


def growths(rows: Sequence[PublishedRow]) -> list[Growth]:
    """All pairs of rows that differ only in GPUs (and batch); the larger is predicted as the module says."""
    found = []
    for gpus in sorted({int(row["num_gpus"]) for row in rows}):
        pairs = [
            (small, large)
            for small in rows
            for large in rows
            if int(small["num_gpus"]) == gpus < int(large["num_gpus"])
            and all(small[name] == large[name] for name in ("model", "sequence_length", "gpu"))
        ]
        if not pairs:
            continue
        calibrated = calibrated_on([row for row in rows if int(row["num_gpus"]) <= gpus])
        for small, large in pairs:
            same = float(small[MEASURED]) * int(large["num_gpus"]) / gpus
            found.append(Growth(small, large, calibrated.tokens_per_second(setup_of(large)), same))
    return found


def main(published: Path) -> None:
    """Print all tables."""
    rows, _, _ = read_published_rows(published / FILE)
    print(f"Tokens/s of {len(rows)} published training runs; errors in %")
    header = f"{'median':>8} {'p90':>8} {'mean':>8} {'worst':>8}"
    print(f"\n{'left out':34} {header}")
    for title, key in (
        ("one model", model_of),
        ("one sequence length", lambda row: row["sequence_length"]),
        ("one number of GPUs", lambda row: row["num_gpus"]),
        ("one kind of GPU", lambda row: row["gpu"]),
        ("one row", id),
    ):
        print(f"{title + ', planner':34} {errors_of(rows, left_out(rows, key))}")
        simple = constant_mfu(rows, key)
        if any(value is not None for value in simple):
            print(f"{title + ', constant MFU':34} {errors_of(rows, simple)}")
    print(f"{'all (priors alone)':34} {errors_of(rows, [one.predicted for one in predict(rows, [])])}")
    _print_growths(growths(rows), header)
    _print_constants(rows)
    print(f"\n{planning_line(rows)}")


def planning_line(rows: Sequence[PublishedRow]) -> str:
    """Errors of what `rankwise plan` says of the rows; its constants were learnt from them (`constants.LEARNT`)."""
    planned = errors_of(rows, [step_time(setup).tokens_per_second for setup in map(setup_of, rows)])
    priors = errors_of(rows, [one.predicted for one in predict(rows, [])])
    words = [f"median {100 * one.median:.1f} %, p90 {100 * one.p90:.1f} %" for one in (planned, priors)]
    return f"rankwise plan, nothing fitted here: {words[0]} (in sample); priors of the hardware alone: {words[1]}"


def _print_growths(found: Sequence[Growth], header: str) -> None:
    print(f"\n{'growth':34} {'measured':>11} {'planner':>16} {'same per GPU':>18}")
    for one in found:
        title = f"{one.smaller['model']} {one.smaller['num_gpus']} to {one.larger['num_gpus']} GPUs"
        measured = float(one.larger[MEASURED])
        cells = " ".join(
            f"{value:11.0f} {100 * (value / measured - 1):+5.1f}" for value in (one.predicted, one.same_per_gpu)
        )
        print(f"{title:34} {measured:11.0f} {cells}")
    print(f"\n{'growth':34} {header}")
    for title, some in (("next doubling", [one for one in found if one.times == 2]), ("all growth", found)):
        larger = [one.larger for one in some]
        print(f"{title + ', planner':34} {errors_of(larger, [one.predicted for one in some])}")
        print(f"{title + ', same tokens/s per GPU':34} {errors_of(larger, [one.same_per_gpu for one in some])}")


def _print_constants(rows: Sequence[PublishedRow]) -> None:
    """Fitted on all rows, and how far they move when a model is left out."""
    whole = calibrated_on(rows).fitted
    folds = [
        calibrated_on([row for row in rows if row["model"] != model]).fitted
        for model in dict.fromkeys(map(model_of, rows))
    ]
    devices = [accelerator(name) for name in sorted(whole.of_device)]
    print(f"\n{'constant':28} {'prior':>8} {'fitted':>8}   least and most with a model left out")
    for name in SHARED:
        for device in devices if name in OF_A_DEVICE else devices[:1]:
            title = f"{name} {device.name}" if name in OF_A_DEVICE else name
            values = [_value(fold.constants(device), name) for fold in folds]
            fitted = _value(whole.constants(device), name)
            prior, moved = _value(prior_for(device), name), f"{min(values):.3f} to {max(values):.3f}"
            print(f"{title:28} {prior:8.3f} {fitted:8.3f}   {moved}")
    print("\ntimes the prior, all devices alike (`timing.constants.LEARNT` has those that planning uses):")
    print("  " + ", ".join(f"{name} {whole.shared[name]:.3f} ({LEARNT.get(name, 1.0):g})" for name in SHARED))


def _value(constants: DeviceConstants, name: str) -> float:
    return float(getattr(constants, name))


def _alike(row: PublishedRow, other: PublishedRow) -> bool:
    return row["gpu"] == other["gpu"]


def _full_rate(row: PublishedRow) -> float:
    """Tokens/s at an MFU of 1: FLOPs of a token by the file's convention, over all GPUs' peak."""
    architecture = setup_of(row).architecture
    attention = 12 * architecture.layers * architecture.hidden * int(row["sequence_length"])
    peak = accelerator(row["gpu"].replace("_", "-")).flops("bfloat16")
    return int(row["num_gpus"]) * peak / (6 * float(row["num_parameters"]) + attention)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PUBLISHED)
