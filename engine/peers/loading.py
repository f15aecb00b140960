"""Load a peer's model, timed like ours: from the first byte to weights in memory, without imports.

A library's first load in a process includes imports and set-up. So a model of the same kind, of a few kilobytes, is
loaded first in the same way. transformers maps the files and returns before weights are read, so one element of each
page is read before the clock stops.

    peer = load_peer(context, start)        # once per launch, kept in the context
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.common.execution import Layout
from configs.families.config import ModelConfig
from configs.plans.model_manifest import ModelManifest
from configs.records.record import Figure
from engine.context import Context
from engine.loading.prepared import prepare_files
from engine.models.pretrained import WeightsError, check_files
from engine.models.text_model import TextModel
from engine.models.weights import DTYPES, required_manifest, weight_files, write_folder
from engine.peers.families import text_model
from engine.peers.folder_model import WorkKind, from_folder, write_small
from engine.rank.agreement import raise_on_all_ranks

_KEPT = "peer"
_PAGE_BYTES = 4096
_SHAPES = ("mat1 and mat2 shapes", "is invalid for input of size", "must match the size of tensor")

LoadModel = Callable[[Path, torch.dtype], Any]
"""Loads the folder's model for this rank and returns it."""


@dataclass(frozen=True)
class Start:
    """Start of one engine: its loading function, and the arguments of `generate` for a batch.

    settings: (model, rows, most positions) -> keyword arguments. inference_mode: whether it runs in torch's inference
    mode; else without gradients only. before: called once, untimed, before loading.
    """

    load: LoadModel
    settings: Callable[[Any, int, int], dict[str, Any]] = lambda model, rows, capacity: {}
    inference_mode: bool = True
    before: Callable[[], None] = lambda: None


@dataclass
class Peer:
    """A loaded model; `figures` of its load are returned for the first measurement only."""

    model: Any
    start: Start
    config: TextModel
    figures: dict[str, Figure] = field(default_factory=dict)

    def load_figures(self) -> dict[str, Figure]:
        """Return figures of the load, None except in the first call, and sizes; bytes read are unknown."""
        loaded, self.figures = self.figures, {name: None for name in self.figures}
        tensors = [_local(parameter) for parameter in self.model.parameters()]
        return {
            **loaded,
            "load_bytes": None,
            "weights_bytes": sum(tensor.nbytes for tensor in tensors),
            "model_parameters": model_parameters(self.config),
        }


def model_parameters(config: TextModel) -> int | None:
    """Return the parameters of the whole model; tied ones count once. None: this engine lacks the family."""
    if not isinstance(config, ModelConfig):
        return None
    return sum(prod(shape) for shape in config.tensor_shapes().values())


def load_peer(context: Context, start: Start) -> Peer:
    """Return the launch's model; all ranks call it together. Raises ValueError for a model that cannot be loaded."""
    if _KEPT not in context.kept:
        manifest = required_manifest(context)
        dtype = DTYPES[context.job.cell.dtype]
        config = raise_on_all_ranks(lambda: text_model(context, work_kind(context)), context)
        start.before()
        known = isinstance(config, ModelConfig)
        with _able(context) if known else nullcontext():
            rehearse(config, context, lambda folder: start.load(folder, dtype))
        with model_folder(manifest, context) as folder:
            figures = prepare_files(files_read(folder, manifest), context)
            context.barrier()
            began = time.perf_counter()
            with nullcontext() if known else _able(context):
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


def rehearse(config: TextModel, context: Context, load: Callable[[Path], object]) -> None:
    """Load a tiny model of the same kind first, untimed: a process's first load imports for seconds.

    Of a family that this engine lacks no small model can be made: its load includes the libraries' set-up.
    """
    if isinstance(config, ModelConfig):
        with _rehearsal_folder(required_manifest(context), context) as folder:
            load(folder)


def files_read(folder: Path, manifest: ModelManifest) -> list[Path]:
    """Return the files of weights that transformers reads of `model_folder`: other copies beside them are not.

    Raises ValueError if one is missing or truncated.
    """
    return sorted(folder.glob("*.safetensors")) if manifest.synthetic_seed is not None else weight_files(manifest)


def load_model(folder: Path, dtype: torch.dtype, context: Context, layout: Layout | None = None) -> Any:
    """transformers' model of a folder on this rank's device; with a layout, this rank's share by its own plan."""
    from transformers.distributed.configuration_utils import DistributedConfig

    if layout is None:
        return from_folder(folder, work_kind(context), dtype).to(context.device)
    shared = DistributedConfig(tp_size=layout.tp) if layout.tp > 1 else DistributedConfig(pp_size=layout.pp)
    return from_folder(folder, work_kind(context), dtype, distributed_config=shared)


def work_kind(context: Context) -> WorkKind:
    """Return the kind of work that this launch's model is loaded for."""
    kind = context.job.cell.workload.kind
    assert kind in ("generate", "seq2seq", "encode")
    return kind


@contextmanager
def _able(context: Context) -> Iterator[None]:
    """Translate an engine's errors about models without a plan, or with the wrong one."""
    try:
        yield
    except WeightsError:
        raise
    except (AttributeError, AssertionError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in _SHAPES):
            raise
        cell, family = context.job.cell, required_manifest(context).config.get("model_type")
        reason = " ".join(str(error).split())[:200]
        raise NotImplementedError(
            f"engine: {cell.engine} cannot run a {family} model with {cell.layout} ({reason}); use engine rankwise"
        ) from error


def _try(model: Any, context: Context) -> None:
    """Run a few tokens through the model: some engines detect only then that they cannot split it."""
    tokens = torch.ones(1, 4, dtype=torch.int64, device=context.device)
    model(input_ids=tokens, **({"decoder_input_ids": tokens} if work_kind(context) == "seq2seq" else {}))


def touch(model: torch.nn.Module) -> None:
    """Read an element of every page of the weights, so that all of them are in memory."""
    for parameter in model.parameters():
        tensor = _local(parameter.detach())
        tensor[..., :: max(1, _PAGE_BYTES // tensor.element_size())].sum()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be distributed."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@contextmanager
def model_folder(manifest: ModelManifest, context: Context) -> Iterator[Path]:
    """Return the model's folder; a synthetic model is written temporarily, by one rank of each node."""
    if manifest.synthetic_seed is None:
        raise_on_all_ranks(lambda: check_files(manifest), context)
        yield Path(manifest.folder)
        return

    with shared_folder("peer_model", lambda folder: write_folder(manifest, folder, torch.float32), context) as folder:
        yield folder


@contextmanager
def _rehearsal_folder(manifest: ModelManifest, context: Context) -> Iterator[Path]:
    """Return a tiny model of the same kind."""
    parts = context.world_size
    with shared_folder(
        "peer_rehearsal", lambda folder: write_small(manifest.config, work_kind(context), parts, folder), context
    ) as folder:
        yield folder


@contextmanager
def shared_folder(name: str, write: Callable[[Path], None], context: Context) -> Iterator[Path]:
    """Yield a folder that one rank of each node fills and removes, and all of them read."""
    folder = context.paths.folder / f"{name}_{context.rank // context.job.ranks_per_node}"
    try:
        raise_on_all_ranks(lambda: write(folder) if context.local_rank == 0 else None, context)
        yield folder
        context.barrier()  # all ranks have read it; mappings stay valid
    finally:
        if context.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
