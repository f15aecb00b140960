"""Predict a `train` cell: its setup, seconds, memory, traffic, and the peak for MFU.

    setup = training_setup(cell, architecture, machine)
    figures = training_figures(cell, architecture, machine)      # fields of configs.plans.prediction.Prediction; or a
    reason

The engine (`engine.training`) computes with float32 weights under autocast on one rank and in DDP, in gathered or kept
16-bit weights in FSDP2 and ZeRO, and frees the logits before the backward pass.
"""

from dataclasses import replace
from typing import Any

from configs.common.execution import Layout
from configs.hardware.hardware import Accelerator, Machine
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.heads import as_computed
from engine.planner.memory.framework import of_engine
from engine.planner.memory.training import training_memory
from engine.planner.results import Memory, StepTime
from engine.planner.setup import Precision, TrainingSetup
from engine.planner.splits import why_not_split_in_training
from engine.planner.timing.cpu import can_measure, measured_step_time
from engine.planner.timing.traffic import step_network_bytes
from engine.planner.timing.training import step_time

EAGER_LAYER_SECONDS = 2e-4
"""A prefill of our engine and training issue a layer's operators one by one from Python, and the GPU waits. Minimum
time of a layer on a server core with warm caches, measured by this project's calibration, 2026-11.
"""
DEEPSPEED_BYTES = 142 << 20
"""What importing DeepSpeed 0.19.8 adds to a process that has torch: resident memory before and after, 2026-11. A
calibration covers the engine's libraries only.
"""
_EAGER_TRAINING = 3
"""Backward and optimizer issue about twice as many operators as the forward: assumption."""

_KINDS = {
    "causal_lm": "decoder",
    "masked_lm": "encoder",
    "seq2seq": "encoder_decoder",
    "text_classification": None,
    "image_classification": "vision",
}
"""Kind of model that a task trains; None: any text model."""


def training_setup(cell: Cell, architecture: Architecture, machine: Machine) -> TrainingSetup:
    """Return the step of a `train` cell. float16 is treated as bfloat16 where autocast casts: sizes are equal."""
    work, layout = cell.workload, cell.layout
    assert isinstance(work, TrainWorkload)
    accumulation = max(1, work.accumulation(layout.dp))
    sharded = layout.strategy not in ("none", "ddp")
    precision: Precision = "float32"
    if cell.dtype != "float32":
        precision = "bfloat16_autocast"
        if sharded:
            precision = "bfloat16_mixed" if cell.dtype == "bfloat16" else "float16_mixed"
    on_host = machine.accelerator.kind == "cpu" and layout.strategy == "fsdp"
    return TrainingSetup(
        architecture=as_split(as_computed(architecture, work), layout),
        machine=machine,
        layout=layout,
        micro_batch=max(1, work.global_batch_size // layout.dp // accumulation),
        # An image has as many tokens as its model has positions.
        sequence_length=(architecture.positions if architecture.kind == "vision" else 0) or work.sequence_length,
        accumulation=accumulation,
        precision=precision,
        checkpointing=work.activation_checkpointing,
        optimizer=work.optimizer,
        # On a CPU, FSDP2's offload target is the memory that holds its shards: nothing moves.
        offload="none" if on_host else work.offload,
        compiled=work.compiled,
        sharding=work.sharding,
        deferred=layout.strategy == "fsdp",
        wide_reduction=layout.strategy == "fsdp",
    )


def as_split(architecture: Architecture, layout: Layout) -> Architecture:
    """Return the architecture as split over tp ranks in training; DeepSpeed's ZeRO splits blocks only."""
    if layout.tp == 1 or not layout.strategy.startswith("zero"):
        return architecture
    weights = (weight if weight.block else replace(weight, split=None) for weight in architecture.weights)
    return replace(architecture, weights=tuple(weights))


def unpredicted(cell: Cell, architecture: Architecture) -> str | None:
    """Why nothing is said of a cell that trains; None: something is."""
    work = cell.workload
    assert isinstance(work, TrainWorkload)
    kind = _KINDS[work.task]
    if kind is not None and architecture.kind != kind:
        return f"{work.task} is for a model of kind {kind}, and this is one of kind {architecture.kind}"
    if work.task == "text_classification" and architecture.kind == "vision":
        return "text_classification is for a model that reads words"
    if architecture.position_limit is not None and work.sequence_length > architecture.position_limit:
        limit = f"{architecture.position_limit} positions"
        if work.task != "image_classification":
            return f"sequences of {work.sequence_length} tokens are more than the model's {limit}"
    return why_not_split_in_training(architecture, cell.layout)


def seconds_of(setup: TrainingSetup) -> StepTime:
    """Return seconds of one step: from measured operators if the machine has them and they cover the model."""
    measured = setup.layout.pp == 1 and can_measure(setup.architecture, setup.machine.accelerator)
    return measured_step_time(setup) if measured else step_time(setup)


def training_figures(cell: Cell, architecture: Architecture, machine: Machine) -> tuple[dict[str, Any], Memory]:
    """Fields of a Prediction without memory and interval; and the memory. Raises ValueError for an unknown link."""
    work, setup = cell.workload, training_setup(cell, architecture, machine)
    assert isinstance(work, TrainWorkload)
    time, exposed = seconds_of(setup), None
    seconds = time.seconds
    if machine.accelerator.kind != "cpu":
        seconds = max(seconds, _EAGER_TRAINING * architecture.layers * EAGER_LAYER_SECONDS)
    if setup.layout.dp > 1 and setup.layout.tp == setup.layout.pp == 1:
        exposed = time.exposed_seconds
    peak = _peak(machine.accelerator, cell.dtype)
    notes = ["float16 taken for as fast as bfloat16"] if cell.dtype == "float16" else []
    if work.compiled and machine.accelerator.kind == "cpu":
        notes.append("torch.compile taken for no gain")
    figures = {
        "tokens_per_second": setup.trained_tokens / seconds,
        "step_seconds": seconds,
        "exposed_communication_seconds": exposed,
        "network_bytes_per_step": step_network_bytes(setup),
        "peak_flops": peak,
        "peak_source": _peak_source(machine.accelerator) if peak else "",
        "basis": "; ".join(notes),
    }
    return figures, training_memory(setup, of_engine(setup.architecture.parameters))


def _peak(accelerator: Accelerator, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of a rank's device in a dtype; None if unknown."""
    try:
        return accelerator.flops(dtype)
    except ValueError:
        return None


def _peak_source(accelerator: Accelerator) -> str:
    return f"{accelerator.title or accelerator.name}: {accelerator.source}"
