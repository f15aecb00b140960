"""Engine `onnxruntime`: transformers' model exported to ONNX once, run by ONNX Runtime on the rank's cores.

The export runs in a separate process (`engine.tools.export`), so that this one never imports transformers. It is cached
on the nodes by model, precision and versions. Its time is a figure of the launch that ran it.

    loaded = load_onnx(measurement, context)
"""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.common.base import content_hash
from configs.common.files.abandoned import remove_abandoned
from configs.common.files.flushing import flush_all
from configs.families.config import ModelConfig
from configs.plans.job import Measurement
from configs.records.record import Figure
from engine.context import Context
from engine.loading.prepared import prepare_files
from engine.models.weights import check_kind, required_manifest
from engine.peers.loading import model_parameters, work_kind
from engine.peers.work import LoadedWork
from engine.prompts.decoded import Decode
from engine.prompts.tokens import PromptBatch

OPTIMIZATION = "all"
_KEPT = "onnx"
_PREFIX = ".export-"
_HALF_MADE = re.compile(re.escape(_PREFIX) + r"\w{8}")
"""What an export that is killed leaves behind, as large as the model."""
_VERSIONS = ("torch", "transformers", "onnx", "onnxscript")


@dataclass
class LoadedGraphs:
    """Sessions of a launch; `figures` of their load are returned for the first measurement only."""

    model: Any
    config: ModelConfig
    sizes: dict[str, Figure]
    figures: dict[str, Figure] = field(default_factory=dict)

    def load_figures(self) -> dict[str, Figure]:
        """Return figures of the load, None except in the first call, and sizes."""
        loaded, self.figures = self.figures, {name: None for name in self.figures}
        return loaded | self.sizes


def load_onnx(measurement: Measurement, context: Context) -> LoadedWork:
    """Load the exported model, once per launch. Raises NotImplementedError for what is not measured with it."""
    if context.device.type != "cpu":
        raise NotImplementedError("engine: onnxruntime is measured on CPUs by this version; use engine transformers")
    if measurement.cell.dtype == "bfloat16":
        raise NotImplementedError("engine: onnxruntime has no bfloat16 kernels for CPUs; use dtype float32 or float16")
    for name in ("onnxruntime", "onnx", "onnxscript"):
        try:
            version(name)
        except ModuleNotFoundError:
            raise NotImplementedError(
                f"engine: onnxruntime needs {name}; pip install onnx onnxruntime onnxscript"
            ) from None
    loaded = _loaded(context)
    return LoadedWork(OnnxWork(loaded.model), loaded.config, loaded.load_figures())


class OnnxWork:
    """`engine.peers.work.Work` by ONNX Runtime."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def decoder(self, new_tokens: int, capacity: int) -> Decode:
        """Return our greedy loop over the graphs."""
        return lambda batch: self._model.decode(batch, new_tokens)

    def states(self, batch: PromptBatch) -> Tensor:
        """Return states from one run of the encoder's graph."""
        states: Tensor = self._model.states(batch)
        return states

    def scorer(self) -> Any:
        """Return a scorer based on the graphs."""
        return self._model


def _loaded(context: Context) -> LoadedGraphs:
    if _KEPT not in context.kept:
        config = check_kind(context, work_kind(context))
        folder, figures = _exported(context)
        figures |= prepare_files(sorted(folder.iterdir()), context)
        sizes: dict[str, Figure] = {
            "onnx_optimization_level": OPTIMIZATION,
            "load_bytes": None,
            "weights_bytes": graph_bytes(folder),
            "model_parameters": model_parameters(config),
        }
        from engine.peers.onnx.session import OnnxDecoder, OnnxEncoder

        threads = torch.get_num_threads()
        began = time.perf_counter()
        if config.kind == "encoder":
            model: Any = OnnxEncoder(folder, threads)
        else:
            start = config.start_token if config.kind == "encoder_decoder" else None
            model = OnnxDecoder(folder, threads, start_token=start)
        figures["load_seconds"] = time.perf_counter() - began
        context.kept[_KEPT] = LoadedGraphs(model, config, sizes, figures)
    loaded = context.kept[_KEPT]
    assert isinstance(loaded, LoadedGraphs)
    return loaded


def graph_bytes(folder: Path) -> int:
    """Return the bytes of the graphs and of the weights beside them; not of the tokenizer, which no session loads."""
    return sum(path.stat().st_size for path in folder.iterdir() if ".onnx" in path.suffixes)


def _exported(context: Context) -> tuple[Path, dict[str, Figure]]:
    """Return the folder of the model's graphs, and the seconds of the export (None: cached)."""
    manifest = required_manifest(context)
    known = {
        "identity": manifest.identity,
        "files": {name: file.sha256 for name, file in manifest.files.items()},
        "config": manifest.config,
        "work": work_kind(context),
        "dtype": context.job.cell.dtype,
        "versions": {name: version(name) for name in _VERSIONS},
    }
    folder = Path(context.job.cache) / "onnx" / content_hash(known)
    remove_abandoned(folder.parent, _HALF_MADE)
    if folder.is_dir():
        return folder, {"export_seconds": None}
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_PREFIX))
    began = time.perf_counter()
    try:
        _export(context, unfinished)
        unfinished.chmod(0o755)  # others may have the cache, too
        flush_all(unfinished)  # the folder is believed by its name
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another rank was quicker
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder, {"export_seconds": time.perf_counter() - began}


def _export(context: Context, folder: Path) -> None:
    """Export in a separate process. Raises NotImplementedError with its message on failure; MemoryError and
    RuntimeError if a signal ended it, which says nothing of the model.
    """
    options = ["--to", "onnx", "--out", str(folder), "--dtype", context.job.cell.dtype, "--no-check"]
    command = [sys.executable, "-m", "engine.tools.export", str(context.job.manifest), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        raise MemoryError("engine: onnxruntime: the export was killed (SIGKILL), as the kernel does if memory runs out")
    if done.returncode < 0:
        raise RuntimeError(f"engine: onnxruntime: the export was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NotImplementedError(f"engine: onnxruntime: the model was not exported: {reason}")
