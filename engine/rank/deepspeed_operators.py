"""Compile DeepSpeed's operators once into a node's cache, which can take a minute or more.

    compile_operator(ShareMemCommBuilder(), cache / "torch_extensions", context.job_cores)

One process of a host compiles at a time, and a killed compilation is restarted: torch leaves a lock that all later ones
would wait for indefinitely. The compilers have all cores of the job: the other ranks wait for them.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.common.system.lock_files import locks_needed


def compile_operator(builder: Any, folder: Path, cores: Sequence[int] = ()) -> None:
    """Compile the operator of a DeepSpeed builder, or load the compiled one. Raises RuntimeError on failure.

    cores: those that the compilers may use; none: those of this rank. Raises ValueError where the folder's file system
    has no locks.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f"{builder.name}.turn"), _on_cores(cores):
        (folder / builder.name / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when its holder ends."""
    with path.open("w") as file:
        with locks_needed(path.parent, "have the cache on another one (RANKWISE_CACHE; of a cluster its `shared`)"):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Let this thread, and the programs that it starts, run on these cores; then on its own again."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
