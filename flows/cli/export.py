"""`rankwise export`: export a model as ONNX graphs or TensorRT plans.

    rankwise export ./models/my-model --to onnx --out exported
    rankwise export sentence-transformers/all-MiniLM-L6-v2@COMMIT --to onnx --out exported --dtype float16

The graphs are validated: they must be well formed, and ONNX Runtime's output for some tokens must match that of
transformers; the largest difference is printed. Exit codes: 0 written, 2 refused (a package is missing, or the model
or an argument is not supported).
"""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

_ENDING_SECONDS = 10.0
_EXPORTER = """
import signal, sys
taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if taken:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from engine.tools.export import main
if taken:
    signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    code = main(sys.argv[1:])
except KeyboardInterrupt:
    code = 1
sys.exit(code)
"""
"""Like `python -m engine.tools.export`, but an interruption is no traceback: the command says that it was one."""


def export(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="folder, owner/name@revision, or synthetic:ARCHITECTURE@SEED")
    ],
    to: Annotated[Literal["onnx", "tensorrt"], typer.Option(help="output format")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="new or empty folder")],
    dtype: Annotated[Literal["float32", "float16"], typer.Option(help="of weights and computation")] = "float32",
    optimization: Annotated[
        Literal["basic", "extended", "all"],
        typer.Option(help="ONNX Runtime's optimization level, checked and recorded"),
    ] = "all",
) -> None:
    """Export a model as ONNX graphs, validated against transformers, or as TensorRT plans."""
    from flows.cli.errors import guarded

    work = lambda: _export(model, to, out, dtype, optimization)  # noqa: E731
    raise typer.Exit(guarded(work, Path(model), context.obj["debug"], wrong_value=2))


def _export(model: str, to: str, out: Path, dtype: str, optimization: str) -> int:
    """Fetch the model's files, then run the engine's exporter in a separate process. Returns its exit code."""
    from flows.folders import cache_folder
    from tasks.models.model_cache import save_manifest
    from tasks.models.sources import resolve_model

    name, _, revision = model.partition("@") if not model.startswith("synthetic:") else (model, "", "")
    if Path(model).exists():
        name, revision = model, ""
    cache = cache_folder()
    manifest = save_manifest(resolve_model(name, revision or None, cache, Path.cwd()), cache)
    options = ["--to", to, "--out", str(out), "--dtype", dtype, "--optimization", optimization]
    return _exported([str(manifest), *options])


def _exported(arguments: list[str]) -> int:
    """Run the exporter; return its exit code. Raises OSError where a signal ended it, as where memory ran out."""
    with subprocess.Popen([sys.executable, "-P", "-c", _EXPORTER, *arguments]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # of the terminal: the exporter has it too, and removes its scratch folder
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_SECONDS)
            process.kill()
            raise
    if code < 0:
        name = signal.Signals(-code).name
        memory = ": memory ran out, unless somebody ended it" if name == "SIGKILL" else ""
        raise OSError(f"the exporter was ended by {name}{memory}")
    return code
