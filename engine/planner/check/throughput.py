"""Predict training tokens/s from hardware constants and, optionally, from the rows of a fit file.

    predictions = predict(rows, fit=[])      # priors of the hardware alone
    predictions = predict(rows, fit)         # and fitted to `fit`: `engine.planner.timing.fitting`

Rows have model, sequence_length, num_gpus, gpu, micro_batch_size, and may have gradient_accumulation_steps,
global_batch_size, precision, sharding, activation_checkpointing. Measured columns of `rows` are never read
(tokens_per_second, tokens_per_second_per_gpu, mfu_percent, hfu_percent); of `fit` only tokens_per_second is.

Assumptions, because the rows lack these values: nodes of 8 GPUs; one 200 Gbit/s port a GPU between A100 nodes (the 1600
Gbit/s RoCE a node of the source) and one of 400 Gbit/s between H100 nodes (as in NVIDIA's DGX H100); FlashAttention;
FSDP's mixed precision in 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import TypeVar

from configs.common.execution import Layout
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Link, Machine
from engine.planner.catalog import find_model
from engine.planner.check.rows import PublishedRow, RowPrediction, factor_interval, measured_figure, positive_integer
from engine.planner.fitting.few import UNFITTED_FACTOR
from engine.planner.setup import Checkpointing, Precision, TrainingSetup
from engine.planner.timing.fitting import CalibratedConstants, calibrate_constants

T = TypeVar("T")

MEASURED = "tokens_per_second"
NODE_GPUS = 8
NINE_OF_TEN = 1.645
_HOP_SECONDS = 1.4e-5  # of NCCL's ring over a network: its own cost model, src/graph/tuning.cc, protocol Simple
_PORT_BITS_PER_SECOND = {"a100": 200e9, "h100": 400e9, "h200": 400e9}
_PRECISIONS: dict[str, Precision] = {
    "amp_bf16": "bfloat16_mixed", "bf16": "bfloat16_mixed", "bfloat16": "bfloat16_mixed",
    "amp_fp16": "float16_mixed", "fp16": "float16_mixed", "float16": "float16_mixed",
    "amp_fp8": "float8_mixed", "fp8": "float8_mixed", "float8": "float8_mixed",
    "fp32": "float32", "float32": "float32",
}  # fmt: skip
_SHARDINGS: dict[str, tuple[str, bool]] = {
    "FULL_SHARD": ("fsdp", True),
    "SHARD_GRAD_OP": ("fsdp", False),  # weights stay gathered from the forward to the backward
    "NO_SHARD": ("ddp", True),
}
_TRUTHS: dict[str, Checkpointing] = {
    "true": "full",
    "1": "full",
    "yes": "full",
    "false": "none",
    "0": "none",
    "no": "none",
}


@dataclass(frozen=True)
class _Understood:
    """A row as a setup; group: its model, whose rows are left out together in cross-validation of the correction."""

    setup: TrainingSetup
    group: str


def predict(rows: Sequence[PublishedRow], fit: Sequence[PublishedRow]) -> list[RowPrediction]:
    """One prediction of tokens_per_second a row; None with a reason for what is not known.

    Rows of `fit` without a measured figure, or with unknown values, are ignored.
    """
    calibrated = calibrated_on(fit)
    return [_predicted(row, calibrated) for row in rows]


def calibrated_on(fit: Sequence[PublishedRow]) -> CalibratedConstants:
    """What measured rows teach."""
    known: list[_Understood] = []
    measured: list[float] = []
    for row in fit:
        figure = measured_figure(row, MEASURED)
        if figure is None:
            continue
        try:
            known.append(_Understood(setup_of(row), _text(row, "model")))
        except ValueError:
            continue
        measured.append(figure)
    return calibrate_constants([each.setup for each in known], measured, [each.group for each in known])


def setup_of(row: PublishedRow) -> TrainingSetup:
    """What a row describes. Raises ValueError that names the column that is missing or not known."""
    length = positive_integer(row, "sequence_length")
    architecture = find_model(_text(row, "model")).with_positions(length)  # tables are made for the run
    gpus, micro_batch = positive_integer(row, "num_gpus"), positive_integer(row, "micro_batch_size")
    precision = _choice(row, "precision", _PRECISIONS, "amp_bf16")
    strategy, reshard = _choice(row, "sharding", _SHARDINGS, "FULL_SHARD")
    return TrainingSetup(
        architecture,
        _machine(_text(row, "gpu")),
        Layout.model_validate({"dp": gpus, "strategy": strategy if gpus > 1 else "none"}),
        micro_batch=micro_batch,
        sequence_length=length,
        accumulation=_accumulation(row, gpus * micro_batch),
        precision=precision,
        checkpointing=_choice(row, "activation_checkpointing", _TRUTHS, "false"),
        fused_optimizer=False,  # llm-foundry's DecoupledAdamW is a loop over tensors
        reshard=reshard,
    )


def _predicted(row: PublishedRow, calibrated: CalibratedConstants) -> RowPrediction:
    try:
        setup = setup_of(row)
        seconds, sigma = calibrated.step_seconds(setup)
        rate = setup.trained_tokens / seconds
        if not calibrated.correction.rows:
            return RowPrediction(
                rate, interval=factor_interval(rate, UNFITTED_FACTOR), support="data sheets and priors alone"
            )
        support = f"{calibrated.correction.rows} measured points of training"
        return RowPrediction(rate, interval=factor_interval(rate, exp(NINE_OF_TEN * sigma)), support=support)
    except ValueError as error:
        return RowPrediction(None, str(error).splitlines()[0])


def _machine(gpu: str) -> Machine:
    device = accelerator(gpu.lower().replace("_", "-").replace(" ", "-"))
    bits = _PORT_BITS_PER_SECOND.get(device.name.split("-")[0])
    between = Link(name="port", latency_seconds=_HOP_SECONDS, bytes_per_second=bits / 8) if bits else None
    return Machine(
        name=f"node of {NODE_GPUS} {device.name}", accelerator=device, accelerators=NODE_GPUS, between=between
    )


def _accumulation(row: PublishedRow, sequences: int) -> int:
    """Stated, or what the global batch is made of."""
    if (row.get("gradient_accumulation_steps") or "").strip():
        return positive_integer(row, "gradient_accumulation_steps")
    if (row.get("global_batch_size") or "").strip():
        return max(1, round(positive_integer(row, "global_batch_size") / sequences))
    return 1


def _text(row: PublishedRow, column: str) -> str:
    text = (row.get(column) or "").strip()
    if not text:
        raise ValueError(f"{column}: missing or empty")
    return text


def _choice(row: PublishedRow, column: str, choices: dict[str, T], default: str) -> T:
    text = (row.get(column) or "").strip() or default
    for name, value in choices.items():
        if name.lower() == text.lower():
            return value
    raise ValueError(f"{column}: {text!r} is not known; use one of: {', '.join(choices)}")
