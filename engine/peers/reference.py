"""Reference for correctness: unmodified transformers on one rank, for every kind of prompt workload.

`engine.workloads.other_engines` measures it with the passes and columns of our own engine. Answers come from one prompt
at a time, without padding; where the workload names `noise_dtypes`, the noise of the order of reduction is measured too
(`engine.correctness.noise`). Of such a model layers that do not fit in memory are read from disk
(`engine.peers.offloaded`). Only files on this machine are read; no code of a model's repository is run.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from configs.common.execution import Dtype
from configs.plans.job import Measurement
from configs.records.record import Figure
from configs.workloads.encode import EncodeWorkload
from configs.workloads.prompted import PromptedWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload
from engine.context import Context, RankResult
from engine.correctness.answers import forced_tokens, read_prefill, sequences_of
from engine.correctness.embeddings import pooled, read_states
from engine.correctness.noise import converted, measure_noise, measure_state_noise
from engine.correctness.scoring import ModelEncodeScorer, ModelScorer, Seq2SeqScorer
from engine.loading.prepared import prepare_files
from engine.models.text_model import TextModel
from engine.models.weights import DTYPES, required_manifest, size_figures, weights_hash
from engine.peers.families import text_model
from engine.peers.folder_model import WorkKind, from_folder
from engine.peers.loading import Peer, Start, files_read, model_folder, rehearse, touch, work_kind
from engine.peers.offloaded import Placement, place
from engine.peers.work import LoadedWork, model_work
from engine.prompts.tokens import batches, prompts_of_rank
from engine.rank.failures import log_line

_KEPT = "reference"


def load_reference(measurement: Measurement, context: Context) -> LoadedWork:
    """Load transformers' own model, once per launch. Raises ValueError where the model cannot be used."""
    assert context.world_size == 1
    config, workload = text_model(context, work_kind(context)), measurement.cell.workload
    assert isinstance(workload, PromptedWorkload)
    kept, figures = _load(context, DTYPES[measurement.cell.dtype], workload, config)
    peer = Peer(kept.model, Start(lambda folder, dtype: kept.model), config)
    loaded = model_work(peer, workload.kind, context.device)
    untimed = kept.placement is not None and kept.placement.offloaded
    return replace(loaded, figures=loaded.figures | figures, untimed=untimed)


def add_noise(outcome: RankResult, workload: PromptedWorkload, config: TextModel, context: Context) -> None:
    """Measure what the order of reduction changes in the answers that `outcome` holds, where the workload asks for it.

    Called after `load_reference`. A model of which layers are read from disk is given up: no other measurement of the
    launch may find it.
    """
    kept: _Kept = context.kept[_KEPT]
    if workload.answers and workload.noise_dtypes and "answer_prompts" in outcome.samples:
        began = time.perf_counter()
        with torch.inference_mode():
            _add_noise(outcome, kept, config, workload, context)
        outcome.figures["noise_seconds"] = time.perf_counter() - began
    if kept.placement is not None and kept.placement.offloaded:
        del context.kept[_KEPT]
        kept.files.close()


def _add_noise(
    outcome: RankResult, loaded: "_Kept", config: TextModel, workload: PromptedWorkload, context: Context
) -> None:
    model = loaded.model
    prompts = prompts_of_rank(workload, context, config)
    singles = batches(prompts.tokens, 1, context.device)
    if isinstance(workload, EncodeWorkload):
        scorer = ModelEncodeScorer(model)
        kept = read_states(scorer, prompts, singles)
        pooling, normalize = workload.pooling, workload.normalize
        vectors = [pooled(scorer.states(single), None, pooling, normalize) for single in singles]
        baseline = kept, torch.cat(vectors).cpu().numpy()
        outcome.samples |= measure_state_noise(
            loaded.in_dtype, ModelEncodeScorer, prompts, baseline, workload, context.device
        )
        return
    scorer_of: Any = Seq2SeqScorer if isinstance(workload, Seq2SeqWorkload) else ModelScorer
    start = config.start_token if isinstance(workload, Seq2SeqWorkload) else None
    tokens = torch.from_numpy(outcome.samples["answer_tokens"].astype(np.int64)).view(len(prompts.tokens), -1)
    sequences = sequences_of(prompts, tokens, start, forced_tokens(config))
    scores = read_prefill(scorer_of(model), sequences, singles, prompts.total)
    dtypes, orders = workload.noise_dtypes, workload.noise_orders
    outcome.samples |= measure_noise(loaded.in_dtype, scorer_of, sequences, scores, dtypes, orders, context.device)


