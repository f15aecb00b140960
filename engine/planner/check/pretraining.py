"""Predict tokens/s of each device in large-scale training, from five constants that the rows of a fit file move.

    predictions = predict(rows, fit)

Rows have model, gpu, num_gpus, precision (bf16, fp8_cs, fp8_mx, fp4), sequence_length, micro_batch_size, tp and pp, and
may have cp, vp, ep, global_batch_size and gradient_accumulation_steps. `tokens_per_second_per_gpu` is read from `fit`
alone, `model_tflops_per_gpu` never. Assumed: NVLink domains of 72 on GB devices and of 8 elsewhere, 400 Gbit/s a device
between them; data-parallel exchange hidden behind computation.
"""

from collections.abc import Sequence

from configs.hardware.catalog import accelerator
from engine.planner.catalog import find_model
from engine.planner.check.rows import PublishedRow, RowPrediction, known_rows, positive_integer, split_parts
from engine.planner.fitting.few import FewFit, fit_few
from engine.planner.timing.pretraining import PRETRAINING, Run

MEASURED = "tokens_per_second_per_gpu"
_PRECISIONS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp8_cs": "fp8_cs", "fp8_ds": "fp8_cs",
    "fp8_mx": "fp8_mx", "fp8_sc": "fp8_mx", "mxfp8": "fp8_mx", "fp4": "fp4", "nvfp4": "fp4",
}  # fmt: skip
_NODE_DEVICES = 8


def predict(rows: Sequence[PublishedRow], fit_rows: Sequence[PublishedRow]) -> list[RowPrediction]:
    """One prediction a row; None with a reason for what is not known."""
    fitted = fitted_on(fit_rows)
    return [_predicted(row, fitted) for row in rows]


def fitted_on(rows: Sequence[PublishedRow]) -> FewFit[Run]:
    """What measured rows teach; rows with unknown values are left out."""
    known, measured = known_rows(rows, MEASURED, run_of)
    return fit_few(PRETRAINING, known, measured)


def run_of(row: PublishedRow) -> Run:
    """What a row trained. Raises ValueError naming the column that is not known or does not agree with the others."""
    numbers = {
        name: positive_integer(row, name) for name in ("num_gpus", "sequence_length", "micro_batch_size", "tp", "pp")
    }
    degrees = {name: positive_integer(row, name) if (row.get(name) or "").strip() else 1 for name in ("cp", "vp", "ep")}
    precision = _PRECISIONS.get(row["precision"].strip().lower())
    if precision is None:
        raise ValueError(f"precision: {row['precision']!r} is not known; use one of: {', '.join(_PRECISIONS)}")
    ranks = numbers["tp"] * numbers["pp"] * degrees["cp"]
    if numbers["num_gpus"] % ranks:
        raise ValueError(f"num_gpus: {numbers['num_gpus']} are not a multiple of tp x pp x cp = {ranks}")
    architecture = find_model(row["model"])
    if architecture.kind != "decoder":
        raise ValueError(f"model: {row['model']} is not a decoder")
    device = accelerator(row["gpu"])
    if architecture.experts % degrees["ep"]:
        raise ValueError(f"ep: {degrees['ep']} ranks cannot share {architecture.experts} experts")
    if numbers["pp"] > architecture.layers:
        raise ValueError(f"pp: {numbers['pp']} stages for {architecture.layers} layers")
    if not architecture.splits(numbers["tp"]):
        raise ValueError(f"tp: {numbers['tp']} ranks cannot share {split_parts(architecture)} equally")
    return Run(
        architecture=architecture,
        device=device,
        domain=device.link_domain or _NODE_DEVICES,
        precision=precision,
        sequence_length=numbers["sequence_length"],
        micro_batch=numbers["micro_batch_size"],
        micro_batches=_micro_batches(row, numbers["num_gpus"] // ranks * numbers["micro_batch_size"], numbers["pp"]),
        tp=numbers["tp"],
        pp=numbers["pp"],
        cp=degrees["cp"],
        vp=degrees["vp"],
        ep=degrees["ep"],
    )


def _micro_batches(row: PublishedRow, sequences: int, stages: int) -> float:
    """Return those of the global batch, else the stated accumulation; without a pipeline they do not matter.

    Raises ValueError where a pipeline's bubble depends on them and neither is given.
    """
    if (row.get("global_batch_size") or "").strip():
        return max(1.0, positive_integer(row, "global_batch_size") / sequences)
    if (row.get("gradient_accumulation_steps") or "").strip():
        return float(positive_integer(row, "gradient_accumulation_steps"))
    if stages > 1:
        raise ValueError(f"global_batch_size: missing or empty; the idle time of {stages} stages depends on it")
    return 1.0


def _predicted(row: PublishedRow, fitted: FewFit[Run]) -> RowPrediction:
    try:
        value, low, high = fitted.predict(run_of(row))
    except ValueError as error:
        return RowPrediction(None, str(error).splitlines()[0])
    support = f"{fitted.rows} measured points of training" if fitted.rows else "data sheets and priors alone"
    return RowPrediction(value, interval=(low, high), support=support)
