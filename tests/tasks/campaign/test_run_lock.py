"""Who held a run folder before."""

import fcntl
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from configs.plans.paths import RunPaths
from tasks.campaign.run_lock import FolderInUse, is_locked, run_lock


def test_a_flow_run_that_is_tried_again_is_not_the_lost_one_before_it(tmp_path: Path) -> None:
    run, first, other = RunPaths(tmp_path), uuid4(), uuid4()
    for holder, before in ((first, None), (first, None), (other, first), (None, other), (first, None)):
        with run_lock(run, holder) as held_before:
            assert held_before == before, (holder, before)


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
