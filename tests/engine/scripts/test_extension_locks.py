"""Locks of torch's compiler cache: those of killed compilations are removed, those in use are not."""

import os
from pathlib import Path

from engine.scripts.extension_locks import abandoned, held_by, remove_locks


def lock(folder: Path, name: str, age_seconds: float) -> Path:
    """A lock as torch makes it, so old."""
    place = folder / "torch_extensions" / "py311_cpu" / name
    place.mkdir(parents=True)
    (place / "build.ninja").touch()
    path = place / "lock"
    path.touch()
    modified = path.stat().st_mtime - age_seconds
    os.utime(path, (modified, modified))
    return path


def test_only_old_locks_that_nobody_holds_are_abandoned(tmp_path: Path) -> None:
    old, recent, used = (lock(tmp_path, name, age) for name, age in (("old", 4000), ("recent", 5), ("used", 4000)))
    other = lock(tmp_path, "other", 4000)
    other.write_text("somebody's own file of this name")
    os.utime(other, (1, 1))
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    with used.open():
        found = abandoned(environment)
        assert found == {old}
        assert held_by([os.getpid()]) == {used}
    remove_locks(found | {tmp_path / "gone"})
    assert not old.exists() and recent.exists() and other.exists()
    assert abandoned(environment) == {used}
    assert abandoned({"TORCH_EXTENSIONS_DIR": str(tmp_path / "none"), **environment}) == set()
    assert held_by([2**22 + 1]) == set()
