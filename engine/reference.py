"""The `generate` workload on unmodified transformers: what our engine's answers are judged by.

One rank, greedy, the same passes and columns as `engine.generate`, which calls `run` for cells whose
engine is `transformers`. Answers come from one prompt at a time, without padding; where the workload names
`noise_dtypes`, the noise of the order of reduction is measured too (`engine.noise`). Only files on this
machine are read; no code of a model's repository is run.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.cell import GenerateWorkload
from configs.job import Visit
from configs.record import Figure
from engine.answers import read_prefill, sequences_of
from engine.context import Context, Outcome
from engine.generate import measure
from engine.model_scorer import ModelScorer
from engine.models.config import ModelConfig
from engine.noise import measure_noise
from engine.peers.decoding import generate_decoder
from engine.tokens import Batch, Prompts, batches, prompts_of_rank
from engine.weights import DTYPES, build_model, save_model, size_figures, the_manifest, weight_files, weights_hash

_KEPT = "reference"


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one visit. Raises ValueError where model or prompts cannot be used."""
    workload = visit.cell.workload
    assert isinstance(workload, GenerateWorkload) and context.world_size == 1
    config = ModelConfig.parse(the_manifest(context).config)
    model, figures = _load(context, DTYPES[visit.cell.dtype])
    began = time.perf_counter()
    prompts = prompts_of_rank(workload, context, config)
    requests = batches(prompts.tokens, workload.batch_size, context.device)
    singles = batches(prompts.tokens, 1, context.device)
    figures["preprocess_seconds"] = time.perf_counter() - began
    with torch.inference_mode():
        capacity = max(len(ids) for ids in prompts.tokens) + workload.new_tokens
        decode = generate_decoder(model, workload.new_tokens, capacity, context.device)
        outcome = measure(visit, context, prompts, requests, decode, ModelScorer(model), singles)
        if workload.answers and workload.noise_dtypes and "answer_tokens" in outcome.samples:
            _add_noise(outcome, model, prompts, singles, workload, context)
    outcome.figures |= figures
    return outcome


def _add_noise(
    outcome: Outcome,
    model: Any,
    prompts: Prompts,
    singles: list[Batch],
    workload: GenerateWorkload,
    context: Context,
) -> None:
    """Measure what the order of reduction changes in the answers that `outcome` holds."""
    began = time.perf_counter()
    tokens = torch.from_numpy(outcome.samples["answer_tokens"].astype(np.int64)).view(len(prompts.tokens), -1)
    sequences = sequences_of(prompts, tokens)
    baseline = read_prefill(ModelScorer(model), sequences, singles, prompts.total)
    outcome.samples |= measure_noise(
        model, ModelScorer, sequences, baseline, workload.noise_dtypes, workload.noise_orders, context.device
    )
    outcome.figures["noise_seconds"] = time.perf_counter() - began


def _load(context: Context, dtype: torch.dtype) -> tuple[Any, dict[str, Figure]]:
    """transformers' own model, loaded once per launch, and its figures."""
    seconds = None
    if _KEPT not in context.kept:
        manifest = the_manifest(context)
        if manifest.synthetic_seed is None:
            weight_files(manifest)  # refuses what our engine refuses, in the same words
            model, seconds = _from_folder(Path(manifest.folder), dtype, context.device)
        else:
            ours, _ = build_model(manifest, torch.float32, torch.device("cpu"))
            with tempfile.TemporaryDirectory(prefix="rankwise-reference-") as folder:
                save_model(ours, manifest.config, Path(folder), torch.float32)
                del ours
                model, seconds = _from_folder(Path(folder), dtype, context.device)
        context.kept[_KEPT] = model, weights_hash(model)
    model, digest = context.kept[_KEPT]
    # How many bytes transformers reads is its own affair: unknown.
    return model, {"load_seconds": seconds, "load_bytes": None, "weights_hash": digest, **size_figures(model)}


def _from_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, float]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    model = model.to(device).eval()
    seconds = time.perf_counter() - began
    # Plain greedy decoding: a repository's sampling and penalty settings are no part of the model.
    model.generation_config = GenerationConfig()
    return model, seconds
