"""Convert pickled checkpoints and sentencepiece tokenizers in a separate process without secrets.

    run_converter(Path("downloaded"), Path("models/mine"))
    add_fast_tokenizer(Path("models/mine"))

The process is `engine.tools.convert` or `engine.tools.sentencepiece_tokenizer`: this one imports no torch and opens no
pickle.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.common.secrets import holds_secret

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model")


def run_converter(source: Path, destination: Path) -> list[str]:
    """Convert a folder of pickled weights. Returns the files written; raises ValueError with the converter's reason."""
    return _run("engine.tools.convert", [str(source), str(destination)])


def is_convertible(folder: Path) -> bool:
    """Return whether a folder has a sentencepiece model and no tokenizer.json."""
    return not (folder / TOKENIZER).is_file() and any((folder / name).is_file() for name in SENTENCEPIECE)


def add_fast_tokenizer(folder: Path) -> list[str]:
    """Add a tokenizer.json where there is a sentencepiece model only. Raises ValueError with the reason."""
    if not is_convertible(folder):
        return []
    return _run("engine.tools.sentencepiece_tokenizer", [str(folder)])


def _run(module: str, arguments: Sequence[str]) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not holds_secret(name, value)}
    done = subprocess.run(
        # -P: a folder of the working directory named like a package must not be imported.
        [sys.executable, "-P", "-m", module, *arguments],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ValueError(said[-1] if said else f"{module}: failed with exit code {done.returncode}")
    return done.stdout.splitlines()
