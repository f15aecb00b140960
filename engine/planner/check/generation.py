"""Predict tokens/s of batched offline generation by an inference engine, from constants and the rows of a fit file.

    predictions = predict(rows, fit)        # tokens of prompt and output a second, with 90 % intervals

Rows have model, gpu, num_gpus, framework, batch_size, prompt_tokens and new_tokens, and may have dtype. Of `fit`,
tokens_per_second is read, or latency_seconds where that is empty; of `rows` neither is. Without `fit`, the shipped
constants predict (`engine.planner.engines.saved`), so rows of the file that they were fitted on are in-sample.
"""

from collections.abc import Sequence

import numpy as np

from configs.common.arrays import Floats
from configs.common.execution import Layout
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Machine
from engine.planner.catalog import find_model
from engine.planner.check.decode import number_format
from engine.planner.check.rows import PublishedRow, RowPrediction, measured_figure, positive_integer, split_parts
from engine.planner.engines.calibrated import BatchForecast, CalibratedEngines, fit_engines
from engine.planner.engines.constants import engine_name
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.saved import shipped
from engine.planner.engines.work import PhaseWork

MEASURED, LATENCY = "tokens_per_second", "latency_seconds"
_NODE_GPUS = 8
_BY_LAYERS = ("llama.cpp", "transformers")
"""Engines that give each GPU some of the layers, on any number of them."""


def complete(row: PublishedRow) -> PublishedRow:
    """Return a row with tokens_per_second from latency_seconds, if it has only that."""
    latency = measured_figure(row, LATENCY)
    if row.get(MEASURED) or latency is None:
        return row
    try:
        numbers = [positive_integer(row, name) for name in ("batch_size", "prompt_tokens", "new_tokens")]
    except ValueError:
        return row
    return row | {MEASURED: repr(numbers[0] * (numbers[1] + numbers[2]) / latency)}


def predict(rows: Sequence[PublishedRow], fit: Sequence[PublishedRow]) -> list[RowPrediction]:
    """One prediction a row; None with a reason for what is not known."""
    calibrated = calibrated_on(fit) if fit else shipped()
    found: list[RowPrediction | None] = []
    points: list[BatchPoint] = []
    for row in rows:
        try:
            points.append(checked_point(row))
            found.append(None)
        except ValueError as error:
            found.append(RowPrediction(None, str(error).splitlines()[0]))
    learned = calibrated.learned_from(points) if not fit else [False] * len(points)  # `--fit` is told by the rows
    forecasts = iter(zip(points, calibrated.forecast(points), learned, strict=True))
    return [one if one is not None else _rate(*next(forecasts)) for one in found]


def calibrated_on(fit: Sequence[PublishedRow]) -> CalibratedEngines:
    """What measured rows teach; rows with unknown values are left out."""
    points, measured = measured_points(fit)
    return fit_engines(points, measured)


def measured_points(rows: Sequence[PublishedRow]) -> tuple[list[BatchPoint], Floats]:
    """Return the points of rows that were measured, and their seconds."""
    points, measured = [], []
    for row in rows:
        rate, latency = measured_figure(row, MEASURED), measured_figure(row, LATENCY)
        if rate is None and latency is None:
            continue
        try:
            point = checked_point(row)
        except ValueError:
            continue
        points.append(point)
        measured.append(latency if rate is None or latency is not None else point.tokens / rate)
    return points, np.array(measured, dtype=np.float64)


def checked_point(row: PublishedRow) -> BatchPoint:
    """What a row describes. Raises ValueError naming the column that is not known, or why it does not fit."""
    gpus, engine = positive_integer(row, "num_gpus"), engine_name(row["framework"])
    if gpus > _NODE_GPUS:
        raise ValueError(f"num_gpus: {gpus} are more than the {_NODE_GPUS} of a node; tensor parallelism stays in one")
    device = accelerator(row["gpu"])
    weights, _ = number_format(row.get("dtype") or row.get("precision") or "bf16")
    architecture = find_model(row["model"])
    if not architecture.decoder_layers or architecture.kind != "decoder":
        raise ValueError(f"model: {row['model']} is not a decoder")
    if gpus > architecture.heads or (engine not in _BY_LAYERS and not architecture.splits(gpus)):
        raise ValueError(f"num_gpus: {gpus} ranks cannot share {split_parts(architecture)} equally")
    point = BatchPoint(
        engine=engine,
        architecture=architecture,
        machine=Machine(name=device.name, accelerator=device, accelerators=_NODE_GPUS),
        tp=Layout(tp=gpus).tp,
        batch=positive_integer(row, "batch_size"),
        prompt_tokens=positive_integer(row, "prompt_tokens"),
        new_tokens=positive_integer(row, "new_tokens"),
        weights=weights,
    )
    PhaseWork.of([point])  # it fits, and its links are known
    return point


def _rate(point: BatchPoint, forecast: BatchForecast, in_sample: bool) -> RowPrediction:
    rate = point.tokens / forecast.seconds
    interval = (point.tokens / forecast.high, point.tokens / forecast.low)
    return RowPrediction(rate, interval=interval, support=forecast.support, in_sample=in_sample)