@dataclass
class _Kept:
    """The launch's model. placement: of a reference, None of a timed peer; files: kept as long as layers are read.

    job: the folder in which those have their place that are written for it.
    """

    model: Any
    digest: str | None
    folder: Path
    work: WorkKind
    placement: Placement | None
    files: ExitStack
    job: Path

    def in_dtype(self, dtype: Dtype) -> Any:
        """Return the model in a precision, beside the one that is loaded."""
        if self.placement is None or not self.placement.offloaded:
            return converted(self.model, dtype)
        if dtype == "float32":
            return self.model
        return self.placement.load(self.folder, self.work, DTYPES[dtype], _scratch(self.files, self.job))


def _scratch(files: ExitStack, job: Path) -> Path:
    """Return a new folder, removed with `files`. The model's own may be read-only, and is the user's."""
    return Path(files.enter_context(TemporaryDirectory(dir=job, prefix="offloaded_")))


def _load(
    context: Context, dtype: torch.dtype, workload: PromptedWorkload, config: TextModel
) -> tuple[_Kept, dict[str, Figure]]:
    """Return transformers' model, loaded once per launch, and its figures; of the load None except in the first call.

    It is timed as that of any peer (`engine.peers.loading`).
    """
    loaded: dict[str, Figure] = {"load_seconds": None}
    if _KEPT not in context.kept:
        with ExitStack() as opened:
            folder = opened.enter_context(model_folder(required_manifest(context), context))
            placement, work = _placement(context, folder, workload, config, dtype), work_kind(context)
            offloaded = placement is not None and placement.offloaded
            if placement is None:
                rehearse(config, context, lambda small: from_folder(small, work, dtype))
            loaded |= prepare_files(files_read(folder, required_manifest(context)), context)
            began = time.perf_counter()
            if placement is not None and offloaded:
                log_line(f"reference: {placement.text}")
                model = placement.load(folder, work, dtype, _scratch(opened, context.paths.folder))
                files = opened.pop_all()
                context.closing.callback(files.close)  # also where the work fails before `add_noise`
            else:
                model, files = from_folder(folder, work, dtype).to(context.device), ExitStack()
                touch(model)
            loaded["load_seconds"] = time.perf_counter() - began
            digest = None if offloaded else weights_hash(model)
        context.kept[_KEPT] = _Kept(model, digest, folder, work, placement, files, context.paths.folder)
    kept = context.kept[_KEPT]
    # The bytes read by transformers are unknown.
    figures = loaded | {"load_bytes": None, "weights_hash": kept.digest}
    if kept.placement is not None:
        figures |= {"reference_memory_bytes": kept.placement.need.total, "reference_placement": kept.placement.text}
    return kept, figures | size_figures(kept.model)


def _placement(
    context: Context, folder: Path, workload: PromptedWorkload, config: TextModel, dtype: torch.dtype
) -> Placement | None:
    """Return where the reference's weights go; None for a timed peer, which must be whole in memory."""
    if not workload.noise_dtypes:
        return None
    positions = max(len(ids) for ids in prompts_of_rank(workload, context, config).tokens)
    twin = any(DTYPES[name] != dtype for name in workload.noise_dtypes)
    manifest = required_manifest(context)
    return place(folder, files_read(folder, manifest), context.device, workload.positions(positions), twin)
