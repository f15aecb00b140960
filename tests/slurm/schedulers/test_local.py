"""Jobs through submitit on this machine: they outlive their submitter, and end when they are told to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.plans.job import Launcher
from configs.records.record import Status
from slurm.launcher.job_files import reserve_end
from slurm.schedulers import local
from slurm.schedulers.adapter import adapter_for
from tests.support.cluster.launches import (
    assert_nothing_left,
    in_measurement,
    leftovers,
    noop_measurement,
    part,
    read_end,
    wait_until,
    write_job,
)
from tests.support.patience import patient

SUBMITTER = """
import sys, time
from pathlib import Path
from slurm.schedulers import local

local.submit(Path(sys.argv[1]))
print("submitted", flush=True)
time.sleep(600)
"""


def start_submitter(folder: Path) -> "subprocess.Popen[str]":
    """Another process that submits the job, in a process group of its own as under a terminal."""
    command = [sys.executable, "-c", SUBMITTER, str(folder)]
    submitter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    assert submitter.stdout is not None
    assert submitter.stdout.readline() == "submitted\n"
    return submitter


def kill(process: "subprocess.Popen[str]") -> str:
    """SIGKILL; returns the rest of the output, which ends only when nobody holds the pipe any more."""
    process.kill()
    return process.communicate(timeout=patient(5))[0]


def test_adapter_is_chosen_by_its_name() -> None:
    assert adapter_for("local").submit is local.submit
    with pytest.raises(ValueError, match=r"target\.adapter.*'local'"):
        adapter_for("lsf")


@pytest.mark.slow
def test_job_outlives_its_submitter_and_is_adopted(tmp_path: Path) -> None:
    measurements = [noop_measurement("slow", seconds=1.5), noop_measurement("quick")]
    paths = write_job(tmp_path, measurements)
    submitter = start_submitter(paths.folder)
    wait_until(in_measurement(paths, measurements[0]), "the rank to begin")
    os.killpg(submitter.pid, signal.SIGINT)  # Ctrl-C at a terminal goes to the whole group
    assert "Traceback" not in kill(submitter)
    assert local.poll(paths.folder) == "running"
    assert len(leftovers(paths.folder)) >= 3
    wait_until(lambda: local.poll(paths.folder) == "ended", "the launch to go on to its end")
    assert read_end(paths).status is Status.COMPLETED
    assert [part(paths, measurement).status for measurement in measurements] == [Status.COMPLETED] * 2
    assert_nothing_left(paths.folder)


@pytest.mark.slow
def test_cancel_from_another_process_leaves_nothing(tmp_path: Path) -> None:
    measurements = [noop_measurement("fine", ranks=2), noop_measurement("hangs", ranks=2, fault="hang")]
    paths = write_job(tmp_path, measurements)
    submitter = start_submitter(paths.folder)
    wait_until(in_measurement(paths, measurements[1]), "the rank to hang")
    kill(submitter)
    began = time.monotonic()
    local.cancel(paths.folder)
    assert time.monotonic() - began < patient(60)
    assert leftovers(paths.folder) == [], "not even submitit's wrappers"
    end = read_end(paths)
    assert (end.status, end.measurement) == (Status.CANCELLED, measurements[1].name)
    assert all(part(paths, measurements[0], rank).status is Status.COMPLETED for rank in (0, 1))
    local.cancel(paths.folder)
    assert read_end(paths) == end, "cancelling again changes nothing"
    assert local.poll(paths.folder) == "ended"


def test_launcher_that_died_is_lost(tmp_path: Path) -> None:
    measurement = noop_measurement("hangs", fault="hang")
    paths = write_job(tmp_path, [measurement])
    local.submit(paths.folder)
    assert local.poll(paths.folder) in ("waiting", "running")
    wait_until(in_measurement(paths, measurement), "the rank to hang")
    assert local.poll(paths.folder) == "running"
    os.kill(Launcher.model_validate_json(paths.launcher.read_bytes()).pid, signal.SIGKILL)
    wait_until(lambda: local.poll(paths.folder) == "ended", "the loss to be noticed", limit_seconds=5)
    end = read_end(paths)
    assert (end.status, end.measurement) == (Status.LOST, measurement.name)
    assert_nothing_left(paths.folder)


@pytest.mark.parametrize(
    "pause_seconds",
    [
        0,
        pytest.param(0.15, marks=pytest.mark.nightly),
        pytest.param(0.3, marks=pytest.mark.slow),
        pytest.param(0.6, marks=pytest.mark.nightly),
    ],
)
def test_cancel_at_any_moment_of_the_start(tmp_path: Path, pause_seconds: float) -> None:
    paths = write_job(tmp_path, [noop_measurement("hangs", fault="hang")])
    local.submit(paths.folder)
    time.sleep(pause_seconds)
    local.cancel(paths.folder)
    assert leftovers(paths.folder) == []
    assert read_end(paths).status is Status.CANCELLED
    assert local.poll(paths.folder) == "ended"


def test_job_that_was_never_submitted_is_lost(tmp_path: Path) -> None:
    paths = write_job(tmp_path, [noop_measurement("a")])
    reserve_end(paths)
    assert local.poll(paths.folder) == "ended"
    assert read_end(paths).status is Status.LOST
    with pytest.raises(FileNotFoundError, match=r"job\.json"):
        local.submit(tmp_path)


def test_a_file_server_whose_clock_is_behind_loses_no_job_that_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files have its times: a launcher that had not come up yet was ended as one that never would."""
    replace = os.replace

    def by_the_server(written: Path, path: Path) -> None:
        replace(written, path)
        os.utime(path, (time.time() - 120, time.time() - 120))

    monkeypatch.setattr(os, "replace", by_the_server)
    monkeypatch.setattr(local.parents, "launch", lambda job, job_json: 1)  # it is on its way
    paths = write_job(tmp_path, [noop_measurement("a")])
    local.submit(paths.folder)
    assert local.poll(paths.folder) == "waiting"


@pytest.mark.parametrize("moved_seconds", [-3600, 3600])
def test_a_clock_that_is_set_changes_nothing_of_a_job_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved_seconds: int
) -> None:
    """Set back, a launcher that had died at its start was waited for by as much; set forward, one was ended at once."""
    monkeypatch.setattr(local.parents, "launch", lambda job, job_json: 1)
    paths = write_job(tmp_path, [noop_measurement("a")])
    local.submit(paths.folder)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + moved_seconds)
    assert local.poll(paths.folder) == "waiting"
    wait_until(lambda: local.poll(paths.folder) == "ended", "the loss to be noticed", limit_seconds=30)
    assert "the launcher never started" in str(read_end(paths).message)


def test_a_job_that_was_submitted_before_the_machine_started_again_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.parents, "launch", lambda job, job_json: 1)
    paths = write_job(tmp_path, [noop_measurement("a")])
    with monkeypatch.context() as former:
        former.setattr(local, "_boot", lambda: "another")
        former.setattr(time, "monotonic", lambda: 1e9)
        local.submit(paths.folder)
    assert local.poll(paths.folder) == "ended"
    assert read_end(paths).status is Status.LOST
