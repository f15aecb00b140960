"""The `train` workload: causal language-model training of our Llama model, data-parallel over the ranks.

Master weights in float32, bfloat16 autocast where the cell says so; AdamW; gradients averaged by
DistributedDataParallel. The global batch of a step does not depend on the number of ranks, so two
ranks follow the losses of one. Every visit starts from the same weights. Started by `engine.worker` as

    outcome = run(visit, context)
"""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from configs.base import write_atomically
from configs.job import Visit
from configs.record import Figure
from configs.training import TrainWorkload
from engine.agreement import largest, together, total
from engine.context import Context, Outcome
from engine.decoded import synchroniser
from engine.inference.sharding import even_share
from engine.llama import Llama
from engine.tokens import Windows, split_text, text_tokens, tokenizer_path
from engine.weights import load_figures, load_model, save_model, the_manifest

LOG_SECONDS = 20.0
MEMORY_STEPS = 2
PROFILE_WARMUP_STEPS = 3
"""DistributedDataParallel arranges its buckets anew in the second step."""
FINAL_RATE_SHARE = 0.1
_BETAS = (0.9, 0.95)
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass
class Run:
    """One visit's training: what a step needs, and what the steps left."""

    model: Llama
    replica: torch.nn.Module
    optimizer: torch.optim.Optimizer
    workload: TrainWorkload
    windows: Windows
    bfloat16: bool
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def run(visit: Visit, context: Context) -> Outcome:
    """Train one visit. Raises ValueError for data that does not do, FloatingPointError for a loss that is no number."""
    cell, workload = visit.cell, visit.cell.workload
    assert isinstance(workload, TrainWorkload)
    if cell.dtype == "float16":
        raise ValueError("dtype: float16 is not trained in, its gradients vanish without scaling; use bfloat16")
    model = together(lambda: _fresh_model(context), context)
    _check(workload, model, context)
    began = time.perf_counter()
    training, heldout = together(
        lambda: split_text(text_tokens(workload, context, model.config.vocabulary), workload), context
    )
    preprocess_seconds = time.perf_counter() - began
    state = Run(
        model=model.train(),
        replica=_replica(model, context),
        optimizer=_optimizer(model, workload),
        workload=workload,
        windows=Windows(training, workload.sequence_length, context.job.measuring.seed),
        bfloat16=cell.dtype == "bfloat16",
    )
    _steps(state, context)
    outcome = Outcome(figures=_figures(state, context, len(training)))
    outcome.figures |= {"preprocess_seconds": preprocess_seconds, **load_figures(context)}
    if context.measuring_pass != "timed":
        return outcome
    outcome.samples = _samples(state, context)
    if workload.heldout_share > 0:
        outcome.figures |= _evaluate(state, heldout, context)
    if workload.export:
        if context.rank == 0:
            export(model, workload, context, context.paths.exports / cell.key)
        context.barrier()
    return outcome


def _fresh_model(context: Context) -> Llama:
    """The launch's model with the weights that it was loaded with."""
    model = load_model(context, torch.float32).requires_grad_(True)
    initial: dict[str, Tensor] | None = context.kept.get("initial_weights")
    with torch.no_grad():
        if initial is not None:
            for name, parameter in model.named_parameters():
                parameter.copy_(initial[name])
        elif len(context.job.visits) > 1:
            context.kept["initial_weights"] = {
                name: parameter.detach().clone() for name, parameter in model.named_parameters()
            }
    return model


def _check(workload: TrainWorkload, model: Llama, context: Context) -> None:
    warmup = context.job.measuring.warmup
    if workload.steps is not None and workload.steps <= warmup:
        raise ValueError(
            f"workload.steps: {workload.steps} leaves none to measure after measuring.warmup of {warmup}; "
            f"use at least {warmup + 1}"
        )
    if workload.sequence_length > model.config.max_positions:
        raise ValueError(
            f"workload.sequence_length: {workload.sequence_length} is more than the model's "
            f"{model.config.max_positions} (max_position_embeddings)"
        )


def _replica(model: Llama, context: Context) -> torch.nn.Module:
    """The module to call: with several ranks, one DDP around the model for the whole launch."""
    if context.world_size == 1:
        return model
    if "replica" not in context.kept:
        devices = [context.device] if context.device.type == "cuda" else None
        context.kept["replica"] = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    replica: torch.nn.Module = context.kept["replica"]
    return replica


def _optimizer(model: Llama, workload: TrainWorkload) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": workload.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=workload.learning_rate, betas=_BETAS, fused=True)


