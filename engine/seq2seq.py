"""The `seq2seq` workload: greedy decoding by an encoder-decoder, every token timed.

As `engine.generate`, whose columns and figures it has. A prompt is a source: the encoder reads it once, its last
states go to every stage, and the decoder begins with its first token and attends to them; the time to first token
holds both. `prompt_tokens` counts tokens of sources. Started by `engine.worker` as

    outcome = run(visit, context)
"""

import time

import torch

from configs.cell import Seq2SeqWorkload
from configs.job import Visit
from engine.agreement import together
from engine.answers import FORCED_TOKENS
from engine.context import Context, Outcome
from engine.decoded import Decoded
from engine.generate import check_kind, measure, peer, settle
from engine.inference.pipeline import Replica, micro_batches
from engine.inference.weights import load_stacks, shard_figures
from engine.tokens import Batch, batches, prompts_of_rank
from engine.weights import DTYPES


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError where model or prompts cannot be used."""
    workload, cell = visit.cell.workload, visit.cell
    assert isinstance(workload, Seq2SeqWorkload)
    if cell.engine != "rankwise":
        return peer(visit, context)
    config = together(lambda: check_kind(context, "seq2seq"), context)
    encoder, decoder = together(lambda: load_stacks(context, DTYPES[cell.dtype]), context)
    began = time.perf_counter()
    prompts = together(lambda: prompts_of_rank(workload, context, config), context)
    requests = batches(prompts.tokens, workload.batch_size, context.device)
    preprocess_seconds = time.perf_counter() - began
    size = workload.in_micro_batches(cell.layout.pp)
    rows = max(batch.tokens.shape[0] for batch in requests)
    # What it is made to say when it is scored may be longer than what it decodes.
    scored = max(batch.tokens.shape[1] for batch in requests) if workload.answers else 0
    capacity = 1 + max(workload.new_tokens, min(scored, FORCED_TOKENS))
    with torch.inference_mode():
        recorded = context.measuring_pass != "profile"
        replica = Replica(decoder, context.communicators.pipeline, size, rows, capacity, encoder, recorded)
        pieces = [piece for batch in requests for piece in micro_batches(batch, size)]

        def decode(batch: Batch) -> list[Decoded]:
            return replica.decode(batch, workload.new_tokens)

        first_answer = settle(requests[0], replica, visit, context)
        outcome = measure(visit, context, prompts, requests, decode, replica, pieces, config.start_token)
    outcome.figures |= {"preprocess_seconds": preprocess_seconds, "decode_path": replica.decode_path}
    outcome.figures |= shard_figures(context) | first_answer
    return outcome
