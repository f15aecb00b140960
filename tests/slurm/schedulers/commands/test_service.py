"""The job of a service as squeue shows it, and its end also where squeue fails to show it."""

import os
from pathlib import Path

import pytest

from configs.targets.target import SlurmTarget
from slurm.schedulers.commands import service
from slurm.schedulers.commands.service import ServiceJob, end_service, service_job
from tests.support.cluster.slurm_programs import stand_in_cluster


def test_a_job_that_squeue_does_not_show_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert end_service("rw-1", SlurmTarget())
    [call] = cluster.calls("scancel")
    assert "--name=rw-1" in call


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_LOOK_SECONDS", 0.0)


ONCE_SILENT = """#!/bin/sh
echo "$@" >> {folder}/squeue.calls
[ $(wc -l < {folder}/squeue.calls) -eq 1 ] || echo 'RUNNING|n1|None'
"""


def test_a_job_that_one_look_does_not_show_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stand_in_cluster(tmp_path)
    (tmp_path / "squeue").write_text(ONCE_SILENT.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert service_job("rw-1", SlurmTarget()) == ServiceJob(state="RUNNING", node="n1")
    assert len(cluster.calls("squeue")) == 2


def test_jobs_are_looked_for_by_the_users_number_whatever_name_the_environment_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a change of users that keeps the variables: Slurm goes by the number."""
    cluster = stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "somebody")
    assert end_service("rw-1", SlurmTarget())
    for program in ("squeue", "scancel"):
        assert f"--user={os.getuid()}" in cluster.calls(program)[0].split()


HIDDEN = """#!/bin/sh
case " $* " in *" --all "*) {shown} ;; esac
"""


def test_a_job_in_a_hidden_partition_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue shows jobs of a partition with Hidden=YES by their ids, and else only where it is asked for all."""
    stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "squeue").write_text(HIDDEN.format(shown="echo 'RUNNING|n1|None'"))
    assert service_job("rw-1", SlurmTarget()) == ServiceJob(state="RUNNING", node="n1")


@pytest.mark.parametrize("state", ["PREEMPTED", "REVOKED", "TIMEOUT"])
def test_a_job_that_ended_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    cluster = stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cluster.says("squeue", f"{state}||None\n")
    assert service_job("rw-1", SlurmTarget()) is None


def test_the_line_that_names_a_cluster_is_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = stand_in_cluster(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cluster.says("squeue", "CLUSTER: a\n")
    assert service_job("rw-1", SlurmTarget(cluster="a")) is None
    cluster.says("squeue", "CLUSTER: a\nRUNNING|n1|None\n")
    assert service_job("rw-1", SlurmTarget(cluster="a")) == ServiceJob(state="RUNNING", node="n1")
