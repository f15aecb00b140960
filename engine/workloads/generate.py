"""The `generate` workload: greedy decoding of a replica's prompts, every token timed.

One pass is all of this replica's prompts, in batches. A batch is prefilled (its time is the time to first token, TTFT),
then decoded one token a step; the device is synchronised after each step, and decoding does not stop at an end-of-text
token, so that every run does the same work. One rank of a replica reports its samples and answers. Started by
`engine.worker` as

    outcome = run(measurement, context)
"""

import numpy as np
import torch

from configs.plans.job import Measurement
from configs.workloads.generate import GenerateWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.context import Context, RankResult, Samples
from engine.correctness.answers import FORCED_TOKENS, Scorer, collect_answers, sequences_of, write_completions
from engine.correctness.finite import check_logits, check_tokens
from engine.inference.model import Shard
from engine.inference.pipeline import Replica, micro_batches
from engine.inference.weights import finalize_weights_after_first_answer, load_shard, shard_figures
from engine.kernels.linear import read_seconds
from engine.models.text_model import limit_figures
from engine.models.weights import DTYPES, check_kind
from engine.prompts.decoded import Decode, Decoded
from engine.prompts.passes import Passes, measured_passes, unmeasured
from engine.prompts.tokens import PromptBatch, Prompts, Requests, requests_of_rank
from engine.rank.agreement import raise_on_all_ranks

_WEIGHT_READS = 5


def run(measurement: Measurement, context: Context) -> RankResult:
    """Measure one measurement. Raises ValueError if model or prompts cannot be used."""
    workload, cell = measurement.cell.workload, measurement.cell
    assert isinstance(workload, GenerateWorkload)
    raise_on_all_ranks(lambda: check_kind(context, "generate"), context)
    shard = raise_on_all_ranks(lambda: load_shard(context, DTYPES[cell.dtype]), context)
    requests = requests_of_rank(workload, context, shard.config)
    capacity = requests.max_tokens + workload.new_tokens
    with torch.inference_mode():
        outcome = measure_replica(measurement, context, requests, capacity, shard)
        if workload.read_probe and not context.memory_pass:
            outcome.samples |= _read_weights(shard.decode_weights(), context)
    return outcome


def measure_replica(
    measurement: Measurement,
    context: Context,
    requests: Requests,
    capacity: int,
    decoder: Shard,
    encoder: Shard | None = None,
    start_token: int | None = None,
) -> RankResult:
    """Measure greedy decoding by this rank's shards of a replica. capacity: positions of a sequence in the cache."""
    workload = measurement.cell.workload
    assert isinstance(workload, GenerateWorkload | Seq2SeqWorkload)
    size = workload.in_micro_batches(measurement.cell.layout.pp)
    recorded = context.measuring_pass != "profile"
    replica = Replica(
        decoder, context.communicators.pipeline, size, requests.max_rows, capacity, encoder, recorded=recorded
    )
    pieces = [piece for batch in requests.batches for piece in micro_batches(batch, size)]

    def decode(batch: PromptBatch) -> list[Decoded]:
        return replica.decode(batch, workload.new_tokens)

    def first_answer() -> float | None:
        first = replica.decode(requests.batches[0], 1)[0]
        # A stage in the middle never sees a token.
        return float(first.stamps[0] - first.began) if context.grid.reports_results else None

    first = finalize_weights_after_first_answer(measurement, context, first_answer)
    marked = context.device.type == "cpu"
    outcome = measure_generation(
        measurement, context, requests.prompts, requests.batches, decode, replica, pieces, start_token, marked
    )
    outcome.figures |= {"preprocess_seconds": requests.seconds, "decode_path": replica.decode_path}
    outcome.figures |= limit_figures(decoder.config) if workload.answers else {}
    outcome.figures |= shard_figures(context) | first
    return outcome


def _read_weights(tensors: list[torch.Tensor], context: Context) -> Samples:
    """Measure a plain read of all weights of a decode step in seconds, all ranks at once, several times.

    Empty if a library hides its weight storage.
    """
    if not tensors:
        return {}
    taken = np.empty(_WEIGHT_READS)
    for place in range(_WEIGHT_READS):
        context.barrier()
        taken[place] = sum(read_seconds(tensor) for tensor in tensors)
    return {"weights_read_seconds": taken}


def measure_generation(
    measurement: Measurement,
    context: Context,
    prompts: Prompts,
    requests: list[PromptBatch],
    decode: Decode,
    scorer: Scorer,
    pieces: list[PromptBatch] | None = None,
    start_token: int | None = None,
    marked: bool = False,
    forced: int = FORCED_TOKENS,
) -> RankResult:
    """Warm up, measure passes, then collect the answers if requested.

    In a memory pass: one request, the largest, and no samples. `scorer` returns the logits of prompts, in batches
    `pieces` (none: as requested). Only the rank that reports for its replica returns samples. start_token: first token
    of an encoder-decoder's decoder, whose prompts are sources; None for a decoder. marked: `decode` marks tokens that
    it chose among logits that are not finite; else the first batch is scored once more. forced: see `sequences_of`.
    Raises FloatingPointError.
    """
    workload = measurement.cell.workload
    assert isinstance(workload, GenerateWorkload | Seq2SeqWorkload)

    def check(results: list[Decoded]) -> None:
        if marked:
            # Only the last stage writes every token that it chose.
            check_tokens(results if context.grid.is_last_stage else [])
        else:
            first = (pieces or requests)[0]
            rows = len(first.tokens)
            tokens = torch.cat([decoded.tokens for decoded in results[: len(requests)]])[:rows]
            some = Prompts(prompts.first, prompts.tokens[:rows], prompts.texts[:rows], prompts.total)
            check_logits(scorer, sequences_of(some, tokens, start_token), first)

    outcome = RankResult(
        figures={
            "num_prompts": len(prompts.tokens),
            "new_tokens": workload.new_tokens,
            "prompt_tokens": sum(len(ids) for ids in prompts.tokens),
            "max_prompt_tokens": max(len(ids) for ids in prompts.tokens),
        }
    )
    if unmeasured(requests, decode, context):
        outcome.figures["passes"] = 1
        return outcome
    passes = measured_passes(requests, decode, context, check)
    outcome.figures["passes"] = len(passes.seconds)
    if context.grid.reports_results:
        outcome.samples = _samples(passes)
    if workload.answers:
        tokens = torch.cat([decoded.tokens for decoded in passes.last]).cpu()
        # The reference, which measures the noise, is compared with by its prefill alone.
        figures, columns = collect_answers(
            prompts,
            tokens,
            scorer,
            pieces or requests,
            context,
            start_token,
            through_cache=not workload.noise_dtypes,
            forced=forced,
        )
        outcome.figures |= figures
        outcome.samples |= columns
        if context.grid.is_first_stage or context.grid.is_last_stage:  # other stages never receive tokens
            write_completions(context.paths.completions(measurement.name, context.rank), prompts, tokens, context)
    return outcome


def _samples(passes: Passes[Decoded]) -> Samples:
    """Return columns of warm-up and measured passes.

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
