"""Tiny random models of any family of transformers, and cells of engine transformers measured in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from engine.context import Context, RankResult
from engine.workloads.other_engines import run

WORDS = 96


def made(family: str, folder: Path, **options: Any) -> ModelManifest:
    """A tiny random model of the family, as transformers saves it."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
    )

    sizes = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **sizes | {"pad_token_id": 0} | options)
    config.initializer_range = 0.2
    torch.manual_seed(0)
    decodes = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else decodes
    auto.from_config(config).save_pretrained(folder)
    read = json.loads((folder / "config.json").read_text())
    return ModelManifest(identity=f"folder:{family}", source="folder", folder=str(folder), files={}, config=read)


def context_of(folder: Path, manifest: ModelManifest, workload: Any, **fields: Any) -> tuple[Measurement, Context]:
    measurement = Measurement(
        cell=Cell(model=manifest.identity, engine="transformers", workload=workload, **fields), repeat=0, attempt=1
    )
    job = Job(
        name="job",
        study="test",
        measuring_pass="timed",
        measuring=Measuring(warmup=0, min_passes=1, min_seconds=0),
        measurements=(measurement,),
        ranks_per_node=1,
        timeout_seconds=60,
        manifest="",
        inputs=str(folder),
        cache=str(folder / "cache"),
    )
    paths = JobPaths(folder / "job")
    paths.folder.mkdir(exist_ok=True)
    return measurement, Context(job, paths, 0, 1, torch.device("cpu"), manifest, lambda: None)


def outcome_of(folder: Path, manifest: ModelManifest, workload: Any, **fields: Any) -> RankResult:
    return run(*context_of(folder, manifest, workload, **fields))


def ranked(outcome: RankResult) -> dict[str, np.ndarray]:
    return {f"0/{name}": column for name, column in outcome.samples.items()}
