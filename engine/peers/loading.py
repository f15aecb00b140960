"""A peer's model from its files, timed like ours: from the first byte to weights in memory, imports left out.

A library's first load in a process imports and prepares much that is no loading. So a model of the same kind, a few
kilobytes small, is loaded first in the same way. transformers maps the files and returns before a weight is read; so
one element of each page is read before the clock is stopped.

    peer = load_peer(context, start)        # once per launch, kept in the context
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.model import Manifest
from configs.record import Figure
from engine.agreement import together
from engine.context import Context
from engine.generate import check_kind
from engine.loading.prepared import prepare_files
from engine.models.config import ModelConfig
from engine.peers.folder_model import WorkKind, write_small
from engine.weights import DTYPES, the_manifest, weight_files, write_folder

_KEPT = "peer"
_PAGE_BYTES = 4096
_SHAPES = ("mat1 and mat2 shapes", "is invalid for input of size", "must match the size of tensor")

Load = Callable[[Path, torch.dtype], Any]
"""Loads the folder's model for this rank and returns it."""


@dataclass(frozen=True)
class Start:
    """One engine's way: how it loads, and what `generate` is given for a batch.

    settings: (model, rows, most positions) -> keyword arguments. inference_mode: whether it runs in torch's
    inference mode; else without gradients only. before: done once, untimed, before anything is loaded.
    """

    load: Load
    settings: Callable[[Any, int, int], dict[str, Any]] = lambda model, rows, capacity: {}
    inference_mode: bool = True
    before: Callable[[], None] = lambda: None


@dataclass
class Peer:
    """A loaded model; `figures` of its load are given to the first visit alone."""

    model: Any
    start: Start
    config: ModelConfig
    figures: dict[str, Figure] = field(default_factory=dict)

    def load_figures(self) -> dict[str, Figure]:
        """Figures of the load, None but in the first call, and sizes; bytes read are the library's own affair."""
        loaded, self.figures = self.figures, {name: None for name in self.figures}
        tensors = [_local(parameter) for parameter in self.model.parameters()]
        return {
            **loaded,
            "load_bytes": None,
            "weights_bytes": sum(tensor.nbytes for tensor in tensors),
            "model_parameters": model_parameters(self.config),
        }


def model_parameters(config: ModelConfig) -> int:
    """Of the whole model; tied ones count once."""
    return sum(prod(shape) for shape in config.tensor_shapes().values())


def load_peer(context: Context, start: Start) -> Peer:
    """The launch's model; all ranks call it together. Raises ValueError for a model that cannot be loaded."""
    if _KEPT not in context.kept:
        manifest = the_manifest(context)
        dtype = DTYPES[context.job.cell.dtype]
        config = together(lambda: check_kind(context, work_kind(context)), context)
        start.before()
        with _rehearsal_folder(manifest, context) as folder, _able(context):
            start.load(folder, dtype)
        with model_folder(manifest, context) as folder:
            figures = prepare_files(sorted(folder.glob("*.safetensors")), context)
            context.barrier()
            began = time.perf_counter()
            model = start.load(folder, dtype)
            touch(model)
            figures["load_seconds"] = time.perf_counter() - began
            if context.world_size > 1:
                with _able(context), torch.no_grad():
                    _try(model, context)
        context.kept[_KEPT] = Peer(model, start, config, figures)
    peer = context.kept[_KEPT]
    assert isinstance(peer, Peer)
    return peer


def work_kind(context: Context) -> WorkKind:
    """What this launch's model is loaded for."""
    kind = context.job.cell.workload.kind
    assert kind in ("generate", "seq2seq", "encode")
    return kind


@contextmanager
def _able(context: Context) -> Iterator[None]:
    """Inside, what an engine says of a model that it has no plan for, or the wrong one, is told as such."""
    try:
        yield
    except (AttributeError, AssertionError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in _SHAPES):
            raise
        cell, family = context.job.cell, the_manifest(context).config.get("model_type")
        reason = " ".join(str(error).split())[:200]
        raise NotImplementedError(
            f"engine: {cell.engine} cannot run a {family} model with {cell.layout} ({reason}); use engine rankwise"
        ) from error


def _try(model: Any, context: Context) -> None:
    """A few tokens through the model: some engines find out only here that they cannot share it out."""
    tokens = torch.ones(1, 4, dtype=torch.int64, device=context.device)
    model(input_ids=tokens, **({"decoder_input_ids": tokens} if work_kind(context) == "seq2seq" else {}))


def touch(model: torch.nn.Module) -> None:
    """Read an element of every page of the weights, so that all of them are in memory."""
    for parameter in model.parameters():
        tensor = _local(parameter.detach())
        tensor[..., :: max(1, _PAGE_BYTES // tensor.element_size())].sum()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be distributed."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@contextmanager
def model_folder(manifest: Manifest, context: Context) -> Iterator[Path]:
    """The model's own folder; a synthetic model is written for the moment, by one rank of each node."""
    if manifest.synthetic_seed is None:
        together(lambda: weight_files(manifest), context)  # refuses what our engine refuses, in the same words
        yield Path(manifest.folder)
        return

    with shared_folder("peer_model", lambda folder: write_folder(manifest, folder, torch.float32), context) as folder:
        yield folder


@contextmanager
def _rehearsal_folder(manifest: Manifest, context: Context) -> Iterator[Path]:
    """A model of the same kind with next to no weights."""
    parts = context.world_size
    with shared_folder(
        "peer_rehearsal", lambda folder: write_small(manifest.config, work_kind(context), parts, folder), context
    ) as folder:
        yield folder


@contextmanager
def shared_folder(name: str, write: Callable[[Path], None], context: Context) -> Iterator[Path]:
    """A folder that one rank of each node fills and removes, and all of them read."""
    folder = context.paths.folder / f"{name}_{context.rank // context.job.ranks_per_node}"
    try:
        together(lambda: write(folder) if context.local_rank == 0 else None, context)
        yield folder
        context.barrier()  # nobody reads any more; what is mapped stays
    finally:
        if context.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
