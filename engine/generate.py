"""The `generate` workload: greedy decoding of a rank's prompts, every token timed.

One pass is all of this rank's prompts, in batches. A batch is prefilled (its time is the time to first
token, TTFT), then decoded one token a step; the device is waited for after each step, and nothing stops
at an end-of-text token, so that every run does the same work. Started by `engine.worker` as

    outcome = run(visit, context)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from configs.cell import GenerateWorkload
from configs.job import Measuring, Visit
from engine.agreement import largest, together
from engine.answers import collect_answers, write_completions
from engine.context import Context, Outcome, Samples
from engine.llama import KeyValueCache, Llama
from engine.tokens import Batch, Prompts, batches, prompts_of_rank
from engine.weights import DTYPES, load_figures, load_model


@dataclass(frozen=True)
class Decoded:
    """One request: when it began, when each token was there (seconds), and the tokens [batch, new_tokens]."""

    began: float
    stamps: np.ndarray
    tokens: torch.Tensor


Decode = Callable[[Batch], Decoded]
LogitsOf = Callable[[torch.Tensor], torch.Tensor]


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError where model or prompts cannot be used."""
    workload, cell = visit.cell.workload, visit.cell
    assert isinstance(workload, GenerateWorkload)
    if cell.engine == "transformers":
        # Only here: our own engine must not import transformers.
        from engine import reference

        return reference.run(visit, context)
    model = together(lambda: load_model(context, DTYPES[cell.dtype]), context)
    began = time.perf_counter()
    prompts = together(lambda: prompts_of_rank(workload, context, model.config), context)
    requests = batches(prompts.tokens, workload.batch_size, context.device)
    preprocess_seconds = time.perf_counter() - began
    with torch.inference_mode():
        decode = greedy(model, requests, workload.new_tokens, DTYPES[cell.dtype])
        outcome = measure(visit, context, prompts, requests, decode, lambda tokens: first(model(tokens[None])))
    outcome.figures |= {"preprocess_seconds": preprocess_seconds, **load_figures(context)}
    return outcome


def first(logits: torch.Tensor) -> torch.Tensor:
    """The first row of a batch, in float32."""
    return logits[0].float()


def synchroniser(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done its work; nothing to do on a CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def greedy(model: Llama, requests: list[Batch], new_tokens: int, dtype: torch.dtype) -> Decode:
    """A function that decodes one batch; one cache, large enough for all `requests`, serves every call."""
    device = requests[0].tokens.device
    rows = max(batch.tokens.shape[0] for batch in requests)
    capacity = max(batch.tokens.shape[1] for batch in requests) + new_tokens
    cache = KeyValueCache(model.config, rows, capacity, dtype, device)
    synchronise = synchroniser(device)

    def decode(batch: Batch) -> Decoded:
        stamps = np.empty(new_tokens)
        chosen = torch.empty((batch.tokens.shape[0], new_tokens), dtype=torch.int64, device=device)
        tokens = batch.tokens
        synchronise()
        began = time.perf_counter()
        cache.clear()
        for step in range(new_tokens):
            tokens = model(tokens, cache, batch.padding, last_only=True)[:, -1].argmax(-1, keepdim=True)
            synchronise()
            stamps[step] = time.perf_counter()
            chosen[:, step : step + 1] = tokens
        return Decoded(began, stamps, chosen)

    return decode


def measure(
    visit: Visit, context: Context, prompts: Prompts, requests: list[Batch], decode: Decode, logits_of: LogitsOf
) -> Outcome:
    """Warm up, measure passes, then keep the answers where they are asked for.

    In a memory pass: one request, the largest, and no samples. `logits_of` gives the float32 logits
    [length, vocabulary] of one prompt's token ids [length].
    """
    workload = visit.cell.workload
    assert isinstance(workload, GenerateWorkload)
    outcome = Outcome(
        figures={
            "num_prompts": len(prompts.tokens),
            "new_tokens": workload.new_tokens,
            "prompt_tokens": sum(len(ids) for ids in prompts.tokens),
        }
    )
    if context.memory_pass:
        context.barrier()
        decode(max(requests, key=lambda batch: batch.tokens.numel()))
        outcome.figures["passes"] = 1
        return outcome
    outcome.samples, last = timed_passes(requests, decode, context)
    outcome.figures["passes"] = len(outcome.samples["pass_seconds"])
    if workload.answers:
        tokens = torch.cat([decoded.tokens for decoded in last]).cpu()
        figures, samples = collect_answers(prompts, tokens, logits_of, context.device)
        outcome.figures |= figures
        outcome.samples |= samples
        write_completions(context.paths.completions(visit.name, context.rank), prompts, tokens, context)
    return outcome


def timed_passes(requests: list[Batch], decode: Decode, context: Context) -> tuple[Samples, list[Decoded]]:
    """Samples of warm-up and measured passes, and what the last pass decoded.

    Columns: warmup_pass_seconds, pass_seconds; of measured passes, in order, for each request
    ttft_seconds, request_seconds, batch_sequences, and for each token after the first gap_seconds.
    """
    rules = context.job.measuring
    warmup = [_one_pass(requests, decode, context)[0] for _ in range(rules.warmup)]
    seconds: list[float] = []
    measured: list[Decoded] = []
    last: list[Decoded] = []
    while not _enough(seconds, rules, context):
        spent, last = _one_pass(requests, decode, context)
        seconds.append(spent)
        measured += last
    samples = {
        "warmup_pass_seconds": np.array(warmup, dtype=np.float64),
        "pass_seconds": np.array(seconds),
        "ttft_seconds": np.array([decoded.stamps[0] - decoded.began for decoded in measured]),
        "request_seconds": np.array([decoded.stamps[-1] - decoded.began for decoded in measured]),
        "gap_seconds": np.concatenate([np.diff(decoded.stamps) for decoded in measured]),
        "batch_sequences": np.array([decoded.tokens.shape[0] for decoded in measured], dtype=np.float64),
    }
    return samples, last


def _one_pass(requests: list[Batch], decode: Decode, context: Context) -> tuple[float, list[Decoded]]:
    context.barrier()
    began = time.perf_counter()
    decoded = [decode(batch) for batch in requests]
    return time.perf_counter() - began, decoded


def _enough(seconds: list[float], rules: Measuring, context: Context) -> bool:
    """Whether all ranks have measured enough: the slowest rank's time counts."""
    if len(seconds) < rules.least_passes:
        return False
    return largest(sum(seconds), context) >= rules.least_seconds
