"""The `encode` workload: embeddings of a replica's prompts by an encoder, every batch timed.

One pass is all of this replica's prompts, in batches. A batch goes through the stages in consecutive micro-batches, its
last hidden states are pooled to one vector a prompt on the last stage, and the vectors return to the first stage, where
a service would respond. The request then ends and the next one begins. Started by `engine.worker` as

    outcome = run(measurement, context)
"""

import time

import numpy as np
import torch
from torch import Tensor

from configs.plans.job import Measurement
from configs.workloads.encode import EncodeWorkload
from engine.context import Context, RankResult, Samples
from engine.correctness.embeddings import EncodeScorer, collect_embeddings, pooled
from engine.correctness.finite import check_vectors
from engine.inference.model import Shard
from engine.inference.pipeline import PipelineStage, micro_batches
from engine.inference.weights import finalize_weights_after_first_answer, load_shard, shard_figures
from engine.models.text_model import limit_figures
from engine.models.weights import DTYPES, check_kind
from engine.parallel.communicator import Communicator
from engine.prompts.decoded import Encode, Encoded, synchroniser
from engine.prompts.passes import Passes, measured_passes, unmeasured
from engine.prompts.pooling import check_pooling
from engine.prompts.tokens import PromptBatch, Prompts, requests_of_rank
from engine.rank.agreement import raise_on_all_ranks


def run(measurement: Measurement, context: Context) -> RankResult:
    """Measure one measurement. Raises ValueError if model or prompts cannot be used."""
    workload, cell = measurement.cell.workload, measurement.cell
    assert isinstance(workload, EncodeWorkload)
    raise_on_all_ranks(lambda: check_pooling(context, workload), context)
    config = raise_on_all_ranks(lambda: check_kind(context, "encode"), context)
    shard = raise_on_all_ranks(lambda: load_shard(context, DTYPES[cell.dtype]), context)
    requests = requests_of_rank(workload, context, config)
    size = workload.in_micro_batches(cell.layout.pp)
    with torch.inference_mode():
        encoder = Encoder(shard, context.communicators.pipeline, size, workload)

        def first_answer() -> float:
            first = encoder.encode(requests.batches[0])[0]
            return first.ended - first.began

        first = finalize_weights_after_first_answer(measurement, context, first_answer)
        pieces = [piece for batch in requests.batches for piece in micro_batches(batch, size)]
        outcome = measure_encode(
            measurement, context, requests.prompts, requests.batches, encoder.encode, encoder, pieces
        )
    outcome.figures |= {"preprocess_seconds": requests.seconds, **shard_figures(context), **first}
    outcome.figures |= limit_figures(config) if workload.answers else {}
    return outcome


class Encoder:
    """This rank's part of an encoding replica. Every rank of a replica makes the same calls."""

    def __init__(self, shard: Shard, pipeline: Communicator, micro_batch_size: int, workload: EncodeWorkload) -> None:
        self.shard, self.pipeline, self.micro_batch_size, self.workload = shard, pipeline, micro_batch_size, workload
        self._stage = PipelineStage(shard, pipeline)
        self._synchronise = synchroniser(shard.device)

    def encode(self, batch: PromptBatch) -> list[Encoded]:
        """Return vectors of a batch, on the last stage and on the first."""
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

    def states(self, batch: PromptBatch) -> Tensor | None:
        """Return last hidden states [rows, length, hidden], on the last stage."""
        found = self._stage.states([batch])
        return found[0] if found else None

    def _pooled(self, states: Tensor, piece: PromptBatch) -> Tensor:
        return pooled(states, piece.padding, self.workload.pooling, self.workload.normalize)


def measure_encode(
    measurement: Measurement,
    context: Context,
    prompts: Prompts,
    requests: list[PromptBatch],
    encode: Encode,
    scorer: EncodeScorer,
    pieces: list[PromptBatch] | None = None,
) -> RankResult:
    """Warm up, measure passes, then collect the answers if requested.

    In a memory pass: one request, the largest, and no samples. `scorer` returns the hidden states of prompts, in
    batches `pieces` (none: as requested). Only the rank that reports for its replica returns samples. Columns:
    warmup_pass_seconds, pass_seconds; of measured passes, in order, for each request request_seconds and
    batch_sequences.
    """
    workload = measurement.cell.workload
    assert isinstance(workload, EncodeWorkload)
    outcome = RankResult(
        figures={
            "num_prompts": len(prompts.tokens),
            "prompt_tokens": sum(len(ids) for ids in prompts.tokens),
            "max_prompt_tokens": max(len(ids) for ids in prompts.tokens),
            "truncated_prompts": prompts.truncated,
        }
    )
    if unmeasured(requests, encode, context):
        outcome.figures["passes"] = 1
        return outcome
    passes = measured_passes(requests, encode, context, check_vectors)
    outcome.figures["passes"] = len(passes.seconds)
    vectors = [each.vectors for each in passes.last if each.vectors is not None]
    if vectors:
        outcome.figures["embedding_size"] = vectors[0].shape[1]
    if context.grid.reports_results:
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
