"""Predict output tokens/s of each device at saturation, from six constants that the rows of a fit file move.

    predictions = predict(rows, fit)

Rows have model, gpu, layout (`tp2`, `dep8`: data-parallel attention with expert parallelism), precision (bf16, fp8,
fp4), prompt_tokens and new_tokens. `output_tokens_per_second_per_gpu` is read from `fit` alone. Intervals are widened
until they hold 90 % of the rows of left-out models.
"""

import re
from collections.abc import Sequence

from configs.hardware.catalog import accelerator
from engine.planner.catalog import find_model
from engine.planner.check.rows import PublishedRow, RowPrediction, known_rows, positive_integer, split_parts
from engine.planner.fitting.few import FewFit, fit_few
from engine.planner.timing.saturated import SATURATED, SaturatedServer, sequences

MEASURED = "output_tokens_per_second_per_gpu"
_PRECISIONS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16", "fp8": "fp8", "float8": "fp8", "w8a8": "fp8", "fp4": "fp4",
    "nvfp4": "fp4", "mxfp4": "fp4", "float4": "fp4",
}  # fmt: skip
_LAYOUT = re.compile(r"(tp|dep|dp|ep|tep)([1-9]\d*)(?:ep(\d+))?$")


def predict(rows: Sequence[PublishedRow], fit_rows: Sequence[PublishedRow]) -> list[RowPrediction]:
    """One prediction a row; None with a reason for what is not known."""
    fitted = fitted_on(fit_rows)
    return [_predicted(row, fitted) for row in rows]


def fitted_on(rows: Sequence[PublishedRow]) -> FewFit[SaturatedServer]:
    """What measured rows teach; rows with unknown values are left out."""
    known, measured = known_rows(rows, MEASURED, service_of)
    return fit_few(SATURATED, known, measured, [service.architecture.name for service in known])


def service_of(row: PublishedRow) -> SaturatedServer:
    """What a row describes. Raises ValueError naming the column that is not known, or why it does not fit."""
    found = _LAYOUT.fullmatch(row["layout"].strip().lower())
    if found is None:
        raise ValueError(f"layout: {row['layout']!r} is not known; write tp8, or dep8 for data-parallel attention")
    precision = _PRECISIONS.get(row["precision"].strip().lower())
    if precision is None:
        raise ValueError(f"precision: {row['precision']!r} is not known; use one of: {', '.join(_PRECISIONS)}")
    architecture = find_model(row["model"])
    if architecture.kind != "decoder":
        raise ValueError(f"model: {row['model']} is not a decoder")
    service = SaturatedServer(
        architecture=architecture,
        device=accelerator(row["gpu"]),
        ranks=int(found[2]),
        expert_parallel=found[1] in ("dep", "dp") and int(found[2]) > 1,
        precision=precision,
        prompt_tokens=positive_integer(row, "prompt_tokens"),
        new_tokens=positive_integer(row, "new_tokens"),
    )
    if found[1] in ("tp", "tep") and not architecture.splits(service.ranks):
        raise ValueError(f"layout: {service.ranks} ranks cannot share {split_parts(architecture)} equally")
    sequences(service)
    return service


def _predicted(row: PublishedRow, fitted: FewFit[SaturatedServer]) -> RowPrediction:
    try:
        service = service_of(row)
        value, low, high = fitted.predict(service)
    except ValueError as error:
        return RowPrediction(None, str(error).splitlines()[0])
    support = f"{fitted.rows} measured points of serving" if fitted.rows else "data sheets and priors alone"
    return RowPrediction(value, interval=(low, high), support=support)
