"""An operator is compiled by one process at a time, on all cores of the job, whatever a killed compilation left."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.rank.deepspeed_operators import compile_operator


class Builder:
    """A builder whose compiler is a program that says its cores. `lock`: what torch would wait for without an end."""

    name = "shared_memory"

    def __init__(self, folder: Path) -> None:
        self.lock = folder / self.name / "lock"
        self.lock.parent.mkdir(parents=True)
        self.lock.touch()
        self.compiled_on: set[int] = set()
        self.fails = False

    def load(self, verbose: bool) -> None:
        assert not verbose and not self.lock.exists()
        program = "import os; print(*os.sched_getaffinity(0))"
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.compiled_on = {int(core) for core in said.stdout.split()}
        if self.fails:
            raise RuntimeError("no header")


@pytest.fixture
def cores() -> list[int]:
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        pytest.skip("one core")
    return found


def test_compilers_have_all_cores_of_the_job_and_the_rank_its_own_again(tmp_path: Path, cores: list[int]) -> None:
    builder = Builder(tmp_path)
    os.sched_setaffinity(0, cores[:1])
    try:
        compile_operator(builder, tmp_path, cores)
        assert (builder.compiled_on, os.sched_getaffinity(0)) == (set(cores), {cores[0]})
        compile_operator(builder, tmp_path)
        assert builder.compiled_on == {cores[0]}
    finally:
        os.sched_setaffinity(0, cores)


def test_the_cores_are_its_own_again_after_a_failure(tmp_path: Path, cores: list[int]) -> None:
    builder = Builder(tmp_path)
    builder.fails = True
    os.sched_setaffinity(0, cores[:1])
    try:
        with pytest.raises(RuntimeError, match="no header"):
            compile_operator(builder, tmp_path, cores)
        assert os.sched_getaffinity(0) == {cores[0]}
    finally:
        os.sched_setaffinity(0, cores)


def test_a_file_system_without_locks_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"this file system has no locks .*RANKWISE_CACHE"):
        compile_operator(Builder(tmp_path), tmp_path)
