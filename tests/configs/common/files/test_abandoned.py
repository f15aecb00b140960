"""Half-made folders: only those of a killed process go, and only after a day without a change in them."""

import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.common.files import abandoned
from configs.common.files.abandoned import ABANDONED_SECONDS, remove_abandoned

NAMES = re.compile(r"\.export-\w{8}")


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As if so much time had passed: nobody sets the time of a change (ctime)."""
    now = time.time() + seconds
    monkeypatch.setattr(abandoned, "time", SimpleNamespace(time=lambda: now))


def half_made(parent: Path, name: str) -> Path:
    folder = parent / name / "files"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"half")
    return parent / name


def test_what_a_kill_left_is_removed_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, whole = half_made(tmp_path, ".export-a1b2c3_d"), half_made(tmp_path, "1a2b3c4d")
    other, file = half_made(tmp_path, ".export-longer-name"), tmp_path / ".export-aaaaaaaa"
    file.write_text("no folder")
    link = tmp_path / ".export-bbbbbbbb"
    link.symlink_to(whole)
    later(monkeypatch, ABANDONED_SECONDS - 60)
    remove_abandoned(tmp_path, NAMES)
    assert left.exists()
    later(monkeypatch, ABANDONED_SECONDS + 60)
    remove_abandoned(tmp_path, NAMES)
    assert sorted(tmp_path.iterdir()) == sorted([whole, other, file, link])
    assert (whole / "files" / "weights").read_bytes() == b"half"


def test_a_folder_that_is_filled_still_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model may take more than a day: the folder itself does not change meanwhile."""
    folder, when = half_made(tmp_path, ".export-a1b2c3d4"), time.time()
    real = Path.lstat

    def lstat(self: Path) -> object:
        changed = when if self.name == "weights" else when - 2 * ABANDONED_SECONDS
        return SimpleNamespace(st_ctime=changed, st_mode=real(self).st_mode)

    monkeypatch.setattr(Path, "lstat", lstat)
    remove_abandoned(tmp_path, NAMES)
    assert (folder / "files" / "weights").exists()


def test_others_folders_and_missing_ones_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = half_made(tmp_path, ".export-a1b2c3d4")
    later(monkeypatch, ABANDONED_SECONDS + 60)
    monkeypatch.setattr(abandoned.os, "geteuid", lambda: folder.stat().st_uid + 1)
    remove_abandoned(tmp_path, NAMES)
    assert folder.exists()
    remove_abandoned(tmp_path / "nowhere", NAMES)
    monkeypatch.undo()

    def gone(path: str, ignore_errors: bool) -> None:
        raise FileNotFoundError(path)  # another process removes it

    later(monkeypatch, ABANDONED_SECONDS + 60)
    monkeypatch.setattr(shutil, "rmtree", gone)
    remove_abandoned(tmp_path, NAMES)
