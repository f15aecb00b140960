"""Export a model as ONNX graphs, or TensorRT plans built from them, in a separate process, for `rankwise export`.

    python -m engine.tools.export MANIFEST.json --to onnx --out FOLDER [--dtype float32] [--optimization all]
    [--no-check]

MANIFEST.json is a model's manifest (`configs.plans.model_manifest`). FOLDER gets the graphs
(`engine.peers.onnx.graphs`), their weights, the model's config.json and tokenizer.json, and export.json with files,
versions and check results: each graph is checked by onnx.checker, and ONNX Runtime's output for some tokens at the
given optimisation level is compared with transformers'. On failure the exit code is 2, with one line on stderr.
Existing files in FOLDER are never overwritten.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from configs.common.base import write_atomically
from configs.common.system.versions import version_of
from configs.families.config import ModelConfig
from configs.plans.model_manifest import ModelManifest, read_model_manifest
from engine.correctness.scoring import ModelEncodeScorer, ModelScorer, Seq2SeqScorer
from engine.models.pretrained import check_files
from engine.models.weights import DTYPES, write_folder
from engine.peers.folder_model import WorkKind, from_folder
from engine.peers.onnx.graphs import OPSET, GraphOptimization, write_graphs
from engine.prompts.tokens import padded_batch

SAID = "export.json"
NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "tensorrt": ("onnx", "onnxscript", "onnxruntime", "tensorrt")}
_WORK: dict[str, WorkKind] = {"decoder": "generate", "encoder": "encode", "encoder_decoder": "seq2seq"}
_CHECKED_TOKENS = ((5, 6, 7, 8, 9, 10, 11), (3, 4, 5))
_CACHED_STEPS = 2
_TOLERANCE = {"float32": 1e-3, "float16": 5e-2}


def export(
    manifest: ModelManifest, target: str, folder: Path, dtype: str, optimization: GraphOptimization, check: bool = True
) -> dict[str, Any]:
    """Write the folder; return the contents of export.json.

    Raises ValueError for an invalid request, NotImplementedError if something is not installed or cannot be exported.
    """
    _need(target)
    if dtype not in _TOLERANCE:
        raise ValueError(f"--dtype {dtype}: no runtime here computes such graphs; use {' or '.join(_TOLERANCE)}")
    config = ModelConfig.parse(manifest.config)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty, and nothing is written over; name another folder")
    with tempfile.TemporaryDirectory(prefix="rankwise-export-") as scratch, torch.inference_mode():
        source = _source(manifest, Path(scratch))
        model = from_folder(source, _WORK[config.kind], DTYPES[dtype])
        with torch.inference_mode(False):
            graphs = write_graphs(model, config.kind, folder)
        for name in ("config.json", "tokenizer.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        said: dict[str, Any] = {
            "model": manifest.identity,
            "kind": config.kind,
            "dtype": dtype,
            "opset": OPSET,
            "graphs": [path.name for path in graphs],
            "versions": {name: version_of(name) for name in ("torch", "transformers", *NEEDED[target])},
        }
        if check:
            said |= _check(model, config, folder, graphs, optimization)
    if check and not said["agrees"]:
        raise NotImplementedError(
            f"{folder}: outputs differ by {said['largest_difference']:.3g} from transformers', "
            f"whose largest is {said['largest_output']:.3g}; the graphs are wrong"
        )
    if target == "tensorrt":
        from engine.peers.onnx.tensorrt_plan import build_plans

        said["plans"] = [path.name for path in build_plans(graphs, dtype)]
    write_atomically(folder / SAID, json.dumps(said, indent=2) + "\n")
    return said


def _need(target: str) -> None:
    """Raise NotImplementedError naming a package that is not installed."""
    for name in NEEDED[target]:
        if find_spec(name) is None:
            remedy = (
                "it needs an NVIDIA GPU; pip install tensorrt there, or export --to onnx"
                if name == "tensorrt"
                else "pip install onnx onnxruntime onnxscript"
            )
            raise NotImplementedError(f"--to {target}: {name} is not installed; {remedy}")


def _source(manifest: ModelManifest, scratch: Path) -> Path:
    """Return the folder of the model's files; a synthetic model is written temporarily."""
    if manifest.synthetic_seed is None:
        check_files(manifest)
        return Path(manifest.folder)
    write_folder(manifest, scratch / "model", torch.float32)
    return scratch / "model"


