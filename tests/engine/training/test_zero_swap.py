"""Files that ZeRO swaps to a disk: removed by the rank, and those of a killed one by the next."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.training.zero import swap
from engine.training.zero.swap import SwapFolder
from tests.support.training.zero_runs import Case, context_of

# Swaps until it is killed.
_SWAPPING = """
import sys, time
from engine.training.zero.swap import SwapFolder
from tests.support.training.zero_runs import Case, context_of
swap = SwapFolder(context_of(Case(folder=sys.argv[1]), 1))
(swap.path / "weights").write_bytes(bytes(1000))
print(swap.path, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_files_of_a_killed_rank_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SWAPPING, str(tmp_path)]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    context = context_of(Case(folder=str(tmp_path)), 0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as other:
        try:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            mine = SwapFolder(context)
            assert (theirs / "weights").is_file() and mine.path.is_dir() and mine.path != theirs
            mine.close()
        finally:
            other.kill()
    assert theirs.is_dir()
    next_one = SwapFolder(context)
    assert not theirs.exists() and list(theirs.parent.glob("*rank1*")) == []
    (next_one.path / "weights").write_bytes(b"left by a measurement that failed")
    again = SwapFolder(context)
    assert list(again.path.iterdir()) == []
    again.close()
    next_one.close()
    assert list(theirs.parent.iterdir()) == []


def test_a_lock_that_another_rank_removed_before_it_was_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a machine begin together: a folder without its lock was never removed, were its rank killed."""
    flock, before = fcntl.flock, list[Path]()

    def scanned_first(file: Any, how: int) -> None:
        if how == fcntl.LOCK_EX and not before:
            [lock] = (tmp_path / "swap").glob("*/*.lock")
            before.append(lock)
            swap._remove_if_ended(lock)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", scanned_first)
    folder = SwapFolder(context_of(Case(folder=str(tmp_path)), 0))
    assert before[0].exists()
    SwapFolder(context_of(Case(folder=str(tmp_path)), 1)).close()
    assert folder.path.is_dir()
    folder.close()
    assert list(folder.path.parent.iterdir()) == []


def test_a_file_system_without_locks_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"swap/.*: this file system has no locks .*RANKWISE_CACHE"):
        SwapFolder(context_of(Case(folder=str(tmp_path)), 0))
