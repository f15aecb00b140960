"""Compile DeepSpeed's operators once into a node's cache, which can take a minute or more.

    compile_operator(ShareMemCommBuilder(), cache / "torch_extensions")

One process of a host compiles at a time, and a killed compilation is restarted: torch leaves a lock that all later ones
would wait for indefinitely.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def compile_operator(builder: Any, folder: Path) -> None:
    """Compile the operator of a DeepSpeed builder, or load the compiled one. Raises RuntimeError on failure."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{builder.name}.turn"):
        (folder / builder.name / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when its holder ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
