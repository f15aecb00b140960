"""The `generate` workload: greedy decoding of a replica's prompts, every token timed.

One pass is all of this replica's prompts, in batches. A batch is prefilled (its time is the time to first
token, TTFT), then decoded one token a step; the device is waited for after each step, and nothing stops
at an end-of-text token, so that every run does the same work. Of the ranks of a replica one speaks: its
samples and answers count. Started by `engine.worker` as

    outcome = run(visit, context)
"""

import time

import numpy as np
import torch

from configs.cell import GenerateWorkload, Seq2SeqWorkload
from configs.job import Visit
from configs.record import Figure
from engine.agreement import together
from engine.answers import Scorer, collect_answers, write_completions
from engine.context import Context, Outcome, Samples
from engine.decoded import Decode, Decoded
from engine.inference.pipeline import Replica, micro_batches
from engine.inference.weights import is_settled, load_shard, settle_shard, shard_figures
from engine.kernels.linear import read_seconds
from engine.models.config import ModelConfig
from engine.passes import Passes, measured_passes, unmeasured
from engine.tokens import Batch, Prompts, batches, prompts_of_rank
from engine.weights import DTYPES, the_manifest


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError where model or prompts cannot be used."""
    workload, cell = visit.cell.workload, visit.cell
    assert isinstance(workload, GenerateWorkload)
    if cell.engine != "rankwise":
        return peer(visit, context)
    together(lambda: check_kind(context, "generate"), context)
    shard = together(lambda: load_shard(context, DTYPES[cell.dtype]), context)
    began = time.perf_counter()
    prompts = together(lambda: prompts_of_rank(workload, context, shard.config), context)
    requests = batches(prompts.tokens, workload.batch_size, context.device)
    preprocess_seconds = time.perf_counter() - began
    size = workload.in_micro_batches(cell.layout.pp)
    rows = max(batch.tokens.shape[0] for batch in requests)
    capacity = max(batch.tokens.shape[1] for batch in requests) + workload.new_tokens
    with torch.inference_mode():
        recorded = context.measuring_pass != "profile"
        replica = Replica(shard, context.communicators.pipeline, size, rows, capacity, recorded=recorded)
        pieces = [piece for batch in requests for piece in micro_batches(batch, size)]

        def decode(batch: Batch) -> list[Decoded]:
            return replica.decode(batch, workload.new_tokens)

        first_answer = settle(requests[0], replica, visit, context)
        outcome = measure(visit, context, prompts, requests, decode, replica, pieces)
        if workload.read_probe and not context.memory_pass:
            outcome.samples |= _read_weights(shard.decode_weights(), context)
    outcome.figures |= {"preprocess_seconds": preprocess_seconds, "decode_path": replica.decode_path}
    outcome.figures |= shard_figures(context) | first_answer
    return outcome


_WORKLOAD_OF = {"decoder": "generate", "encoder": "encode", "encoder_decoder": "seq2seq"}


def check_kind(context: Context, workload: str) -> ModelConfig:
    """The model's configuration. Raises ValueError where a model of this kind has another workload."""
    manifest = the_manifest(context)
    config = ModelConfig.parse(manifest.config)
    right = _WORKLOAD_OF[config.kind]
    if right != workload:
        article = "a" if config.kind == "decoder" else "an"
        raise ValueError(
            f"workload.kind: {manifest.identity} is {article} {config.kind.replace('_', '-')} ({config.family}), "
            f"which {workload} cannot measure; use {right}"
        )
    return config


def peer(visit: Visit, context: Context) -> Outcome:
    """Another engine's visit, of any workload. Imported only here: our own engine must not import transformers."""
    if visit.cell.engine == "transformers" and visit.cell.engine_mode == "eager" and context.world_size == 1:
        from engine import reference

        return reference.run(visit, context)
    from engine.peers import run as run_peer

    return run_peer(visit, context)


def settle(batch: Batch, replica: Replica, visit: Visit, context: Context) -> dict[str, Figure]:
    """Settle the weights; where loading is measured, not before a first token has come of them as they were.

    first_ttft_seconds: the time of that token, on a model that is ready and no more.
    """
    figures: dict[str, Figure] = {}
    if visit.cell.page_cache is not None and context.measuring_pass == "timed" and not is_settled(context):
        context.barrier()
        first = replica.decode(batch, 1)[0]
        if context.grid.speaks:  # a stage in the middle never sees a token
            figures["first_ttft_seconds"] = float(first.stamps[0] - first.began)
    settle_shard(context)
    return figures


def _read_weights(tensors: list[torch.Tensor], context: Context, times: int = 5) -> Samples:
    """Seconds of a plain read of all that a decode step reads of the weights, all ranks at once, several times.

    Nothing where a library hides how it keeps them.
    """
    if not tensors:
        return {}
    taken = np.empty(times)
    for place in range(times):
        context.barrier()
        taken[place] = sum(read_seconds(tensor) for tensor in tensors)
    return {"weights_read_seconds": taken}


def measure(
    visit: Visit,
    context: Context,
    prompts: Prompts,
    requests: list[Batch],
    decode: Decode,
    scorer: Scorer,
    pieces: list[Batch] | None = None,
    start_token: int | None = None,
) -> Outcome:
    """Warm up, measure passes, then keep the answers where they are asked for.

    In a memory pass: one request, the largest, and no samples. `scorer` gives the logits of prompts, taken
    in `pieces` (none: as requested). Only the rank that speaks for its replica gives samples. start_token: what the
    decoder of an encoder-decoder begins with, whose prompts are sources; None: of a decoder.
    """
    workload = visit.cell.workload
    assert isinstance(workload, GenerateWorkload | Seq2SeqWorkload)
    outcome = Outcome(
        figures={
            "num_prompts": len(prompts.tokens),
            "new_tokens": workload.new_tokens,
            "prompt_tokens": sum(len(ids) for ids in prompts.tokens),
        }
    )
    if unmeasured(requests, decode, context):
        outcome.figures["passes"] = 1
        return outcome
    passes = measured_passes(requests, decode, context)
    outcome.figures["passes"] = len(passes.seconds)
    if context.grid.speaks:
        outcome.samples = _samples(passes)
    if workload.answers:
        tokens = torch.cat([decoded.tokens for decoded in passes.last]).cpu()
        figures, columns = collect_answers(
            prompts, tokens, scorer, pieces or requests, context, start_token=start_token
        )
        outcome.figures |= figures
        outcome.samples |= columns
        if context.grid.is_first_stage or context.grid.is_last_stage:  # others never see the tokens
            write_completions(context.paths.completions(visit.name, context.rank), prompts, tokens, context)
    return outcome


def _samples(passes: Passes[Decoded]) -> Samples:
    """Columns of warm-up and measured passes.

    warmup_pass_seconds and warmup_ttft_seconds; pass_seconds; of measured passes, in order, for each request
    ttft_seconds, request_seconds, batch_sequences, and for each token after the first gap_seconds.
    """
    measured = passes.results
    return passes.columns() | {
        "warmup_ttft_seconds": _first_token_seconds(passes.warmup),
        "ttft_seconds": _first_token_seconds(measured),
        "request_seconds": np.array([decoded.stamps[-1] - decoded.began for decoded in measured]),
        "gap_seconds": np.concatenate([np.diff(decoded.stamps) for decoded in measured]),
        "batch_sequences": np.array([decoded.tokens.shape[0] for decoded in measured], dtype=np.float64),
    }


def _first_token_seconds(results: list[Decoded]) -> np.ndarray:
    return np.array([decoded.stamps[0] - decoded.began for decoded in results], dtype=np.float64)