def _check(
    model: Any, config: ModelConfig, folder: Path, graphs: list[Path], optimization: GraphOptimization
) -> dict[str, Any]:
    """Check that the graphs are well formed, and agree with transformers' model on two prompts of different lengths.

    transformers gets one prompt at a time, the graphs both together, to verify padding.
    """
    import onnx

    from engine.peers.onnx.session import OnnxDecoder, OnnxEncoder

    for path in graphs:
        onnx.checker.check_model(str(path))
    rows = [[number % config.vocabulary for number in ids] for ids in _CHECKED_TOKENS]
    theirs = {"decoder": ModelScorer, "encoder": ModelEncodeScorer, "encoder_decoder": Seq2SeqScorer}[config.kind](
        model
    )
    wanted = [found for row in rows for found in _outputs(theirs, config, [row])]
    if config.kind == "encoder":
        ours: Any = OnnxEncoder(folder, torch.get_num_threads(), optimization)
    else:
        start = config.start_token if config.kind == "encoder_decoder" else None
        ours = OnnxDecoder(folder, torch.get_num_threads(), optimization, start)
    pairs = list(zip(_outputs(ours, config, rows), wanted, strict=True))
    if config.kind != "encoder":
        through = _outputs(ours, config, rows, steps=_CACHED_STEPS)
        pairs += [(found, want[-_CACHED_STEPS:]) for found, want in zip(through, wanted, strict=True)]
    largest = max(float((found - want).abs().max()) for found, want in pairs)
    scale = max(float(want.abs().max()) for want in wanted)
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "optimization": optimization,
        "largest_difference": largest,
        "largest_output": scale,
        "agrees": largest <= _TOLERANCE[dtype] * max(scale, 1.0),
    }


def _outputs(scorer: Any, config: ModelConfig, rows: list[list[int]], steps: int = 0) -> list[Tensor]:
    """Return states or logits [length, width] of each row, computed together; with steps the last ones, cached."""
    batch = padded_batch(rows, torch.device("cpu"))
    lengths = [len(row) for row in rows]
    if config.kind == "encoder":
        states = scorer.states(batch)
        return [states[place, -length:].float() for place, length in enumerate(lengths)]
    if config.kind == "encoder_decoder":
        told = padded_batch([[config.start_token, *row] for row in rows], torch.device("cpu"))
        batch, lengths = replace(told, source=batch), [length + 1 for length in lengths]
    pieces: list[Tensor] = []

    def take(first: int, logits: Tensor) -> None:
        pieces.append(logits)

    if steps:
        scorer.cached(batch, steps, take)
        lengths = [steps] * len(rows)
    else:
        scorer.prefill(batch, take)
    whole = torch.cat(pieces, dim=1)
    return [whole[place, -length:] for place, length in enumerate(lengths)]


def main(arguments: list[str]) -> int:
    """Return exit code 0 (exported) or 2 (rejected)."""
    parser = argparse.ArgumentParser(prog="python -m engine.tools.export")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--to", choices=sorted(NEEDED), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--optimization", choices=get_args(GraphOptimization), default="all")
    parser.add_argument("--no-check", action="store_true")
    given = parser.parse_args(arguments)
    try:
        manifest = read_model_manifest(given.manifest)
        said = export(manifest, given.to, given.out, given.dtype, given.optimization, not given.no_check)
    except (ValueError, OSError, NotImplementedError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    for name in (*said["graphs"], *said.get("plans", ()), SAID):
        print(given.out / name)
    if "largest_difference" in said:
        print(
            f"largest difference from transformers {said['largest_difference']:.3g}, of outputs up to "
            f"{said['largest_output']:.3g} (ONNX Runtime, optimisation level {said['optimization']})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
