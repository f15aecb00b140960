"""Candidates as plain dictionaries and sentences: the keys of `HardwareSelector`'s results.

GB is 10^9 bytes throughout: a limit of 24 GB is 24e9 bytes, slightly less than 24 GiB, so a setup that fits the limit
fits the device.
"""

from typing import Any

from configs.spec.cell import Cell
from configs.workloads.noop import NoopWorkload
from engine.planner.cells import interval, prior_factor
from engine.planner.choice.launchers import zero_section, zero_stage
from engine.planner.choice.rules import Rule
from engine.planner.choice.search import EvaluatedSetup
from engine.planner.learning import factor_once_measured
from engine.planner.results import GenerationTime, Memory, StepTime
from engine.planner.setup import InferenceSetup, TrainingSetup

GB = 1e9
ALONE = "1 rank"
MEASURABLE = ("cuda", "rocm", "cpu")
"""Kinds of accelerators on which Rankwise runs; others are only predicted."""
_TITLES = {"none": ALONE, "ddp": "DDP", "fsdp": "FSDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def memory_dict(memory: Memory, devices: int) -> dict[str, float]:
    """Return GB of each device by purpose; `total_gb` of all devices, `host_gb` and `storage_gb` offloaded by each
    rank.
    """
    parts = {
        "parameters_gb": memory.parameters,
        "gradients_gb": memory.gradients,
        "optimizer_gb": memory.optimizer,
        "activations_gb": memory.activations,
        "logits_gb": memory.logits,
        "kv_cache_gb": memory.kv_cache,
        "communication_gb": memory.communication,
        "framework_gb": memory.framework,
        "per_gpu_gb": memory.total,
        "total_gb": memory.total * devices,
        "host_gb": memory.host_bytes,
        "storage_gb": memory.storage_bytes,
    }
    return {name: size / GB for name, size in parts.items()}


def framework_of(setup: TrainingSetup) -> str:
    """Return DDP, FSDP or DeepSpeed. One GPU without sharding counts as DDP with one rank."""
    strategy = setup.layout.strategy
    return "FSDP" if strategy == "fsdp" else "DeepSpeed" if strategy.startswith("zero") else "DDP"


def title(setup: TrainingSetup | InferenceSetup) -> str:
    """Return a title such as `FSDP, dp=4 x tp=2, CPU offload`."""
    layout = setup.layout
    if isinstance(setup, InferenceSetup):
        return str(layout)
    words = [_TITLES[layout.strategy]] if layout.strategy != "none" or layout.ranks == 1 else []
    words += [str(layout)] if layout.ranks > 1 else []
    words += [f"{setup.checkpointing} checkpointing"] if setup.checkpointing != "none" else []
    words += [f"{'CPU' if setup.offload == 'cpu' else 'NVMe'} offload"] if setup.offload != "none" else []
    return ", ".join(words)


def training_dict(candidate: EvaluatedSetup) -> dict[str, Any]:
    """Return the keys shared by the chosen setup, the rule's setup and each table row."""
    setup = candidate.setup
    assert isinstance(setup, TrainingSetup)
    time = candidate.time
    assert time is None or isinstance(time, StepTime)
    return {
        "title": title(setup),
        "distributed_strategy": framework_of(setup),
        "layout": setup.layout.model_dump(),
        "per_gpu_batch_size": setup.micro_batch,
        "gradient_accumulation_steps": setup.accumulation,
        "global_batch_size": setup.global_batch,
        "gradient_checkpointing": setup.checkpointing != "none",
        "checkpointing": setup.checkpointing,
        "offload": setup.offload,
        "per_gpu_gb": candidate.memory.total / GB,
        "fits": candidate.fits,
        "why_not": candidate.why_not,
        "step_seconds": candidate.seconds,
        "tokens_per_second": candidate.tokens_per_second,
        "usd_per_million_tokens": candidate.usd_per_million_tokens,
        "model_flops_utilization": time and utilization(setup, time),
    }


def utilization(setup: TrainingSetup, time: StepTime) -> float:
    """Return MFU: model FLOPs over the dense peak of the format used for matrix products."""
    dtype = "float32" if setup.precision == "float32" else "bfloat16"
    peak = setup.machine.accelerator.flops(dtype) * setup.layout.ranks
    return time.model_flops / (time.seconds * peak)


def inference_dict(candidate: EvaluatedSetup) -> dict[str, Any]:
    """Return the keys of `training_dict` for generation."""
    setup, time = candidate.setup, candidate.time
    assert isinstance(setup, InferenceSetup)
    assert time is None or isinstance(time, GenerationTime)
    return {
        "title": title(setup),
        "layout": setup.layout.model_dump(),
        "batch_size_per_replica": setup.batch,
        "weights": setup.weights,
        "per_gpu_gb": candidate.memory.total / GB,
        "fits": candidate.fits,
        "why_not": candidate.why_not,
        "batch_seconds": candidate.seconds,
        "ttft_seconds": time and time.prefill_seconds,
        "time_per_output_token_seconds": time.token_seconds if time and time.new_tokens else None,
        "tokens_per_second": candidate.tokens_per_second,
        "usd_per_million_tokens": candidate.usd_per_million_tokens,
    }


def supported(candidate: EvaluatedSetup) -> dict[str, str | None]:
    """Return what the prediction rests on, and the one measurement that would narrow it most with its effect."""
    device = candidate.setup.machine.accelerator
    if device.operators:
        support = "operators that were measured on this machine"
    elif device.kind == "cpu":
        support = f"no measurement; {device.source.split(';')[0]}"
    else:
        support = f"the data sheet of {device.name} and usual efficiencies, no measured row"
    said = spread(candidate)
    if said is None or not candidate.fits:
        return {"support": support, "measure_next": None}
    if device.kind not in MEASURABLE:
        return {"support": f"{support}; Rankwise does not run on {device.kind}", "measure_next": None}
    after, factor = factor_once_measured(), said["factor"]
    effect = f"the factor would be {after:.2f} instead of {factor:.2f}"
    return {"support": support, "measure_next": f"a run of this layout, for --learn-from; {effect}"}


def time_dict(time: StepTime) -> dict[str, float]:
    """Return seconds of a step by purpose; they sum to the step time."""
    return {
        "compute_seconds": time.compute_seconds,
        "exposed_communication_seconds": time.exposed_seconds,
        "bubble_seconds": time.bubble_seconds,
        "optimizer_seconds": time.optimizer_seconds,
    }


def spread(candidate: EvaluatedSetup) -> dict[str, float] | None:
    """Return the range of seconds that holds the true value in 9 of 10 cases, and the factor, or None.

    The factor is the one of a study's cells on the same device without learned corrections.
    """
    if candidate.seconds is None:
        return None
    any_cell = Cell(workload=NoopWorkload(items=1))  # one core a rank, our engine: no extra uncertainty
    factor = prior_factor(any_cell, candidate.setup.machine.accelerator)
    low, high = interval(candidate.seconds, factor) or (candidate.seconds, candidate.seconds)
    return {"low": low, "high": high, "factor": factor}


def short(value: float) -> str:
    """Format with three significant digits, as 0.0427 or 1,410."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{float(f'{value:.3g}'):,.0f}"


def rate(value: float) -> str:
    """Format as 0.34, 7.2 or 4,130: a prediction is not worth more digits."""
    return f"{value:.2g}" if value < 9.95 else short(value)


def deepspeed_dict(setup: TrainingSetup) -> dict[str, Any]:
    """Return stage and offload settings. No offload is None, because DeepSpeed rejects False."""
    section = zero_section(setup.layout.strategy, setup.offload)
    return {
        "zero_stage": zero_stage(setup.layout.strategy),
        "offload_optimizer": section.get("offload_optimizer"),
        "offload_param": section.get("offload_param"),
    }


def fsdp_dict(setup: TrainingSetup) -> dict[str, Any]:
    """Return the settings under FSDP1 names; `reshard_after_forward` is FSDP2's name."""
    return {
        "sharding_strategy": "FULL_SHARD" if setup.reshard else "SHARD_GRAD_OP",
        "reshard_after_forward": setup.reshard,
        "cpu_offload": setup.offload == "cpu",
        "activation_checkpointing": setup.checkpointing == "full",
    }


def rule_sentence(rule: Rule, theirs: EvaluatedSetup, ours: EvaluatedSetup) -> str:
    """Compare the rule of thumb's choice with the planner's."""
    start = f"The rule of thumb says {rule.words}, which"
    if not theirs.fits:
        return f"{start} does not fit: it {theirs.why_not}."
    if not ours.fits or ours.seconds is None or theirs.seconds is None:
        return f"{start} would fit."
    slower = theirs.seconds / ours.seconds - 1
    if slower < 0.005:
        return f"{start} is predicted to be as fast."
    if slower >= 1:
        return f"{start} is predicted to take {short(1 + slower)} times as long."
    return f"{start} is predicted to be {slower:.0%} slower."
