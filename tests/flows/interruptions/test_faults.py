"""Faults, provoked for real: nothing is lost, nothing is left, and what happened is said."""

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.server.local import ApiLease, lease_server
from tests.support.run_folders.studies import (
    job_count,
    processes_of,
    rankwise,
    running_of,
    start,
    status,
    under_measurement,
    wait_until,
    write_study,
)

pytestmark = pytest.mark.slow

END_SECONDS = 60.0
"""For all processes of a run that was ended, on a busy machine; what they measure would take much longer."""


@pytest.fixture(scope="module", autouse=True)
def api() -> Iterator[ApiLease]:
    """One local server for all runs of this file."""
    with lease_server() as lease:
        lease.wait_until_healthy()
        yield lease


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study on two ranks whose cells fail in every way, among cells that do not."""
    folder = tmp_path_factory.mktemp("troubled")
    variants = {fault: {"label": fault, "fault": fault} for fault in ("raise", "kill", "hang", "out_of_memory")}
    experiments = {
        "faults": {
            "kind": "optimization",
            "baseline": {"label": "sound", "dp": 2, "items": 2, "fault_rank": 1, "fault_attempts": 1},
            "variants": variants | {"also_sound": {"label": "also"}},
        }
    }
    study = write_study(folder, experiments=experiments, measuring={"cell_timeout_seconds": 4})
    done = rankwise("run", study, cwd=folder)
    (folder / "out.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 3, done.stdout + done.stderr
    return folder


def test_a_cell_that_kills_its_group_does_not_take_the_others_along(troubled: Path) -> None:
    found = {row["status"] for row in status(troubled / "runs" / "s")}
    assert found == {"completed", "failed", "timeout", "out_of_memory"}
    assert [row["status"] for row in status(troubled / "runs" / "s")].count("completed") == 2
    assert not processes_of(troubled)


def test_failures_are_told_with_cause_and_log(troubled: Path) -> None:
    rows = {row["failure"]: row for row in status(troubled / "runs" / "s") if row["failure"]}
    messages = " ".join(rows)
    assert "SIGKILL" in messages and "time-out of the cell after 4 s" in messages and len(rows) == 4
    report = (troubled / "runs" / "s" / "report.md").read_text()
    assert all(message.split(":")[0][:20] in report for message in rows)
    assert "rank_1.log" in report
    assert "Traceback" not in (troubled / "out.txt").read_text()


@pytest.mark.slow
def test_only_failed_measures_what_failed(troubled: Path, tmp_path: Path) -> None:
    shutil.copytree(troubled, tmp_path / "copy")
    again = rankwise("run", "s.yaml", "--only-failed", cwd=tmp_path / "copy")
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted(row["attempts"] for row in status(tmp_path / "copy" / "runs" / "s")) == [1, 1, 2, 2, 2, 2]


@pytest.mark.slow
def test_a_run_killed_is_taken_up_and_its_launch_adopted(tmp_path: Path) -> None:
    experiments = {"grid": {"kind": "sweep", "over": {"seconds": [3.0]}}}
    study = write_study(tmp_path, experiments=experiments, measuring={"repeats": 2})
    run = tmp_path / "runs" / "s"
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement")
    first.kill()
    first.wait()
    # On a slow machine the launch would have ended before the second run looks: it stands still until then.
    launch = running_of(tmp_path)
    output = tmp_path / "out.log"
    told = output.read_text().count("starting")
    try:
        for process in launch:
            process.suspend()
        second = start("run", study, cwd=tmp_path)
        # The first line of progress is the adopted launch's.
        wait_until(lambda: output.read_text().count("starting") > told, 120, "the look at what was left")
    finally:
        for process in launch:
            process.resume()
    assert second.wait(timeout=600) == 0, output.read_text()
    assert "adopted 0001-timed" in output.read_text()
    assert [(row["status"], row["attempts"]) for row in status(run)] == [("completed", 1)] * 2
    assert job_count(run) == 2
    assert not processes_of(tmp_path)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM")],
)
def test_an_interrupted_run_ends_its_launches_and_keeps_its_records(tmp_path: Path, number: signal.Signals) -> None:
    experiments = {"grid": {"kind": "sweep", "over": {"seconds": [0.01, 300.0, 310.0]}}}
    study = write_study(tmp_path, experiments=experiments, pack=False)
    run = tmp_path / "runs" / "s"
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run) and _inside_long_measurement(run), what="a long measurement")
    os.killpg(first.pid, number)
    assert first.wait(timeout=END_SECONDS) != 0
    wait_until(lambda: not processes_of(tmp_path), what="the end of all processes", seconds=END_SECONDS)
    rows = status(run)
    assert {row["status"] for row in rows} <= {"completed", "cancelled", "waiting"}
    assert any(row["status"] == "cancelled" for row in rows)


def _inside_long_measurement(run: Path) -> bool:
    for path in run.glob("jobs/*/progress_0.json"):
        text = path.read_bytes()
        if b'"phase":"measurement"' in text and b'"seconds":3' in (path.parent / "job.json").read_bytes():
            return True
    return False


def test_a_run_cancelled_through_the_api_ends(tmp_path: Path, api: ApiLease) -> None:
    study = write_study(tmp_path, name="cancelled-by-api", workload={"kind": "noop", "seconds": 600.0})
    run = tmp_path / "runs" / "cancelled-by-api"
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement")
    state = _cancel_through_api(api, "cancelled-by-api")
    assert first.wait(timeout=END_SECONDS) == 1
    wait_until(lambda: not processes_of(tmp_path), what="the end of all processes", seconds=END_SECONDS)
    assert "cancelled" in (tmp_path / "out.log").read_text()
    assert state() == "CANCELLED"
    assert status(run)[0]["status"] in ("cancelled", "waiting")


def _ask(api: ApiLease, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{api.url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def _cancel_through_api(api: ApiLease, name: str) -> Callable[[], str]:
    """Ask for cancellation as the UI does; returns a function that reads the flow run's state."""
    (found,) = _ask(api, "/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
    place = f"/flow_runs/{found['id']}"
    _ask(api, f"{place}/set_state", {"state": {"type": "CANCELLING"}, "force": False})
    return lambda: str(_ask(api, place)["state"]["type"])


def mounted_tmpfs(folder: Path, size: str) -> bool:
    """Mount a small file system; False where this user may not."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted, which needs root")
def test_a_full_disk_is_named_and_nothing_that_was_measured_is_lost(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not mounted_tmpfs(disk, "80m"):
        pytest.skip("this root may not mount")
    try:
        study = write_study(tmp_path, workload={"kind": "noop", "seconds": 1.0}, pack=False)
        first = start("run", study, "--runs", disk, cwd=tmp_path)
        wait_until(lambda: list(disk.glob("s/records/*/*.json")), what="the first record")
        kept = next(disk.glob("s/records/*/*.json"))
        before = kept.read_bytes()
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(b"x" * 4096)
        assert first.wait(timeout=600) in (1, 3)
        said = (tmp_path / "out.log").read_text()
        assert "No space left" in said, said
        assert kept.read_bytes() == before
        filler.unlink()
        again = rankwise("run", study, "--runs", disk, cwd=tmp_path)
        assert again.returncode == 0, again.stdout + again.stderr
        assert [row["status"] for row in status(disk / "s")] == ["completed"] * 2
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Root may write anywhere, so for root the folder lies below a file; else its mode forbids it."""
    study = write_study(tmp_path)
    if os.geteuid() == 0:
        (tmp_path / "closed").write_text("")
        runs = tmp_path / "closed" / "runs"
    else:
        runs = tmp_path / "closed"
        runs.mkdir(mode=0o500)
    refused = rankwise("run", study, "--runs", runs, cwd=tmp_path)
    assert refused.returncode in (1, 2)
    assert "closed" in refused.stderr and "Traceback" not in refused.stderr
