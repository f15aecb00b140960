"""A service's job is ended also where squeue fails to show it."""

from pathlib import Path

import pytest

from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.service import end_service
from tests.support.cluster.slurm_programs import stand_in_cluster


def test_a_job_that_squeue_does_not_show_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert end_service("rw-1", SlurmTarget())
    [call] = cluster.calls("scancel")
    assert "--name=rw-1" in call
