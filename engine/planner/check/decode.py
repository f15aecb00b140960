"""Predict tokens/s of tensor-parallel decode from hardware constants and the smallest row of each model.

    predictions = predict(rows, fit=[])          # constants alone
    predictions = predict(rows, fit)             # and one scale for each model, from its row with the fewest GPUs

Rows have model, num_gpus, gpu, dtype, batch_size and prompt_tokens; `tokens_per_second` is read from `fit` only,
`achieved_bandwidth_gb_per_second` never. A scale multiplies the whole time of a step: an engine's kernels deviate from
the constants equally on any number of GPUs.

The engine is assumed to resemble gpt-fast (github.com/pytorch-labs/gpt-fast, tp.py and quantize.py, read 2026-11-21):
compiled and captured, table and head whole on each GPU, int8 and int4 for the head too, int4 in groups of 32 under
tensor parallelism, 200 new tokens, GPUs of one node.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from configs.common.execution import Layout
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Machine
from engine.planner.catalog import find_model
from engine.planner.check.rows import (
    PublishedRow,
    RowPrediction,
    factor_interval,
    measured_figure,
    positive_integer,
    split_parts,
)
from engine.planner.fitting.few import UNFITTED_FACTOR
from engine.planner.setup import InferenceSetup, WeightFormat
from engine.planner.timing.inference import generation_time

MEASURED = "tokens_per_second"
_NODE_GPUS = 8
_SCALED_FACTOR = 1.1
"""Width of the interval either way: as a data sheet's (`engine.planner.cells.prior_factor`), and of a model that has a
scale (worst published row 3 %, over the range of both constants 10 %)."""
_NEW_TOKENS = 200
_INT4_GROUP = 32
_FORMATS: dict[str, WeightFormat] = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16",
    "fp32": "float32", "float32": "float32", "fp8": "float8", "float8": "float8",
    "int8": "int8", "8bit": "int8", "w8a16": "int8", "int4": "int4", "4bit": "int4", "w4a16": "int4",
}  # fmt: skip


@dataclass(frozen=True)
class _Point:
    """A parsed row."""

    setup: InferenceSetup
    gpu: str
    dtype: str

    @property
    def model(self) -> str:
        return self.setup.architecture.name

    @property
    def tokens_per_second(self) -> float:
        """New tokens/s of all sequences from constants alone; prefill time is excluded, as in decode rows."""
        return self.setup.batch / generation_time(self.setup).token_seconds


@dataclass(frozen=True)
class _Scale:
    """Ratio of measured to predicted for one fit row."""

    point: _Point
    value: float


def predict(rows: Sequence[PublishedRow], fit: Sequence[PublishedRow]) -> list[RowPrediction]:
    """One prediction a row; None with a reason for what is not known."""
    scales = _scales(fit)
    return [_predicted(row, scales) for row in rows]


def _predicted(row: PublishedRow, scales: Sequence[_Scale]) -> RowPrediction:
    try:
        point = _point(row)
        rate = point.tokens_per_second * _scale_of(point, scales)
        own = sum(scale.point.model == point.model and scale.point.gpu == point.gpu for scale in scales)
        factor = _SCALED_FACTOR if own else UNFITTED_FACTOR
        support = f"{own} measured points of this model and GPU" if own else "hardware constants alone"
        return RowPrediction(rate, interval=factor_interval(rate, factor), support=support)
    except ValueError as error:
        return RowPrediction(None, str(error))


def _scales(fit: Sequence[PublishedRow]) -> list[_Scale]:
    """Of each model, GPU and dtype the row with the fewest GPUs (of equals, the smallest batch)."""
    smallest: dict[tuple[str, str, str], tuple[tuple[int, int], _Scale]] = {}
    for row in fit:
        measured = measured_figure(row, MEASURED)
        if measured is None:
            continue
        try:
            point = _point(row)
            predicted = point.tokens_per_second
        except ValueError:
            continue  # unknown rows are not used for the fit
        scale = _Scale(point, measured / predicted)
        size = (point.setup.layout.tp, point.setup.batch)
        key = (point.model, point.gpu, point.dtype)
        if key not in smallest or size < smallest[key][0]:
            smallest[key] = (size, scale)
    return [scale for _, scale in smallest.values()]


def _scale_of(point: _Point, scales: Sequence[_Scale]) -> float:
    """Return the scale of the row's model; else the median of the most similar scales; else 1."""
    like: tuple[Callable[[_Point], tuple[str, ...]], ...] = (
        lambda other: (other.model, other.gpu, other.dtype),
        lambda other: (other.gpu, other.dtype),
        lambda other: (other.model, other.gpu),
        lambda other: (other.gpu,),
        lambda _: (),
    )
    for same in like:
        found = [scale.value for scale in scales if same(scale.point) == same(point)]
        if found:
            return median(found)
    return 1.0


def _point(row: PublishedRow) -> _Point:
    """Raises ValueError for a model, GPU, dtype or number that is not known."""
    weights, group = number_format(row["dtype"])
    gpus = positive_integer(row, "num_gpus")
    if gpus > _NODE_GPUS:
        raise ValueError(
            f"num_gpus: {gpus} are more than the {_NODE_GPUS} of a node, and no link between nodes is given"
        )
    device = accelerator(row["gpu"])
    compute = weights if weights in ("float32", "float16") else "bfloat16"
    setup = InferenceSetup(
        architecture=find_model(row["model"]),
        machine=Machine(name=device.name, accelerator=device, accelerators=_NODE_GPUS),
        layout=Layout(tp=gpus),
        batch=positive_integer(row, "batch_size"),
        prompt_tokens=positive_integer(row, "prompt_tokens"),
        new_tokens=_NEW_TOKENS,
        weights=weights,
        compute=compute,
        quantised_head=True,
        int4_group=group,
        sharded_vocabulary=False,
    )
    if not setup.architecture.splits(gpus):
        raise ValueError(f"num_gpus: {gpus} ranks cannot share {split_parts(setup.architecture)} equally")
    if not setup.architecture.decoder_layers:
        raise ValueError(f"model: {row['model']} generates nothing")
    return _Point(setup, device.name, weights)


def number_format(text: str) -> tuple[WeightFormat, int]:
    """Parse `bf16`, `int8`, `int4`, `int4-g128`, `4-bit (G=64)` into format and int4 group size."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower()).replace("weightonly", "")
    found = re.fullmatch(r"([a-z]*\d+(?:bit|a16)?)(?:(?:g|group|groupsize)([1-9]\d*))?", plain)
    if found is None and plain in _FORMATS:
        return _FORMATS[plain], _INT4_GROUP
    if found is None or found[1] not in _FORMATS:
        raise ValueError(f"dtype: {text!r} is not known; use one of: bf16, fp16, fp32, fp8, int8, int4, int4-g128")
    return _FORMATS[found[1]], int(found[2] or _INT4_GROUP)
