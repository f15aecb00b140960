"""A scheduler that is away ends no run, and keeps no others from ending their jobs."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.plans.job import Job
from configs.plans.paths import RunPaths
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget, SshTarget
from slurm.schedulers.refusals import Unavailable
from tasks import wait
from tasks.campaign.launches import active_jobs
from tasks.campaign.launches.active_jobs import ActiveJobs, Flown
from tasks.campaign.progress import ProgressRow
from tests.support.cluster.launches import noop_measurement


def test_a_scheduler_that_is_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def cancel(folder: Path) -> None:
        asked.append(folder)
        raise Unavailable("Slurm does not respond; jobs not cancelled: 12")

    adapter = SimpleNamespace(poll=lambda folder: "running", cancel=cancel, note=lambda folder: "job 12")
    monkeypatch.setattr(wait, "adapter_for", lambda name: adapter)
    job = Job(
        name="0001-timed-x", study="s", measuring_pass="timed", measuring=Measuring(), target=SlurmTarget(nodes=2),
        measurements=(noop_measurement("a"),), ranks_per_node=1, timeout_seconds=100, inputs="", cache="",
    )  # fmt: skip
    flown = Flown(job, ProgressRow("", 1, 1, 1), 1, running_since=time.monotonic() - 1000)
    session = cast(Any, SimpleNamespace(run=RunPaths(tmp_path)))
    assert [wait._look(session, job.name, flown) for _ in range(2)] == ["running"] * 2
    assert len(asked) == 2


def test_a_suspended_job_is_not_overdue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for which Slurm stops it counts towards no limit, and costs nothing."""
    now, state = [1000.0], ["running"]
    monkeypatch.setattr(wait, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(active_jobs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    adapter = SimpleNamespace(
        poll=lambda folder: state[0], cancel=lambda folder: pytest.fail(str(folder)), note=lambda folder: "job 12"
    )
    monkeypatch.setattr(wait, "adapter_for", lambda name: adapter)
    job = Job(
        name="0001-timed-x", study="s", measuring_pass="timed", measuring=Measuring(), target=SlurmTarget(),
        measurements=(noop_measurement("a"),), ranks_per_node=1, timeout_seconds=100, inputs="", cache="",
    )  # fmt: skip
    flown = Flown(job, ProgressRow("", 1, 1, 1), 1)
    session = cast(Any, SimpleNamespace(run=RunPaths(tmp_path)))
    shown = []
    for told, seconds in (("running", 0), ("running", 60), *[("suspended", 300)] * 20, ("running", 30)):
        state[0], now[0] = told, now[0] + seconds
        wait._look(session, job.name, flown)
        shown.append(flown.row.state)
    assert flown.node_seconds == 90 and shown.count("suspended") == 20


def test_a_scheduler_that_is_away_keeps_the_others_jobs_from_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def cancel_many(folders: list[Path]) -> None:
        ended.extend(folder.name for folder in folders)
        if folders[0].name == "away":
            raise Unavailable("Slurm does not respond")

    monkeypatch.setattr(active_jobs, "adapter_for", lambda name: SimpleNamespace(cancel_many=cancel_many))
    flight = ActiveJobs()
    for name, target in (("away", SlurmTarget(nodes=2)), ("there", SshTarget.model_validate({"hosts": ["a"]}))):
        job = Job(
            name=name, study="s", measuring_pass="timed", measuring=Measuring(), target=target,
            measurements=(noop_measurement("a"),), ranks_per_node=1, timeout_seconds=100, inputs="", cache="",
        )  # fmt: skip
        flight.add([(job, ProgressRow("", 1, 1, 1))])
    with pytest.raises(Unavailable, match="does not respond"):
        flight.cancel(["away", "there"], cast(Any, SimpleNamespace(run=RunPaths(tmp_path))))
    assert ended == ["away", "there"]
