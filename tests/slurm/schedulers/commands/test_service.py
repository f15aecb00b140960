"""The job of a service as squeue shows it, and its end also where squeue fails to show it."""

from pathlib import Path

import pytest

from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.service import ServiceJob, end_service, service_job
from tests.support.cluster.slurm_programs import stand_in_cluster


def test_a_job_that_squeue_does_not_show_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert end_service("rw-1", SlurmTarget())
    [call] = cluster.calls("scancel")
    assert "--name=rw-1" in call


def test_the_line_that_names_a_cluster_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cluster.says("squeue", "CLUSTER: a\n")
    assert service_job("rw-1", SlurmTarget(cluster="a")) is None
    cluster.says("squeue", "CLUSTER: a\nRUNNING|n1|None\n")
    assert service_job("rw-1", SlurmTarget(cluster="a")) == ServiceJob(state="RUNNING", node="n1")
