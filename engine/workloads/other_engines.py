"""Prompted workloads on other engines, measured by the functions that measure ours.

`engine.worker` calls, for every cell whose engine is not `rankwise`,

    outcome = run(measurement, context)

The plain model of transformers on one rank is the reference (`engine.peers.reference`), everything else a peer
(`engine.peers`). Passes, columns and figures are those of `engine.workloads.generate`, `engine.workloads.seq2seq` and
`engine.workloads.encode`.
"""

import time
from dataclasses import replace

import torch
from torch import Tensor

from configs.plans.job import Measurement
from configs.workloads.encode import EncodeWorkload
from configs.workloads.generate import GenerateWorkload
from configs.workloads.prompted import PromptedWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.context import Context, RankResult
from engine.correctness.answers import Consume, Scorer, forced_tokens
from engine.correctness.embeddings import EncodeScorer, pooled
from engine.models.text_model import limit_figures
from engine.peers.work import LoadedWork, Work
from engine.prompts.decoded import Encode, Encoded, synchroniser
from engine.prompts.pooling import check_pooling
from engine.prompts.tokens import PromptBatch, batches, batches_of_tokens, requests_of_rank
from engine.rank.agreement import raise_on_all_ranks
from engine.workloads.encode import measure_encode
from engine.workloads.generate import measure_generation

_UNTIMED_TOKENS = 2048
"""Tokens of a batch where each pass reads the layers from disk: those of one long prompt."""


def run(measurement: Measurement, context: Context) -> RankResult:
    """Measure one measurement. Raises ValueError for a model or prompts that cannot be used, NotImplementedError."""
    cell, workload = measurement.cell, measurement.cell.workload
    assert isinstance(workload, PromptedWorkload)
    if isinstance(workload, EncodeWorkload):
        raise_on_all_ranks(lambda: check_pooling(context, workload), context)
    # Only here: these import transformers or onnxruntime, which our own engine must not.
    if cell.engine == "transformers" and cell.engine_mode == "eager" and context.world_size == 1:
        from engine.peers.reference import add_noise, load_reference

        loaded = load_reference(measurement, context)
        outcome = _measure(measurement, context, loaded)
        add_noise(outcome, workload, loaded.config, context)
        return outcome
    from engine.peers import load_peer_work

    return _measure(measurement, context, load_peer_work(measurement, context))


def _measure(measurement: Measurement, context: Context, loaded: LoadedWork) -> RankResult:
    with torch.inference_mode() if loaded.inference_mode else torch.no_grad():
        return measure_work(measurement, context, loaded)


def measure_work(measurement: Measurement, context: Context, loaded: LoadedWork) -> RankResult:
    """Measure one measurement of a loaded engine. Raises ValueError for prompts that cannot be used."""
    workload, work, config = measurement.cell.workload, loaded.work, loaded.config
    assert isinstance(workload, PromptedWorkload)
    requests = requests_of_rank(workload, context, config)
    prompts = requests.prompts
    if loaded.untimed:
        requests = replace(requests, batches=batches_of_tokens(prompts.tokens, _UNTIMED_TOKENS, context.device))
        context = _once(context)
    singles = [_told(batch, context) for batch in batches(prompts.tokens, 1, context.device)]
    figures = loaded.figures | {"preprocess_seconds": requests.seconds}
    reports_results = context.grid.reports_results
    if isinstance(workload, EncodeWorkload):
        encode = _encoder(work, workload, context)
        scored = SpeakingStates(work.scorer(), reports_results)
        outcome = measure_encode(measurement, context, prompts, requests.batches, encode, scored, singles)
    else:
        assert isinstance(workload, GenerateWorkload | Seq2SeqWorkload)
        capacity = requests.max_tokens + workload.new_tokens
        decode = work.decoder(workload.new_tokens, capacity)
        start = config.start_token if isinstance(workload, Seq2SeqWorkload) else None
        scorer = SpeakingScorer(work.scorer(), reports_results)
        outcome = measure_generation(
            measurement,
            context,
            prompts,
            requests.batches,
            decode,
            scorer,
            singles,
            start,
            forced=forced_tokens(config),
        )
    outcome.figures |= figures | (limit_figures(config) if workload.answers else {})
    return outcome


def _once(context: Context) -> Context:
    """With one pass, as no time is taken."""
    measuring = context.job.measuring.model_copy(update={"warmup": 0, "min_passes": 1, "min_seconds": 0.0})
    return replace(context, job=context.job.model_copy(update={"measuring": measuring}))


def _told(batch: PromptBatch, context: Context) -> PromptBatch:
    """With filling of no position said in words, where a model has stages.

    Those of transformers count from the first layer's cache, which only the first stage has, unless they are told
    positions.
    """
    if context.grid.pp == 1:
        return batch
    return replace(batch, padding=torch.zeros(len(batch.tokens), dtype=torch.int64, device=context.device))


def _encoder(work: Work, workload: EncodeWorkload, context: Context) -> Encode:
    synchronise = synchroniser(context.device)

    def encode(batch: PromptBatch) -> list[Encoded]:
        synchronise()
        began = time.perf_counter()
        vectors = pooled(work.states(batch), batch.padding, workload.pooling, workload.normalize)
        synchronise()
        return [Encoded(began, time.perf_counter(), vectors, len(batch.tokens))]

    return encode


class SpeakingScorer:
    """Every rank computes; only the one that speaks for its replica hands logits on."""

    def __init__(self, scorer: Scorer, reports_results: bool) -> None:
        self._scorer, self._reports_results = scorer, reports_results

    def prefill(self, batch: PromptBatch, consume: Consume) -> None:
        """Logits of all columns, by one prefill of the batch."""
        self._scorer.prefill(batch, consume if self._reports_results else _ignore)

    def cached(self, batch: PromptBatch, steps: int, consume: Consume) -> None:
        """Logits of the last `steps` columns: the others are prefilled, then one token a call."""
        self._scorer.cached(batch, steps, consume if self._reports_results else _ignore)


class SpeakingStates:
    """Every rank computes; only the one that speaks for its replica has states."""

    def __init__(self, scorer: EncodeScorer, reports_results: bool) -> None:
        self._scorer, self._reports_results = scorer, reports_results

    def states(self, batch: PromptBatch) -> Tensor | None:
        """Last hidden states [rows, length, hidden]."""
        states = self._scorer.states(batch)
        return states if self._reports_results else None


def _ignore(first: int, logits: Tensor) -> None:
    pass
