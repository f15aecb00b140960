"""The `encode` workload: embeddings of a replica's prompts by an encoder, every batch timed.

One pass is all of this replica's prompts, in batches. A batch goes through the stages in micro-batches that follow
each other, its last hidden states are pooled to one vector a prompt on the last stage, and the vectors go back to the
first stage, where a service would answer: then the request is over and the next one begins. Started by
`engine.worker` as

    outcome = run(visit, context)
"""

import time

import numpy as np
import torch
from torch import Tensor

from configs.cell import EncodeWorkload
from configs.job import Visit
from engine.agreement import together
from engine.context import Context, Outcome, Samples
from engine.decoded import Encode, Encoded, synchroniser
from engine.embeddings import EncodeScorer, collect_embeddings, pooled
from engine.generate import check_kind, peer
from engine.inference.model import Shard
from engine.inference.pipeline import Stage, micro_batches
from engine.inference.weights import is_settled, load_shard, settle_shard, shard_figures
from engine.parallel.communicator import Communicator
from engine.passes import Passes, measured_passes, unmeasured
from engine.pooling import check_pooling
from engine.tokens import Batch, Prompts, batches, prompts_of_rank
from engine.weights import DTYPES


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError where model or prompts cannot be used."""
    workload, cell = visit.cell.workload, visit.cell
    assert isinstance(workload, EncodeWorkload)
    together(lambda: check_pooling(context, workload), context)
    if cell.engine != "rankwise":
        return peer(visit, context)
    config = together(lambda: check_kind(context, "encode"), context)
    shard = together(lambda: load_shard(context, DTYPES[cell.dtype]), context)
    began = time.perf_counter()
    prompts = together(lambda: prompts_of_rank(workload, context, config), context)
    requests = batches(prompts.tokens, workload.batch_size, context.device)
    preprocess_seconds = time.perf_counter() - began
    size = workload.in_micro_batches(cell.layout.pp)
    with torch.inference_mode():
        encoder = Encoder(shard, context.communicators.pipeline, size, workload)
        first_answer: dict[str, float | None] = {}
        if cell.page_cache is not None and context.measuring_pass == "timed" and not is_settled(context):
            context.barrier()
            first = encoder.encode(requests[0])[0]
            first_answer["first_ttft_seconds"] = first.ended - first.began
        settle_shard(context)
        pieces = [piece for batch in requests for piece in micro_batches(batch, size)]
        outcome = measure_encode(visit, context, prompts, requests, encoder.encode, encoder, pieces)
    outcome.figures |= {"preprocess_seconds": preprocess_seconds, **shard_figures(context), **first_answer}
    return outcome


class Encoder:
    """This rank's part of a replica that encodes. Every rank of a replica calls the same methods alike."""

    def __init__(self, shard: Shard, pipeline: Communicator, micro_batch_size: int, workload: EncodeWorkload) -> None:
        self.shard, self.pipeline, self.micro_batch_size, self.workload = shard, pipeline, micro_batch_size, workload
        self._stage = Stage(shard, pipeline)
        self._synchronise = synchroniser(shard.device)

    def encode(self, batch: Batch) -> list[Encoded]:
        """Vectors of a batch, on the last stage and on the first."""
        pieces = micro_batches(batch, self.micro_batch_size)
        rows = len(batch.tokens)
        self._synchronise()
        began = time.perf_counter()
        vectors: Tensor | None = None
        if found := self._stage.states(pieces):
            vectors = torch.cat([self._pooled(states, piece) for states, piece in zip(found, pieces, strict=True)])
            self._synchronise()
            ended = time.perf_counter()
            if not self.shard.first:
                self.pipeline.send(vectors, 0)
        else:
            if self.shard.first:
                vectors = torch.empty((rows, self.shard.config.hidden), device=self.shard.device)
                self.pipeline.receive(vectors, self.pipeline.size - 1)
                self._synchronise()
            ended = time.perf_counter()
        return [Encoded(began, ended, vectors, rows)]

    def states(self, batch: Batch) -> Tensor | None:
        """Last hidden states [rows, length, hidden], on the last stage."""
        found = self._stage.states([batch])
        return found[0] if found else None

    def _pooled(self, states: Tensor, piece: Batch) -> Tensor:
        return pooled(states, piece.padding, self.workload.pooling, self.workload.normalize)


def measure_encode(
    visit: Visit,
    context: Context,
    prompts: Prompts,
    requests: list[Batch],
    encode: Encode,
    scorer: EncodeScorer,
    pieces: list[Batch] | None = None,
) -> Outcome:
    """Warm up, measure passes, then keep the answers where they are asked for.

    In a memory pass: one request, the largest, and no samples. `scorer` gives the hidden states of prompts, taken in
    `pieces` (none: as requested). Only the rank that speaks for its replica gives samples. Columns:
    warmup_pass_seconds, pass_seconds; of measured passes, in order, for each request request_seconds and
    batch_sequences.
    """
    workload = visit.cell.workload
    assert isinstance(workload, EncodeWorkload)
    outcome = Outcome(
        figures={
            "num_prompts": len(prompts.tokens),
            "prompt_tokens": sum(len(ids) for ids in prompts.tokens),
            "truncated_prompts": prompts.truncated,
        }
    )
    if unmeasured(requests, encode, context):
        outcome.figures["passes"] = 1
        return outcome
    passes = measured_passes(requests, encode, context)
    outcome.figures["passes"] = len(passes.seconds)
    vectors = [each.vectors for each in passes.last if each.vectors is not None]
    if vectors:
        outcome.figures["embedding_size"] = vectors[0].shape[1]
    if context.grid.speaks:
        outcome.samples = _samples(passes)
    if workload.answers:
        joined = torch.cat(vectors) if vectors else None
        figures, columns = collect_embeddings(prompts, joined, scorer, pieces or requests, context)
        outcome.figures |= figures
        outcome.samples |= columns
    return outcome


def _samples(passes: Passes[Encoded]) -> Samples:
    return passes.columns() | {
        "request_seconds": np.array([each.ended - each.began for each in passes.results]),
        "batch_sequences": np.array([each.rows for each in passes.results], dtype=np.float64),
    }
