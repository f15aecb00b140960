"""Results of a run: raw samples by step, and figures of a step.

    outcome.samples = samples(run)
    outcome.figures = figures(run, run.task.config)

Samples of a rank: `step_seconds` of measured steps, of which `data_seconds`, `forward_seconds`, `backward_seconds`,
`exposed_communication_seconds` and `optimizer_seconds` are the parts; and in addition `checkpoint_seconds`. `loss` and
`gradient_norm` are of the whole run, warm-up and earlier attempts included, and the same on all ranks.

FLOPs are of a step over all ranks, by `engine.planner.flops`: **model** FLOPs by PaLM's convention (MFU's numerator),
**hardware** FLOPs by executed products (HFU's numerator): whole score matrices as in `torch.utils.flop_counter`, scores
recomputed by fused attention in its backward pass, and recomputation by checkpointing. Both are None for a model
unknown to the planner.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from configs.records.record import Figure
from configs.workloads.train import ActivationCheckpointing
from engine.context import Samples
from engine.planner.architecture import Architecture
from engine.planner.families import read_architecture
from engine.planner.flops import forward_flops, model_flops, recomputed_share, training_flops
from engine.rank.agreement import total
from engine.training.data.validation import means
from engine.training.schedule import learning_rate, scaling_factor
from engine.training.steps import TrainingRun

_PLAIN_ATTENTION = ("bloom", "gemma2", "gpt_neo", "gpt_oss", "gptj", "mpt")
"""Families whose attention transformers 5 computes as two products and a softmax, having no other for them."""


def samples(run: TrainingRun) -> Samples:
    """Columns of this rank; the history must be settled."""
    warmup, columns = run.warmup, run.columns
    found = {
        "warmup_step_seconds": columns.step[:warmup],
        "step_seconds": columns.step[warmup:],
        **{f"{phase}_seconds": seconds[warmup:] for phase, seconds in columns.phases.items()},
        "loss": run.history.losses,
        "gradient_norm": run.history.norms,
    }
    if run.trainer.exposed.known:
        found["exposed_communication_seconds"] = columns.exposed[warmup:]
    if run.workload.checkpoint_every is not None:
        found["checkpoint_seconds"] = columns.checkpoint[warmup:]
    return {name: np.array(values, dtype=np.float64) for name, values in found.items()}


def figures(run: TrainingRun, config: Mapping[str, Any]) -> dict[str, Figure]:
    """What a step of the run was. All ranks call it.

    config: of the trained model, whose head is the task's: the files may be of a class with another head, or none.
    `tokens_per_step` is of all ranks, `sequences` of this one; `train_tokens` is the size of the data.
    """
    work, options = run.workload, run.options
    measured = run.here - run.warmup
    tokens = _tokens_per_step(run, measured)
    found: dict[str, Figure] = {
        "tokens_per_step": tokens,
        "sequences": work.global_batch_size // options.dp,
        "accumulation": options.accumulation,
        "steps": run.steps,
        "train_rows": run.feed.examples.count,
        "train_tokens": run.feed.examples.count * run.feed.examples.positions,
        "learning_rate": learning_rate(work, work.learning_rate_warmup_steps),
        "learning_rate_scaling": scaling_factor(work),
        "skipped_steps": run.history.skipped,
        "loss_scale": run.loss_scale,
        **_flops(run, config, tokens),
        **_traffic(run, measured),
        **_evaluation(run),
    }
    norms = sum(isinstance(module, _BatchNorm) for module in run.task.model.modules())
    if norms:
        found["batch_norms"] = norms  # which make the losses depend on the micro-batches
    seconds = sum(run.columns.step[run.warmup :]) + sum(run.columns.checkpoint[run.warmup :])
    if work.checkpoint_every is not None and seconds > 0:
        found["tokens_per_second_with_checkpoints"] = tokens * measured / seconds
    return found


def _tokens_per_step(run: TrainingRun, measured: int) -> int | float:
    """Mean over measured steps, summed over replicas; of the latest one where none was measured."""
    if measured == 0:
        return run.step_tokens
    tokens = total(torch.tensor([run.tokens], dtype=torch.int64), run.context).item() / run.options.tp / measured
    return int(tokens) if tokens == int(tokens) else tokens


def _flops(run: TrainingRun, config: Mapping[str, Any], tokens: int | float) -> dict[str, Figure]:
    found: dict[str, Figure] = {"model_flops_per_step": None, "hardware_flops_per_step": None}
    sequences = run.workload.global_batch_size
    try:
        architecture = read_architecture(config)
    except ValueError:  # of a family unknown to the planner
        return found
    length = round(tokens / sequences)
    if architecture.kind == "encoder_decoder":
        length = run.workload.sequence_length
    if length == 0:  # a resumed run without remaining steps
        return found
    found["model_flops_per_step"] = model_flops(architecture, sequences * length, length)
    found["hardware_flops_per_step"] = hardware_flops(
        architecture, sequences, length, run.options.activation_checkpointing
    )
    return found


def hardware_flops(
    architecture: Architecture, sequences: int, length: int, checkpointing: ActivationCheckpointing
) -> float:
    """Return the FLOPs executed in a step. Recomputation follows `engine.training.strategies.recompute`.

    Attention is computed again by full checkpointing, and by selective where it is not one operator, whose output that
    keeps.
    """
    fused = architecture.model_type not in _PLAIN_ATTENTION
    once = training_flops(architecture, sequences, length, fused=fused).total
    if checkpointing == "none":
        return once
    forward = forward_flops(architecture, sequences, length)
    selective = checkpointing == "selective"
    attention = 0.0 if selective and fused else forward.attention
    return once + forward.blocks * recomputed_share(architecture, selective=selective) + attention


def _traffic(run: TrainingRun, measured: int) -> dict[str, Figure]:
    """Payload of this rank's collectives, a step; bytes of the node's network over all measured steps, by its first
    rank."""
    before, after = run.before, run.after
    if before is None or after is None or measured == 0:
        return {}
    found: dict[str, Figure] = {}
    if run.trainer.exposed.known:
        found["communication_bytes_per_step"] = (after.payload_bytes - before.payload_bytes) / measured
    if before.network is not None and after.network is not None:
        moved = after.network.since(before.network)
        found["network_sent_bytes"], found["network_received_bytes"] = moved.sent, moved.received
        found["loopback_sent_bytes"] = moved.loopback
    return found


def _evaluation(run: TrainingRun) -> dict[str, Figure]:
    """Of the last evaluation; what is held out of the training data keeps its own names as well."""
    if not run.history.evaluations:
        return {}
    found: dict[str, Figure] = {
        f"validation_{name}": value for name, value in means(run.history.evaluations[-1][1]).items()
    }
    found |= {"evaluations": len(run.history.evaluations), "evaluation_seconds": run.evaluation_seconds}
    if run.workload.heldout_share > 0 and "validation_perplexity" in found:
        found["heldout_tokens"] = found["validation_targets"]
        found["heldout_loss"] = found["validation_loss"]
        found["heldout_perplexity"] = found["validation_perplexity"]
    return found
