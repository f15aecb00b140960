"""Reference for correctness: unmodified transformers on one rank, for every kind of prompt workload.

`engine.workloads.other_engines` measures it with the passes and columns of our own engine. Answers come from one prompt
at a time, without padding; where the workload names `noise_dtypes`, the noise of the order of reduction is measured too
(`engine.correctness.noise`). Only files on this machine are read; no code of a model's repository is run.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from configs.plans.job import Measurement
from configs.plans.record import Figure
from configs.workloads.encode import EncodeWorkload
from configs.workloads.prompted import PromptedWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.context import Context, Outcome
from engine.correctness.answers import read_prefill, sequences_of
from engine.correctness.embeddings import pooled, read_states
from engine.correctness.noise import measure_noise, measure_state_noise
from engine.correctness.scoring import ModelEncodeScorer, ModelScorer, Seq2SeqScorer
from engine.models.config import ModelConfig
from engine.models.weights import DTYPES, check_kind, required_manifest, size_figures, weights_hash
from engine.peers.folder_model import from_folder
from engine.peers.loading import Peer, Start, model_folder, work_kind
from engine.peers.work import LoadedWork, model_work
from engine.prompts.tokens import batches, prompts_of_rank

_KEPT = "reference"


def load_reference(measurement: Measurement, context: Context) -> LoadedWork:
    """Load transformers' own model, once per launch. Raises ValueError where the model cannot be used."""
    assert context.world_size == 1
    config = check_kind(context, work_kind(context))
    model, figures = _load(context, DTYPES[measurement.cell.dtype])
    peer = Peer(model, Start(lambda folder, dtype: model), config)
    loaded = model_work(peer, measurement.cell.workload.kind, context.device)
    return replace(loaded, figures=loaded.figures | figures)


def add_noise(outcome: Outcome, workload: PromptedWorkload, context: Context) -> None:
    """Measure what the order of reduction changes in the answers that `outcome` holds, where the workload asks for it.

    Called after `load_reference`.
    """
    if workload.answers and workload.noise_dtypes and "answer_prompts" in outcome.samples:
        began = time.perf_counter()
        model, _ = context.kept[_KEPT]
        with torch.inference_mode():
            _add_noise(outcome, model, ModelConfig.parse(required_manifest(context).config), workload, context)
        outcome.figures["noise_seconds"] = time.perf_counter() - began


def _add_noise(outcome: Outcome, model: Any, config: ModelConfig, workload: PromptedWorkload, context: Context) -> None:
    prompts = prompts_of_rank(workload, context, config)
    singles = batches(prompts.tokens, 1, context.device)
    if isinstance(workload, EncodeWorkload):
        scorer = ModelEncodeScorer(model)
        kept = read_states(scorer, prompts, singles)
        pooling, normalize = workload.pooling, workload.normalize
        vectors = [pooled(scorer.states(single), None, pooling, normalize) for single in singles]
        baseline = kept, torch.cat(vectors).cpu().numpy()
        outcome.samples |= measure_state_noise(model, ModelEncodeScorer, prompts, baseline, workload, context.device)
        return
    scorer_of: Any = Seq2SeqScorer if isinstance(workload, Seq2SeqWorkload) else ModelScorer
    start = config.start_token if isinstance(workload, Seq2SeqWorkload) else None
    tokens = torch.from_numpy(outcome.samples["answer_tokens"].astype(np.int64)).view(len(prompts.tokens), -1)
    sequences = sequences_of(prompts, tokens, start)
    scores = read_prefill(scorer_of(model), sequences, singles, prompts.total)
    dtypes, orders = workload.noise_dtypes, workload.noise_orders
    outcome.samples |= measure_noise(model, scorer_of, sequences, scores, dtypes, orders, context.device)


def _load(context: Context, dtype: torch.dtype) -> tuple[Any, dict[str, Figure]]:
    """Return transformers' model, loaded once per launch, and its figures."""
    seconds = None
    if _KEPT not in context.kept:
        with model_folder(required_manifest(context), context) as folder:
            began = time.perf_counter()
            model = from_folder(folder, work_kind(context), dtype).to(context.device)
            seconds = time.perf_counter() - began
        context.kept[_KEPT] = model, weights_hash(model)
    model, digest = context.kept[_KEPT]
    # The bytes read by transformers are unknown.
    return model, {"load_seconds": seconds, "load_bytes": None, "weights_hash": digest, **size_figures(model)}
