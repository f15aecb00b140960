"""Who held a run folder before."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from configs.common.system.proc import start_ticks
from configs.plans.paths import RunPaths
from slurm.staging.packages import run_digest
from tasks.campaign.run_lock import FolderInUse, held_since, is_locked, run_lock


def test_a_flow_run_that_is_tried_again_is_not_the_lost_one_before_it(tmp_path: Path) -> None:
    run, first, other = RunPaths(tmp_path), uuid4(), uuid4()
    for holder, before in ((first, None), (first, None), (other, first), (None, other), (None, other), (first, other)):
        with run_lock(run, holder) as held_before:
            assert held_before == before, (holder, before)


def test_a_run_whose_process_lives_is_not_lost_because_its_folder_was_copied(tmp_path: Path) -> None:
    """The run of the copy marked it as crashed, and an automation told people that the study had failed."""
    run, copy, holder = RunPaths(tmp_path / "s"), RunPaths(tmp_path / "copy"), uuid4()
    with run_lock(run, holder):
        pass
    with subprocess.Popen(["sleep", "100"]) as other:
        lives = {"pid": other.pid, "pid_started": start_ticks(other.pid)}
        run.lock.write_text(json.dumps(json.loads(run.lock.read_text()) | lives))
        shutil.copytree(run.folder, copy.folder)
        with run_lock(copy, uuid4()) as before:
            assert before is None
        other.kill()
    with run_lock(run, uuid4()) as before:
        assert before == holder


def test_who_only_looks_keeps_no_run_from_its_folder(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    with run_lock(run):
        assert is_locked(run)
        with pytest.raises(FolderInUse, match="run folder is in use"), run_lock(run):
            pass
    looking = run.lock.open()
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.03, looking.close)
    timer.start()
    with run_lock(run):
        assert is_locked(run)
    timer.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_with_what_to_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended with `Function not implemented`, without a word on what or where, and so did `rankwise logs`."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    run = RunPaths(tmp_path)
    with pytest.raises(ValueError, match=r"this file system has no locks .*use a folder of another one"), run_lock(run):
        pass
    assert not is_locked(run)
    assert held_since(run) is None


def test_run_folders_of_two_containers_with_equal_paths_are_told_apart(tmp_path: Path) -> None:
    """On a cluster that both submit to, each cleared the job folders of the other."""
    run, digests = RunPaths(tmp_path / "s"), []
    for _ in ("one container", "another"):
        with run_lock(run):
            digests.append(run_digest(run.folder))
        with run_lock(run):  # that goes on
            assert run_digest(run.folder) == digests[-1]
        run.folder.rename(tmp_path / str(len(digests)))
    assert digests[0] != digests[1]
    older = RunPaths(tmp_path / "older")
    older.folder.mkdir()
    older.lock.touch()
    before = run_digest(older.folder)
    with run_lock(older):
        assert run_digest(older.folder) == before  # its jobs are looked for where they are