def learning_rate(workload: TrainWorkload, step: int) -> float:
    """Rate of a step, counted from 0: linear warm-up, then cosine to a tenth where `steps` is given."""
    warmup = workload.learning_rate_warmup_steps
    if step < warmup:
        return workload.learning_rate * (step + 1) / warmup
    if workload.steps is None:
        return workload.learning_rate
    progress = min(1.0, (step - warmup) / max(1, workload.steps - 1 - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return workload.learning_rate * (FINAL_RATE_SHARE + (1.0 - FINAL_RATE_SHARE) * cosine)


def _steps(state: Run, context: Context) -> None:
    """All steps of the visit; warm-up steps are the first ones."""
    synchronise = synchroniser(context.device)
    said, said_step = time.perf_counter(), 0
    context.barrier()
    while not _enough(state, context):
        step = len(state.losses)
        warm = step == PROFILE_WARMUP_STEPS
        began = time.perf_counter()
        with context.profiled() if warm else contextlib.nullcontext():
            loss, norm = _step(state, step, context)
        synchronise()
        now = time.perf_counter()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"step {step}: loss {loss}, gradient norm {norm}; lower workload.learning_rate or use dtype float32"
            )
        state.seconds.append(now - began)
        state.losses.append(loss)
        state.norms.append(norm)
        if now - said >= LOG_SECONDS:
            rate = (step + 1 - said_step) * _tokens_per_step(state.workload) / (now - said)
            print(f"step {step + 1}: loss {loss:.4f}, {rate:.0f} tokens/s over all ranks", flush=True)
            said, said_step = now, step + 1


def _enough(state: Run, context: Context) -> bool:
    """Whether the visit has all its steps; where time decides, the slowest rank's counts."""
    done, rules = len(state.losses), context.job.measuring
    if context.memory_pass:
        return done >= MEMORY_STEPS
    if context.profiling:
        return done > PROFILE_WARMUP_STEPS
    if state.workload.steps is not None:
        return done >= state.workload.steps
    if done < rules.warmup + rules.least_passes:
        return False
    return largest(sum(state.seconds[rules.warmup :]), context) >= rules.least_seconds


def _step(state: Run, step: int, context: Context) -> tuple[float, float]:
    """One optimizer step; this rank's mean loss, and the norm of the averaged gradients before clipping."""
    size = state.workload.global_batch_size
    mine = even_share(size, context.world_size, context.rank)
    places = range(step * size + mine.start, step * size + mine.stop)
    rows = torch.from_numpy(state.windows.rows(places)).to(context.device)
    rate = learning_rate(state.workload, step)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    with _autocast(state, context):
        logits = state.replica(rows[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    limit = state.workload.gradient_clipping
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), math.inf if limit is None else limit)
    if math.isfinite(float(norm)):
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    return loss.item(), float(norm)


@contextlib.contextmanager
def _autocast(state: Run, context: Context) -> Iterator[None]:
    with torch.autocast(context.device.type, dtype=torch.bfloat16, enabled=state.bfloat16):
        yield


def _tokens_per_step(workload: TrainWorkload) -> int:
    return workload.global_batch_size * workload.sequence_length


def _figures(state: Run, context: Context, train_tokens: int) -> dict[str, Figure]:
    """`tokens_per_step` is of all ranks, `sequences` of this one; `train_tokens` is the size of the data."""
    return {
        "tokens_per_step": _tokens_per_step(state.workload),
        "sequences": state.workload.global_batch_size // context.world_size,
        "steps": len(state.losses),
        "train_tokens": train_tokens,
    }


def _samples(state: Run, context: Context) -> dict[str, np.ndarray]:
    """`loss` is the mean over the global batch; `loss` and `gradient_norm` hold warm-up steps too."""
    warmup = min(context.job.measuring.warmup, len(state.seconds))
    losses = total(torch.tensor(state.losses, dtype=torch.float64), context) / context.world_size
    return {
        "warmup_step_seconds": np.array(state.seconds[:warmup], dtype=np.float64),
        "step_seconds": np.array(state.seconds[warmup:], dtype=np.float64),
        "loss": losses.numpy(),
        "gradient_norm": np.array(state.norms, dtype=np.float64),
    }


def _evaluate(state: Run, heldout: np.ndarray, context: Context) -> dict[str, Figure]:
    """Mean loss in nats and perplexity on the held-out tokens, shared out over the ranks."""
    windows = Windows(heldout, state.workload.sequence_length, seed=0)
    mine = even_share(windows.count, context.world_size, context.rank)
    size = max(1, state.workload.global_batch_size // context.world_size)
    state.model.eval()
    summed, counted = 0.0, 0
    with torch.no_grad():
        for start in range(mine.start, mine.stop, size):
            numbers = range(start, min(start + size, mine.stop))
            rows = torch.from_numpy(np.stack([windows.window(number) for number in numbers])).to(context.device)
            with _autocast(state, context):
                logits = state.model(rows[:, :-1])
            targets = rows[:, 1:].flatten()
            summed += functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum").item()
            counted += targets.numel()
    sums = total(torch.tensor([summed, counted], dtype=torch.float64), context)
    loss = float(sums[0] / sums[1])
    # A loss above 700 nats overflows the exponential; such a perplexity says no more than the loss.
    perplexity = math.exp(loss) if loss < 700 else None
    return {"heldout_tokens": int(sums[1]), "heldout_loss": loss, "heldout_perplexity": perplexity}


def export(model: Llama, workload: TrainWorkload, context: Context, folder: Path) -> None:
    """Leave the model in bfloat16 with its tokenizer as a folder that transformers loads."""
    save_model(model, the_manifest(context).config, folder)
    source = tokenizer_path(context, workload.tokenizer)
    if source is None:
        return
    shutil.copyfile(source, folder / "tokenizer.json")
    for name in _TOKENIZER_FILES:
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, folder / name)
    if not (folder / _TOKENIZER_FILES[0]).is_file():
        # Else transformers takes the class of the architecture, which replaces parts of tokenizer.json.
        write_atomically(folder / _TOKENIZER_FILES[0], json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
