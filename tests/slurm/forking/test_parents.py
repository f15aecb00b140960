"""Processes from which launches are forked: whom they serve, what a launch gets of them, and that nothing is left."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.common.system.proc import parent_of
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.records.record import Status
from slurm.forking import fork_parent, parents
from slurm.launcher.job_files import read_launcher
from slurm.schedulers import local
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

SUBMITTER = """
import sys, time
from pathlib import Path
from slurm.schedulers import local

folder = Path(sys.argv[1])
local.submit(folder)
while local.poll(folder) != "ended":
    local.await_end(folder, 0.2)
print("ended", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def short_lived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which parents have their own; each test ends them, and none of it may be left."""
    folder = tmp_path / ("long_" * 25)  # longer than the address of a socket
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    parents.end_parents()
    wait_until(lambda: not list(folder.iterdir()), "the folders of the parents to go")
    wait_until(lambda: not _processes_in(folder), "the parents to go")


def _processes_in(folder: Path) -> list[str]:
    named = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in argument for argument in process.info["cmdline"] or ()):
            named.append(" ".join(process.info["cmdline"]))
    return named


def submit(run: Path, name: str, *measurements: Measurement) -> JobPaths:
    paths = write_job(run, measurements, name=name)
    local.submit(paths.folder)
    return paths


def parent_pid(paths: JobPaths) -> int:
    """From which process the launcher of a job that goes on was forked."""
    wait_until(lambda: read_launcher(paths) is not None, "the launcher to say who it is")
    launcher = read_launcher(paths)
    assert launcher is not None
    return parent_of(launcher.pid)


def await_end(paths: JobPaths) -> Status:
    wait_until(lambda: local.poll(paths.folder) == "ended", "the launch to end")
    return read_end(paths).status


def repeat(measurement: Measurement, number: int) -> Measurement:
    return measurement.model_copy(update={"repeat": number})


@pytest.mark.slow
def test_launches_of_a_block_share_a_parent_and_repeats_do_not(tmp_path: Path) -> None:
    cell = noop_measurement("cell", seconds=0.5)
    other = noop_measurement("other", ranks=2, seconds=0.5)
    seen = []
    for name, measurement in (("a", cell), ("b", other), ("c", repeat(cell, 1))):
        paths = submit(tmp_path, name, measurement)
        seen.append(parent_pid(paths))
        assert await_end(paths) is Status.COMPLETED
        assert part(paths, measurement).status is Status.COMPLETED
        assert "imports for itself" not in paths.launcher_log.read_text()
    assert seen[0] == seen[1], "of one block"
    assert seen[2] != seen[0], "another repeat of a cell has imports and an address space of its own"
    assert not psutil.pid_exists(seen[0]), "the parent of a block that is over is ended"


def test_a_parent_that_was_prepared_serves_the_first_launch(tmp_path: Path) -> None:
    measurement = noop_measurement("cell", seconds=0.5)
    ahead = write_job(tmp_path, [measurement], name="ahead")
    parents.start_parent(Job.model_validate_json(ahead.job.read_bytes()), ahead.job)
    shutil.rmtree(ahead.folder)
    prepared = [process.pid for process in psutil.process_iter() if _is_parent(process)]
    paths = submit(tmp_path, "a", measurement)
    assert parent_pid(paths) in prepared
    assert await_end(paths) is Status.COMPLETED


def _is_parent(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "slurm.forking.fork_parent" in process.cmdline() and str(tempfile.tempdir) in " ".join(process.cmdline())
    return False


@pytest.mark.slow
def test_a_launch_gets_its_own_environment_and_threads(tmp_path: Path) -> None:
    plain, env = noop_measurement("plain", seconds=0.5), {"OMP_NUM_THREADS": "2", "TORCH_TEST_NOTE": "mine"}
    special = noop_measurement("special", seconds=0.5, env=env)
    first, second, third = (
        submit_and_end(tmp_path, name, measurement)
        for name, measurement in (("a", plain), ("b", special), ("c", plain))
    )
    assert first[0] != second[0], "libraries have read their variables when they were imported"
    assert first[0] == third[0]
    variables = [
        part(paths, measurement).environment["variables"]
        for (_, paths), measurement in zip((first, second, third), (plain, special, plain), strict=True)
    ]
    assert [found["OMP_NUM_THREADS"] for found in variables] == ["1", "2", "1"]
    assert [found.get("TORCH_TEST_NOTE") for found in variables] == [None, "mine", None]
    assert part(second[1], special).figures["threads"] == 2


def submit_and_end(run: Path, name: str, measurement: Measurement) -> tuple[int, JobPaths]:
    paths = submit(run, name, measurement)
    pid = parent_pid(paths)
    assert await_end(paths) is Status.COMPLETED
    return pid, paths


@pytest.mark.nightly
def test_ranks_import_for_themselves_where_openmp_binds_threads(tmp_path: Path) -> None:
    measurement = noop_measurement("bound", ranks=2, env={"OMP_PROC_BIND": "true"})
    paths = submit(tmp_path, "a", measurement)
    assert await_end(paths) is Status.COMPLETED
    assert "each rank imports for itself: OpenMP is told to bind threads" in paths.launcher_log.read_text()
    assert part(paths, measurement, 1).status is Status.COMPLETED


@pytest.mark.slow
def test_a_launch_outlives_its_parent_and_the_next_gets_another(tmp_path: Path) -> None:
    measurements = [noop_measurement("slow", ranks=2, seconds=1.0), noop_measurement("quick", ranks=2)]
    paths = submit(tmp_path, "a", *measurements)
    wait_until(in_measurement(paths, measurements[0]), "the rank to begin")
    first = parent_pid(paths)
    os.kill(first, signal.SIGKILL)
    assert await_end(paths) is Status.COMPLETED
    assert [part(paths, measurement, 1).status for measurement in measurements] == [Status.COMPLETED] * 2
    again = submit(tmp_path, "b", noop_measurement("after", seconds=0.5))
    assert parent_pid(again) != first
    assert await_end(again) is Status.COMPLETED
    assert_nothing_left(paths.folder)


@pytest.mark.nightly
def test_a_parent_given_up_for_its_silence_launches_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parents, "_ANSWER_SECONDS", 20.0)
    first = submit(tmp_path, "a", noop_measurement("first", seconds=0.5))
    silent = parent_pid(first)
    assert await_end(first) is Status.COMPLETED
    (served,) = parents._parents.values()
    served._connection.settimeout(0.5)
    os.kill(silent, signal.SIGSTOP)
    try:
        again = submit(tmp_path, "b", noop_measurement("second", seconds=0.5))
        assert parent_pid(again) != silent
        assert await_end(again) is Status.COMPLETED
        launcher = read_launcher(again)
    finally:
        os.kill(silent, signal.SIGCONT)  # it now finds the request that nobody waits for
    wait_until(lambda: not psutil.pid_exists(silent), "the silent parent to end")
    wait_until(lambda: not leftovers(again.folder), "whatever it launched to end")
    assert read_launcher(again) == launcher
    assert_nothing_left(again.folder)


def test_a_parent_that_is_silent_is_told_with_the_time(tmp_path: Path) -> None:
    silent, theirs = socket.socketpair()
    silent.settimeout(0.05)
    parent = object.__new__(parents.ForkParent)
    parent._folder, parent._connection = tmp_path, silent
    with silent, theirs, pytest.raises(parents.ParentLost, match=r"did not answer within 0\.05 s: it wrote nothing"):
        parent._ask({"preload": None})


def test_requests_that_arrive_together_are_read_one_by_one() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        ours.sendall(b'{"start": 1}\n{"launch": "a"}\n{"start"')
        assert fork_parent._read(theirs) == {"start": 1}
        assert fork_parent._read(theirs) == {"launch": "a"}
        ours.sendall(b": 2}\n")
        assert fork_parent._read(theirs) == {"start": 2}
        ours.close()
        assert fork_parent._read(theirs) == {}


def test_nothing_outlives_a_killed_launcher_that_was_forked(tmp_path: Path) -> None:
    measurement = noop_measurement("hangs", ranks=2, fault="hang")
    paths = submit(tmp_path, "a", measurement)
    for rank in (0, 1):
        wait_until(in_measurement(paths, measurement, rank), "the ranks to be in their measurement")
    launcher = read_launcher(paths)
    assert launcher is not None
    assert os.getsid(launcher.pid) == launcher.pid, "a terminal's Ctrl-C does not reach it"
    named = leftovers(paths.folder)
    assert len(named) == 4, "launcher, torchrun, two ranks, each under its own name"
    assert sum("-m engine.worker" in line and "engine.agents.torchrun_agent" not in line for line in named) == 2
    os.kill(launcher.pid, signal.SIGKILL)
    assert_nothing_left(paths.folder)
    assert local.poll(paths.folder) == "ended"
    assert read_end(paths).status is Status.LOST


@pytest.mark.slow
def test_ranks_end_with_torchruns_agent(tmp_path: Path) -> None:
    measurement = noop_measurement("hangs", ranks=2, fault="hang")
    paths = submit(tmp_path, "a", measurement)
    wait_until(in_measurement(paths, measurement, 1), "the ranks to be in their measurement")
    agent = next(line for line in leftovers(paths.folder) if "-m engine.agents.torchrun_agent" in line)
    os.kill(int(agent.partition(":")[0]), signal.SIGKILL)
    assert await_end(paths) is Status.FAILED
    assert_nothing_left(paths.folder)


@pytest.mark.nightly
def test_two_runs_side_by_side_and_their_parents_end_with_them(tmp_path: Path, short_lived: Path) -> None:
    jobs = [write_job(tmp_path / run, [noop_measurement("cell", ranks=2, seconds=0.2)]) for run in ("one", "two")]
    environment = os.environ | {"TMPDIR": str(short_lived)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SUBMITTER, str(paths.folder), "600"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for paths in jobs
    ]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "ended\n"
    assert [read_end(paths).status for paths in jobs] == [Status.COMPLETED] * 2
    assert len(list(short_lived.iterdir())) == 2, "each has its own parent"
    for run in runs:
        run.kill()
        run.communicate()
    wait_until(lambda: not list(short_lived.iterdir()), "the parents to notice that nobody is left", limit_seconds=60)


def test_a_parent_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(parents, "START_LIMIT_SECONDS", 5.0)
    paths = write_job(tmp_path, [noop_measurement("a")])
    with pytest.raises(OSError, match="fork_parent"):
        parents.launch(Job.model_validate_json(paths.job.read_bytes()), paths.job)


def test_a_second_interruption_ends_the_process_without_a_traceback() -> None:
    """Ctrl-C while it waits for its parents, which end with it: "Exception ignored in atexit callback" was printed."""
    program = """
import os, signal
from slurm.forking import parents

class Impatient:
    def done(self):
        os.kill(os.getpid(), signal.SIGINT)
        return False

parents._ending.append(Impatient())
print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
