"""How well the planner predicts published throughput of inference engines, rows left out, beside two simple rules.

    python -m benchmarks.planner.engines [docs/measurements/published]

Left out together: a pair of model and device, a device; everything is fitted anew without it. The simple rules: the
nearest measured row (of the same engine if there is one, by batch, lengths, ranks and size of model), and a constant
share of the memory's bandwidth for reading weights and cache (the median share of the other rows).
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np

from configs.common.arrays import Floats
from engine.planner.check.generation import measured_points
from engine.planner.check.table import read_published_rows
from engine.planner.engines.calibrated import fit_engines
from engine.planner.engines.point import BatchPoint

FILE = "inference_throughput.csv"
PUBLISHED = Path("docs/measurements/published")

Key = Callable[[BatchPoint], Hashable]


def main(published: Path) -> None:
    """Print all tables."""
    rows, _, _ = read_published_rows(published / FILE)
    points, measured = measured_points(rows)
    print(f"Tokens/s of {len(points)} published runs of vLLM and TensorRT-LLM; errors in %")
    print(f"\n{'left out':40} {'rows':>5} {'median':>8} {'p90':>8} {'worst':>8} {'held':>6}")
    keys: tuple[tuple[str, Key], ...] = (
        ("one pair of model and device", lambda point: point.pair),
        ("one device", lambda point: point.machine.accelerator.name),
    )
    for title, key in keys:
        errors, held = left_out(points, measured, key)
        _print(f"{title}, planner", errors, held)
        _print(f"{title}, nearest row", nearest(points, measured, key))
        _print(f"{title}, constant bandwidth", constant_bandwidth(points, measured, key))
        for name in sorted({str(key(point)) for point in points}):
            inside = np.array([str(key(point)) == name for point in points])
            _print(f"  {name}", errors[inside], held[inside])


def left_out(points: Sequence[BatchPoint], measured: Floats, key: Key) -> tuple[Floats, Floats]:
    """Return the relative error of each row's tokens/s without the rows of its key, and 1 where the interval held."""
    errors, held = np.zeros(len(points)), np.zeros(len(points))
    for kept, left in _folds(points, key):
        calibrated = fit_engines([points[at] for at in kept], measured[kept])
        for at, forecast in zip(left, calibrated.forecast([points[at] for at in left]), strict=True):
            errors[at] = abs(measured[at] / forecast.seconds - 1)
            held[at] = forecast.low <= measured[at] <= forecast.high
    return errors, held


def nearest(points: Sequence[BatchPoint], measured: Floats, key: Key) -> Floats:
    """Return the errors of the nearest other row's seconds per new token and sequence position."""
    places = np.array([_place(point) for point in points])
    errors = np.zeros(len(points))
    for kept, left in _folds(points, key):
        for at in left:
            far = ((places[kept] - places[at]) ** 2).sum(axis=1)
            other = kept[int(far.argmin())]
            each = measured[other] / points[other].new_tokens
            errors[at] = abs(measured[at] / (each * points[at].new_tokens) - 1)
    return errors


def constant_bandwidth(points: Sequence[BatchPoint], measured: Floats, key: Key) -> Floats:
    """Return the errors of reading weights and cache in each step at the median share of bandwidth of other rows."""
    ideal = np.array([_reading_seconds(point) for point in points])
    errors = np.zeros(len(points))
    for kept, left in _folds(points, key):
        times = float(np.median(measured[kept] / ideal[kept]))
        errors[left] = np.abs(measured[left] / (ideal[left] * times) - 1)
    return errors


def _reading_seconds(point: BatchPoint) -> float:
    mean = point.prompt_tokens + point.new_tokens / 2
    moved = point.weight_bytes + point.batch * mean * point.cache_bytes_per_token
    return point.new_tokens * moved / point.machine.accelerator.bytes_per_second


def _place(point: BatchPoint) -> list[float]:
    numbers = (point.batch, point.prompt_tokens, point.tp, point.architecture.parameters)
    return [*(float(np.log2(number)) for number in numbers), 4.0 * (point.engine == "vllm"),
            2.0 * float(np.log2(point.machine.accelerator.bytes_per_second))]  # fmt: skip


def _folds(points: Sequence[BatchPoint], key: Key) -> list[tuple[list[int], list[int]]]:
    """Return the rows kept and left out for each key."""
    keys = [key(point) for point in points]
    return [
        ([at for at, other in enumerate(keys) if other != one], [at for at, other in enumerate(keys) if other == one])
        for one in dict.fromkeys(keys)
    ]


def _print(title: str, errors: Floats, held: Floats | None = None) -> None:
    figures = (float(np.median(errors)), float(np.percentile(errors, 90)), float(errors.max()))
    inside = "" if held is None else f"{100 * held.mean():6.0f}"
    print(f"{title:40} {len(errors):5} " + " ".join(f"{100 * figure:8.1f}" for figure in figures) + f" {inside}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PUBLISHED)
