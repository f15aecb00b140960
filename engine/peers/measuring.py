"""Other engines' passes, measured by the functions that measure ours (`engine.generate.measure`, `measure_encode`).

What an engine does with a batch is a `Work`; transformers' models, shared out or not, are one, ONNX Runtime's another
(`engine.peers.onnx_peer`).

    outcome = measure_work(visit, context, config, work, figures)
"""

import time
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from configs.cell import EncodeWorkload, GenerateWorkload, PromptedWorkload, Seq2SeqWorkload
from configs.job import Visit
from configs.record import Figure
from engine.agreement import together
from engine.answers import Consume, Scorer
from engine.context import Context, Outcome
from engine.decoded import Decode, Encode, Encoded, synchroniser
from engine.embeddings import EncodeScorer, pooled
from engine.encode import measure_encode
from engine.generate import measure
from engine.model_scorer import EncodeScorer as ModelStates
from engine.model_scorer import ModelScorer, Seq2SeqScorer
from engine.models.config import ModelConfig
from engine.peers.decoding import generate_decoder
from engine.peers.loading import Peer
from engine.tokens import Batch, batches, prompts_of_rank


class Work(Protocol):
    """What an engine does with batches: decode them, or give their last hidden states; and the scores of both."""

    def decoder(self, new_tokens: int, capacity: int) -> Decode:
        """Greedy decoding; capacity: positions of the longest sequence, or source."""

    def states(self, batch: Batch) -> Tensor:
        """Last hidden states [rows, length, hidden]; at filling anything."""

    def scorer(self) -> Any:
        """`engine.answers.Scorer`, or `engine.embeddings.EncodeScorer` of an encoder."""


def measure_work(
    visit: Visit, context: Context, config: ModelConfig, work: Work, figures: dict[str, Figure]
) -> Outcome:
    """Measure one visit. Raises ValueError for prompts that cannot be used."""
    workload = visit.cell.workload
    assert isinstance(workload, PromptedWorkload)
    began = time.perf_counter()
    prompts = together(lambda: prompts_of_rank(workload, context, config), context)
    requests = batches(prompts.tokens, workload.batch_size, context.device)
    singles = [_told(batch, context) for batch in batches(prompts.tokens, 1, context.device)]
    figures = figures | {"preprocess_seconds": time.perf_counter() - began}
    speaks = context.grid.speaks
    if isinstance(workload, EncodeWorkload):
        encode = _encoder(work, workload, context)
        scored = SpeakingStates(work.scorer(), speaks)
        outcome = measure_encode(visit, context, prompts, requests, encode, scored, singles)
    else:
        assert isinstance(workload, GenerateWorkload | Seq2SeqWorkload)
        capacity = max(batch.tokens.shape[1] for batch in requests) + workload.new_tokens
        decode = work.decoder(workload.new_tokens, capacity)
        start = config.start_token if isinstance(workload, Seq2SeqWorkload) else None
        scorer = SpeakingScorer(work.scorer(), speaks)
        outcome = measure(visit, context, prompts, requests, decode, scorer, singles, start)
    outcome.figures |= figures
    return outcome


def _told(batch: Batch, context: Context) -> Batch:
    """With filling of no position said in words, where a model has stages.

    Those of transformers count from the first layer's cache, which only the first stage has, unless they are told
    positions.
    """
    if context.grid.pp == 1:
        return batch
    return replace(batch, padding=torch.zeros(len(batch.tokens), dtype=torch.int64, device=context.device))


def _encoder(work: Work, workload: EncodeWorkload, context: Context) -> Encode:
    synchronise = synchroniser(context.device)

    def encode(batch: Batch) -> list[Encoded]:
        synchronise()
        began = time.perf_counter()
        vectors = pooled(work.states(batch), batch.padding, workload.pooling, workload.normalize)
        synchronise()
        return [Encoded(began, time.perf_counter(), vectors, len(batch.tokens))]

    return encode


def measure_peer(visit: Visit, context: Context, peer: Peer) -> Outcome:
    """Measure one visit of a loaded model of transformers, shared out or not."""
    with torch.inference_mode() if peer.start.inference_mode else torch.no_grad():
        work = ModelWork(peer, visit.cell.workload.kind, context.device)
        return measure_work(visit, context, peer.config, work, peer.load_figures())


class ModelWork:
    """`Work` by a model of transformers."""

    def __init__(self, peer: Peer, kind: str, device: torch.device) -> None:
        self._peer, self._device = peer, device
        scorers: dict[str, Any] = {"generate": ModelScorer, "seq2seq": Seq2SeqScorer, "encode": ModelStates}
        self._scorer = scorers[kind](peer.model)

    def decoder(self, new_tokens: int, capacity: int) -> Decode:
        """Its own `generate`."""
        return generate_decoder(self._peer.model, new_tokens, capacity, self._device, self._peer.start.settings)

    def states(self, batch: Batch) -> Tensor:
        """Its own forward pass."""
        states: Tensor = self._scorer.states(batch)
        return states

    def scorer(self) -> Any:
        """By its own forward pass too."""
        return self._scorer


class SpeakingScorer:
    """Every rank computes; only the one that speaks for its replica hands logits on."""

    def __init__(self, scorer: Scorer, speaks: bool) -> None:
        self._scorer, self._speaks = scorer, speaks

    def prefill(self, batch: Batch, consume: Consume) -> None:
        """Logits of all columns, by one prefill of the batch."""
        self._scorer.prefill(batch, consume if self._speaks else _ignore)

    def cached(self, batch: Batch, steps: int, consume: Consume) -> None:
        """Logits of the last `steps` columns: the others are prefilled, then one token a call."""
        self._scorer.cached(batch, steps, consume if self._speaks else _ignore)


class SpeakingStates:
    """Every rank computes; only the one that speaks for its replica has states."""

    def __init__(self, scorer: EncodeScorer, speaks: bool) -> None:
        self._scorer, self._speaks = scorer, speaks

    def states(self, batch: Batch) -> Tensor | None:
        """Last hidden states [rows, length, hidden]."""
        states = self._scorer.states(batch)
        return states if self._speaks else None


def _ignore(first: int, logits: Tensor) -> None:
    pass
