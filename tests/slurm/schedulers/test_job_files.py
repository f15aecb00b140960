"""What is read of a job's folder on a file system that other nodes write to."""

import errno
from pathlib import Path

import pytest

from configs.plans.paths import JobPaths
from slurm.launcher import job_files as launcher_files
from slurm.schedulers import job_files


def test_a_file_that_another_node_replaces_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    paths = JobPaths(tmp_path)
    for module in (job_files, launcher_files):
        monkeypatch.setattr(module, "read_model", stale)
    assert job_files.node_end(paths, 0) is None and job_files.node_launcher(paths, 0) is None
    assert launcher_files.read_launcher(paths) is None and launcher_files.read_progress(paths, 0) is None


def test_jobs_of_a_long_queue_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 1,024 jobs in flight each was parsed again at every look, twice a second."""
    read: list[Path] = []
    monkeypatch.setattr(job_files, "read_model", lambda path, *_: read.append(path) or path)
    for _ in range(3):
        for number in range(2000):
            job_files.job_in(tmp_path / str(number))
    assert len(read) == 2000
