"""The `seq2seq` workload: greedy decoding by an encoder-decoder, every token timed.

As `engine.workloads.generate`, with the same columns and figures. A prompt is a source: the encoder reads it once, its
last states go to every stage, and the decoder begins with its first token and attends to them; the time to first token
includes both. `prompt_tokens` counts tokens of sources. Started by `engine.worker` as

    outcome = run(measurement, context)
"""

import torch

from configs.plans.job import Measurement
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.context import Context, RankResult
from engine.correctness.answers import FORCED_TOKENS
from engine.inference.weights import load_stacks
from engine.models.weights import DTYPES, check_kind
from engine.prompts.tokens import requests_of_rank
from engine.rank.agreement import raise_on_all_ranks
from engine.workloads.generate import measure_replica


def run(measurement: Measurement, context: Context) -> RankResult:
    """Measure one measurement. Raises ValueError if model or prompts cannot be used."""
    workload, cell = measurement.cell.workload, measurement.cell
    assert isinstance(workload, Seq2SeqWorkload)
    config = raise_on_all_ranks(lambda: check_kind(context, "seq2seq"), context)
    encoder, decoder = raise_on_all_ranks(lambda: load_stacks(context, DTYPES[cell.dtype]), context)
    requests = requests_of_rank(workload, context, config)
    # What it is made to say when it is scored may be longer than what it decodes.
    scored = requests.max_tokens if workload.answers else 0
    capacity = 1 + max(workload.new_tokens, min(scored, FORCED_TOKENS))
    with torch.inference_mode():
        return measure_replica(measurement, context, requests, capacity, decoder, encoder, config.start_token)
