"""A peer's model from its files, timed like ours: from the first byte to weights in memory, imports left out.

A library's first load in a process imports and prepares much that is no loading. So a model of the same kind, a few
kilobytes small, is loaded first in the same way. transformers maps the files and returns before a weight is read; so
one element of each page is read before the clock is stopped.

    peer = load_peer(context, start)        # once per launch, kept in the context
"""

import json
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
from engine.loading.prepared import prepare_files
from engine.models.config import ModelConfig
from engine.weights import DTYPES, build_model, save_model, the_manifest, weight_files

_KEPT = "peer"
_PAGE_BYTES = 4096

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
            "model_parameters": sum(prod(shape) for shape in self.config.tensor_shapes().values()),
        }


def load_peer(context: Context, start: Start) -> Peer:
    """The launch's model; all ranks call it together. Raises ValueError for a model that cannot be loaded."""
    if _KEPT not in context.kept:
        manifest = the_manifest(context)
        dtype = DTYPES[context.job.cell.dtype]
        config = together(lambda: ModelConfig.parse(manifest.config), context)
        start.before()
        with _rehearsal_folder(manifest, context) as folder:
            start.load(folder, dtype)
        with _model_folder(manifest, context) as folder:
            figures = prepare_files(sorted(folder.glob("*.safetensors")), context)
            context.barrier()
            began = time.perf_counter()
            model = start.load(folder, dtype)
            touch(model)
            figures["load_seconds"] = time.perf_counter() - began
        context.kept[_KEPT] = Peer(model, start, config, figures)
    peer = context.kept[_KEPT]
    assert isinstance(peer, Peer)
    return peer


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
def _model_folder(manifest: Manifest, context: Context) -> Iterator[Path]:
    """The model's own folder; a synthetic model is written for the moment, by one rank of each node."""
    if manifest.synthetic_seed is None:
        together(lambda: weight_files(manifest), context)  # refuses what our engine refuses, in the same words
        yield Path(manifest.folder)
        return

    def write(folder: Path) -> None:
        model, _ = build_model(manifest, torch.float32, torch.device("cpu"))
        save_model(model, manifest.config, folder, torch.float32)

    with _shared_folder("peer_model", write, context) as folder:
        yield folder


@contextmanager
def _rehearsal_folder(manifest: Manifest, context: Context) -> Iterator[Path]:
    """A model of the same kind with next to no weights."""
    with _shared_folder(
        "peer_rehearsal", lambda folder: _write_small(manifest.config, context.grid.tp, folder), context
    ) as folder:
        yield folder


@contextmanager
def _shared_folder(name: str, write: Callable[[Path], None], context: Context) -> Iterator[Path]:
    """A folder that one rank of each node fills and removes, and all of them read."""
    folder = context.paths.folder / f"{name}_{context.rank // context.job.ranks_per_node}"
    try:
        together(lambda: write(folder) if context.local_rank == 0 else None, context)
        yield folder
        context.barrier()  # nobody reads any more; what is mapped stays
    finally:
        if context.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _write_small(config: dict[str, Any], parts: int, folder: Path) -> None:
    """A model like `config` with one layer and two heads for each of so many ranks."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = 2 * parts
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 16,
        "hidden_size": 16 * heads,
        "intermediate_size": 32 * heads,
        "vocab_size": 64 * heads,
    }
    by_layer = ("layer_types", "max_window_layers", "pad_token_id", "bos_token_id", "eos_token_id")
    folder.mkdir(exist_ok=True)
    written = {name: value for name, value in config.items() if name not in by_layer} | sizes
    (folder / "config.json").write_text(json.dumps(written))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
