"""Unmodified transformers on one rank: what our engine's answers are judged by, for every kind of prompted workload.

The same passes and columns as `engine.generate`, `engine.seq2seq` and `engine.encode`, which call `run` for cells whose
engine is `transformers`. Answers come from one prompt at a time, without padding; where the workload names
`noise_dtypes`, the noise of the order of reduction is measured too (`engine.noise`). Only files on this
machine are read; no code of a model's repository is run.
"""

import time
from typing import Any

import numpy as np
import torch

from configs.cell import EncodeWorkload, PromptedWorkload, Seq2SeqWorkload
from configs.job import Visit
from configs.record import Figure
from engine.answers import read_prefill, sequences_of
from engine.context import Context, Outcome
from engine.embeddings import pooled, read_states
from engine.generate import check_kind
from engine.model_scorer import EncodeScorer, ModelScorer, Seq2SeqScorer
from engine.models.config import ModelConfig
from engine.noise import measure_noise, measure_state_noise
from engine.peers.folder_model import from_folder
from engine.peers.loading import Peer, Start, model_folder, work_kind
from engine.peers.measuring import measure_peer
from engine.tokens import batches, prompts_of_rank
from engine.weights import DTYPES, size_figures, the_manifest, weights_hash

_KEPT = "reference"


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError where model or prompts cannot be used."""
    workload = visit.cell.workload
    assert isinstance(workload, PromptedWorkload) and context.world_size == 1
    config = check_kind(context, work_kind(context))
    model, figures = _load(context, DTYPES[visit.cell.dtype])
    outcome = measure_peer(visit, context, Peer(model, Start(lambda folder, dtype: model), config))
    if workload.answers and workload.noise_dtypes and "answer_prompts" in outcome.samples:
        began = time.perf_counter()
        with torch.inference_mode():
            _add_noise(outcome, model, config, workload, context)
        outcome.figures["noise_seconds"] = time.perf_counter() - began
    outcome.figures |= figures
    return outcome


def _add_noise(outcome: Outcome, model: Any, config: ModelConfig, workload: PromptedWorkload, context: Context) -> None:
    """Measure what the order of reduction changes in the answers that `outcome` holds."""
    prompts = prompts_of_rank(workload, context, config)
    singles = batches(prompts.tokens, 1, context.device)
    if isinstance(workload, EncodeWorkload):
        scorer = EncodeScorer(model)
        kept = read_states(scorer, prompts, singles)
        pooling, normalize = workload.pooling, workload.normalize
        vectors = [pooled(scorer.states(single), None, pooling, normalize) for single in singles]
        baseline = kept, torch.cat(vectors).cpu().numpy()
        outcome.samples |= measure_state_noise(model, EncodeScorer, prompts, baseline, workload, context.device)
        return
    scorer_of: Any = Seq2SeqScorer if isinstance(workload, Seq2SeqWorkload) else ModelScorer
    start = config.start_token if isinstance(workload, Seq2SeqWorkload) else None
    tokens = torch.from_numpy(outcome.samples["answer_tokens"].astype(np.int64)).view(len(prompts.tokens), -1)
    sequences = sequences_of(prompts, tokens, start)
    scores = read_prefill(scorer_of(model), sequences, singles, prompts.total)
    dtypes, orders = workload.noise_dtypes, workload.noise_orders
    outcome.samples |= measure_noise(model, scorer_of, sequences, scores, dtypes, orders, context.device)


def _load(context: Context, dtype: torch.dtype) -> tuple[Any, dict[str, Figure]]:
    """transformers' own model, loaded once per launch, and its figures."""
    seconds = None
    if _KEPT not in context.kept:
        with model_folder(the_manifest(context), context) as folder:
            began = time.perf_counter()
            model = from_folder(folder, work_kind(context), dtype).to(context.device)
            seconds = time.perf_counter() - began
        context.kept[_KEPT] = model, weights_hash(model)
    model, digest = context.kept[_KEPT]
    # How many bytes transformers reads is its own affair: unknown.
    return model, {"load_seconds": seconds, "load_bytes": None, "weights_hash": digest, **size_figures(model)}
