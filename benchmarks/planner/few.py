"""How well saturated serving, large-scale training and slow links are predicted, rows left out, beside simple rules.

    python -m benchmarks.planner.few [docs/measurements/published]

Left out: a model (serving), a row (training), the 8 devices of a model (slow links), and all rows but those of 1 and 2
devices. The simple rules: a constant share of the peak (the median of the other rows of the device), and perfect
scaling from the fewest devices.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from engine.planner.check import pretraining, serving, slow_link
from engine.planner.check.rows import PublishedRow, RowPrediction
from engine.planner.check.table import read_published_rows
from engine.planner.flops import model_flops

PUBLISHED = Path("docs/measurements/published")
Predictor = Callable[[Sequence[PublishedRow], Sequence[PublishedRow]], list[RowPrediction]]


def main(published: Path) -> None:
    """Print all tables."""
    for part in (_serving, _training, _links):
        part(published)


def _serving(published: Path) -> None:
    rows, _, _ = read_published_rows(published / "serving_max_throughput.csv")
    print("\nOutput tokens/s of each GPU, saturated serving, one model left out")
    found = left_out(rows, lambda row: row["model"], serving.predict)
    _table(rows, found, serving.MEASURED, ("model", "gpu", "layout", "precision", "prompt_tokens", "new_tokens"))
    _summary("one model, planner", rows, found, serving.MEASURED)
    simple = constant_share(rows, serving.MEASURED, _serving_flops, lambda row: row["model"])
    _summary("one model, constant share of the peak", rows, simple, serving.MEASURED)


def _training(published: Path) -> None:
    rows, _, _ = read_published_rows(published / "large_scale_training.csv")
    print("\nTokens/s of each GPU, large-scale training, one row left out")
    found = left_out(rows, id, pretraining.predict)
    _table(rows, found, pretraining.MEASURED, ("model", "gpu", "num_gpus", "precision", "tp", "pp", "ep"))
    simple = constant_share(rows, pretraining.MEASURED, _training_flops, id)
    for title, experts in (("dense", False), ("with experts", True)):
        kept = [at for at, row in enumerate(rows) if pretraining.run_of(row).has_experts == experts]
        some = [rows[at] for at in kept]
        _summary(f"{title}, planner", some, [found[at] for at in kept], pretraining.MEASURED)
        _summary(f"{title}, constant MFU", some, [simple[at] for at in kept], pretraining.MEASURED)


def _links(published: Path) -> None:
    rows, _, _ = read_published_rows(published / "cpu_tensor_parallel_ethernet.csv")
    shown = ("model", "num_devices", "link")
    small = [row for row in rows if int(row["num_devices"]) <= 2]
    larger = [row for row in rows if int(row["num_devices"]) > 2]
    print("\nMilliseconds of a token over 1 Gbit/s Ethernet, from the rows of 1 and 2 devices")
    _table(larger, slow_link.predict(larger, small), slow_link.MEASURED, shown)
    print("8 devices of one model left out")
    eights = [row for row in rows if row["num_devices"] == "8"]
    found = [slow_link.predict([row], [other for other in rows if other is not row])[0] for row in eights]
    _table(eights, found, slow_link.MEASURED, shown)
    _summary("8 devices, planner", eights, found, slow_link.MEASURED)
    perfect = []
    for row in eights:
        alike = [other for other in rows if other["model"] == row["model"] and other is not row]
        fewest = min(alike, key=lambda other: int(other["num_devices"]), default=None)
        if fewest is None:
            perfect.append(RowPrediction(None))
            continue
        perfect.append(RowPrediction(float(fewest[slow_link.MEASURED]) * int(fewest["num_devices"]) / 8))
    _summary("8 devices, perfect scaling", eights, perfect, slow_link.MEASURED)


def left_out(
    rows: Sequence[PublishedRow], key: Callable[[PublishedRow], Hashable], predict: Predictor
) -> list[RowPrediction]:
    """Return the prediction of each row from all rows with another key."""
    return [predict([row], [other for other in rows if key(other) != key(row)])[0] for row in rows]


def constant_share(
    rows: Sequence[PublishedRow],
    measured: str,
    flops: Callable[[PublishedRow], float],
    key: Callable[[PublishedRow], Hashable],
) -> list[RowPrediction]:
    """Return predictions at the median share of the peak of the other rows of a GPU and precision, else of all."""
    found = []
    for row in rows:
        others = [other for other in rows if key(other) != key(row)]
        alike = [other for other in others if all(other[name] == row[name] for name in ("gpu", "precision"))] or others
        found.append(RowPrediction(median(float(other[measured]) * flops(other) for other in alike) / flops(row)))
    return found


def _serving_flops(row: PublishedRow) -> float:
    """Return the share of the peak that one output token a second takes."""
    service = serving.service_of(row)
    tokens = (service.prompt_tokens + service.new_tokens) / service.new_tokens
    peak = service.device.flops({"bf16": "bfloat16", "fp4": "float4"}.get(service.precision, "float8"))
    return 2 * service.architecture.active_parameters * tokens / peak


def _training_flops(row: PublishedRow) -> float:
    run = pretraining.run_of(row)
    peak = run.device.flops("float8" if run.precision.startswith("fp8") else "bfloat16")
    return model_flops(run.architecture, run.sequence_length, run.sequence_length) / run.sequence_length / peak


def _table(rows: Sequence[PublishedRow], found: Sequence[RowPrediction], measured: str, shown: Sequence[str]) -> None:
    for row, prediction in zip(rows, found, strict=True):
        words, figure = " ".join(f"{row[name]:>10}" for name in shown), float(row[measured])
        if prediction.predicted is None or prediction.interval is None:
            print(f"{words} {figure:9.0f} - ({prediction.reason})")
            continue
        low, high = prediction.interval
        error = 100 * (prediction.predicted / figure - 1)
        print(f"{words} {figure:9.0f} {prediction.predicted:9.0f} {error:+6.1f} % ({low:.0f} to {high:.0f})")


def _summary(title: str, rows: Sequence[PublishedRow], found: Sequence[RowPrediction], measured: str) -> None:
    pairs = [(one, float(row[measured])) for row, one in zip(rows, found, strict=True) if one.predicted is not None]
    errors = [abs((one.predicted or 0.0) / figure - 1) for one, figure in pairs]
    held = [one.interval[0] <= figure <= one.interval[1] for one, figure in pairs if one.interval]
    line = (
        f"{title}: {len(errors)} rows, median {100 * median(errors):.1f} %, p90 {100 * np.percentile(errors, 90):.1f} %"
    )
    print(f"{line}, worst {100 * max(errors):.1f} %" + (f", intervals hold {sum(held)} of {len(held)}" if held else ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PUBLISHED)
