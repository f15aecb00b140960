"""DeepSpeed's operators, compiled once into the cache of a node; which can take a minute or more.

    compile_operator(ShareMemCommBuilder(), cache / "torch_extensions")

One process of a host compiles at a time, and a compilation that was killed is begun anew: torch leaves a lock then
that all later ones wait for without end.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def compile_operator(builder: Any, folder: Path) -> None:
    """Compile what a builder of DeepSpeed's builds, or find it compiled. Raises RuntimeError where that fails."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{builder.name}.turn"):
        (folder / builder.name / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file's lock, which ends with its holder, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
