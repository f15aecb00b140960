"""Which files were on disk, and with how many bytes, when they got their names.

with names_of_flushed() as flushed: ...
assert folder / "model.safetensors" in flushed
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def names_of_flushed() -> Iterator[set[Path]]:
    """The names that files got after all of their bytes had been flushed; of a folder those of the files in it."""
    sizes: dict[int, int] = {}
    named: set[Path] = set()

    def is_flushed(path: Path) -> bool:
        state = path.stat()
        return sizes.get(state.st_ino) == state.st_size

    def fsync(descriptor: int) -> None:
        state = os.fstat(descriptor)
        sizes[state.st_ino] = state.st_size

    def names(rename: object) -> object:
        def noted(source: object, target: object, **options: object) -> None:
            before = Path(str(source))
            files = [path for path in before.rglob("*") if path.is_file()] if before.is_dir() else [before]
            named.update(Path(str(target)) / path.relative_to(before) for path in files if is_flushed(path))
            rename(source, target, **options)  # type: ignore[operator]

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for name in ("replace", "rename"):
            patch.setattr(os, name, names(getattr(os, name)))
        yield named
