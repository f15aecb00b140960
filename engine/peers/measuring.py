"""A peer's passes, measured by `engine.generate.measure`."""

import time
from typing import Any

import torch

from configs.cell import GenerateWorkload
from configs.job import Visit
from engine.agreement import together
from engine.answers import Consume
from engine.context import Context, Outcome
from engine.generate import measure
from engine.model_scorer import ModelScorer
from engine.peers.decoding import generate_decoder
from engine.peers.loading import Peer
from engine.tokens import Batch, batches, prompts_of_rank


def measure_peer(visit: Visit, context: Context, peer: Peer) -> Outcome:
    """Measure one visit of a loaded peer. Raises ValueError for prompts that cannot be used."""
    workload = visit.cell.workload
    assert isinstance(workload, GenerateWorkload)
    began = time.perf_counter()
    prompts = together(lambda: prompts_of_rank(workload, context, peer.config), context)
    requests = batches(prompts.tokens, workload.batch_size, context.device)
    preprocess_seconds = time.perf_counter() - began
    capacity = max(batch.tokens.shape[1] for batch in requests) + workload.new_tokens
    with torch.inference_mode() if peer.start.inference_mode else torch.no_grad():
        decode = generate_decoder(peer.model, workload.new_tokens, capacity, context.device, peer.start.settings)
        scorer = SpeakingScorer(peer.model, context.grid.speaks)
        singles = batches(prompts.tokens, 1, context.device)
        outcome = measure(visit, context, prompts, requests, decode, scorer, singles)
    outcome.figures |= {"preprocess_seconds": preprocess_seconds, **peer.load_figures()}
    return outcome


class SpeakingScorer(ModelScorer):
    """Every rank computes; only the one that speaks for its replica hands logits on."""

    def __init__(self, model: Any, speaks: bool) -> None:
        super().__init__(model)
        self._speaks = speaks

    def prefill(self, batch: Batch, consume: Consume) -> None:
        """Logits of all columns, by one prefill of the batch."""
        super().prefill(batch, consume if self._speaks else _ignore)

    def cached(self, batch: Batch, steps: int, consume: Consume) -> None:
        """Logits of the last `steps` columns: the others are prefilled, then one token a call."""
        super().cached(batch, steps, consume if self._speaks else _ignore)


def _ignore(first: int, logits: torch.Tensor) -> None:
    pass
