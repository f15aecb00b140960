"""`rankwise export`: a model as ONNX graphs that other runtimes load, or as TensorRT plans.

    rankwise export ./models/my-model --to onnx --out exported
    rankwise export sentence-transformers/all-MiniLM-L6-v2@COMMIT --to onnx --out exported --dtype float16

The graphs are checked: that they are well formed, and that ONNX Runtime makes of some tokens what transformers makes of
them; the largest difference is printed. Exit codes: 0 written, 2 refused: something is not installed, the model or an
argument cannot be used.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a folder, owner/name@revision, or synthetic:ARCHITECTURE@SEED")
    ],
    to: Annotated[Literal["onnx", "tensorrt"], typer.Option(help="what is written")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="a new or empty folder")],
    dtype: Annotated[Literal["float32", "float16"], typer.Option(help="of weights and computation")] = "float32",
    optimization: Annotated[
        Literal["basic", "extended", "all"], typer.Option(help="level of ONNX Runtime that is checked and recorded")
    ] = "all",
) -> None:
    """Write a model as ONNX graphs, checked against transformers, or as TensorRT plans."""
    from flows.cli.run import guarded

    work = lambda: _export(model, to, out, dtype, optimization)  # noqa: E731
    raise typer.Exit(guarded(work, Path(model), context.obj["debug"], wrong_value=2))


def _export(model: str, to: str, out: Path, dtype: str, optimization: str) -> int:
    """Bring the model's files, then hand over to the engine in a process of its own. Returns its exit code."""
    from flows.folders import cache_folder
    from tasks.providers.models import resolve_model, save_manifest

    name, _, revision = model.partition("@") if not model.startswith("synthetic:") else (model, "", "")
    if Path(model).exists():
        name, revision = model, ""
    cache = cache_folder()
    manifest = save_manifest(resolve_model(name, revision or None, cache, Path.cwd()), cache)
    options = ["--to", to, "--out", str(out), "--dtype", dtype, "--optimization", optimization]
    return subprocess.run([sys.executable, "-m", "engine.export", str(manifest), *options], check=False).returncode
