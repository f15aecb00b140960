"""A study from the command line to its report, for real: server, flow, torchrun, ranks."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from configs.common.base import SCHEMA_VERSION
from flows.server.local import lease_server
from tests.support.run_folders.studies import (
    RANKWISE,
    job_count,
    processes_of,
    rankwise,
    rankwise_here,
    start,
    status,
    under_measurement,
    wait_until,
    write_study,
)
from tests.support.servers.migrated_database import put_database

RUNS_PER_CELL = 2


@pytest.fixture(scope="module", autouse=True)
def one_server() -> Iterator[None]:
    """Keep one local server up for all runs of this file."""
    with lease_server() as lease:
        lease.wait_until_healthy()
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed study on one and two ranks, with its memory pass; other tests look at it."""
    folder = tmp_path_factory.mktemp("finished")
    experiments = {
        "grid": {"kind": "sweep", "over": {"label": ["a", "b"]}},
        "strong": {"kind": "strong", "grow": "dp", "to": 2, "base": {"items": 2}},
    }
    study = write_study(folder, experiments=experiments, measuring={"repeats": RUNS_PER_CELL, "memory": True})
    done = rankwise("run", study, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "first.txt").write_text(done.stdout)
    return folder


def test_every_repeat_has_a_record_and_the_report_opens_with_the_answer(finished: Path) -> None:
    rows = status(finished / "runs" / "s")
    assert [row["status"] for row in rows] == ["completed"] * 4 * RUNS_PER_CELL
    assert {row["repeat"] for row in rows} == {0, 1}
    assert all(Path(row["record"]).exists() and row["attempts"] == 1 for row in rows)
    assert all(row["started_at"] < row["finished_at"] for row in rows)
    report = (finished / "runs" / "s" / "report.md").read_text()
    assert report.splitlines()[2].startswith("> **Run ")
    with (finished / "runs" / "s" / "cells.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
    assert "Report     runs/s/report.md" in (finished / "first.txt").read_text()


def test_nothing_is_measured_again(finished: Path) -> None:
    run = finished / "runs" / "s"
    jobs, report = job_count(run), (run / "report.md").read_bytes()
    again = rankwise("run", finished / "s.yaml", cwd=finished)
    assert again.returncode == 0
    assert "12 of 12 measurements were already completed" in again.stdout
    assert job_count(run) == jobs
    assert (run / "report.md").read_bytes() == report


def test_the_report_is_the_same_to_the_byte_when_rendered_again(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "s"
    shutil.copytree(finished / "runs" / "s", run)
    files = [
        "report.md",
        "appendix.md",
        "cells.csv",
        "records.parquet",
        *(str(p.relative_to(run)) for p in run.glob("plots/*")),
    ]
    before = {name: (run / name).read_bytes() for name in files}
    assert any(name.endswith(".png") for name in files) and any(name.endswith(".svg") for name in files)
    for name in files:
        (run / name).unlink()
    assert rankwise("report", run, cwd=tmp_path).returncode == 0
    assert {name: (run / name).read_bytes() for name in files} == before


@pytest.mark.slow
def test_more_repeats_measure_only_what_is_new(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    run = tmp_path / "runs" / "s"
    more = rankwise("run", finished / "s.yaml", "--set", "measuring.repeats=3", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "12 of 16 measurements were already completed" in more.stdout
    assert len(status(run)) == 4 * 3


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".json", pytest.param(".npz", marks=pytest.mark.nightly)])
def test_a_record_damaged_between_runs_is_set_aside_and_measured_again(
    finished: Path, tmp_path: Path, suffix: str
) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    run = tmp_path / "runs" / "s"
    victim = Path(status(run)[0]["record"]).with_suffix(suffix)
    victim.write_bytes(victim.read_bytes()[:-7])
    again = rankwise("run", finished / "s.yaml", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "was moved to set_aside/" in again.stdout and "11 of 12" in again.stdout
    assert list((run / "set_aside").iterdir())
    assert sorted(row["attempts"] for row in status(run)) == [1] * 7 + [2]


def test_two_schemas_in_one_folder_are_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    record = next((tmp_path / "runs" / "s" / "records").glob("*/*.json"))
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"schema_version": 99}))
    refused = rankwise("run", finished / "s.yaml", cwd=tmp_path)
    assert refused.returncode == 1
    assert f"schema_version: got 99, expected {SCHEMA_VERSION}. Use the version" in refused.stderr


@pytest.mark.slow
def test_another_environment_is_told_and_must_be_accepted(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    path = tmp_path / "runs" / "s" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"torch": "1.0"}))
    refused = rankwise("run", finished / "s.yaml", cwd=tmp_path)
    assert refused.returncode == 1
    assert "torch: was 1.0, now " in refused.stderr and "--accept-environment" in refused.stderr
    assert rankwise("run", finished / "s.yaml", "--accept-environment", cwd=tmp_path).returncode == 0


def test_logs_of_every_rank_are_shown(finished: Path) -> None:
    shown = rankwise_here("logs", finished / "runs" / "s", cwd=finished).stdout
    assert "rank_0: " in shown and "rank_1: " in shown


def test_a_dry_run_starts_nothing(finished: Path, tmp_path: Path) -> None:
    dry = rankwise_here("run", finished / "s.yaml", "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0
    assert "4 cells" in dry.stdout and "6 launches remaining" in dry.stdout
    assert not (tmp_path / "runs").exists()
    assert "0 launches remaining" in rankwise_here("run", finished / "s.yaml", "--dry-run", cwd=finished).stdout


@pytest.mark.slow
def test_a_study_runs_from_python_too(finished: Path) -> None:
    code = "from flows.scaling_study import scaling_study;print(scaling_study('s.yaml', runs='runs').already_measured)"
    with lease_server() as lease:  # a server that is there already, as beside another run
        env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=finished, env=env, capture_output=True, text=True, timeout=600
        )
        found = httpx.post(f"{lease.url}/flow_runs/filter", json={}, trust_env=False).json()
        assert "s" in {run["name"] for run in found}, "in the history of the command line, named after the study"
    assert done.stdout.strip().endswith("12"), done.stderr


@pytest.mark.slow
def test_unpacked_every_cell_has_a_launch_of_its_own(tmp_path: Path) -> None:
    study = write_study(tmp_path, pack=False)
    assert rankwise("run", study, cwd=tmp_path).returncode == 0
    assert job_count(tmp_path / "runs" / "s") == 2


@pytest.mark.nightly
def test_what_the_budget_does_not_pay_for_is_said(tmp_path: Path) -> None:
    # The first launch alone takes longer than the budget, however fast launches start.
    work = {"kind": "noop", "seconds": 2.0}
    study = write_study(tmp_path, pack=False, workload=work, measuring={"budget_minutes": 0.02})
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 3
    assert [row["status"] for row in status(tmp_path / "runs" / "s")].count("over_budget") == 1
    assert rankwise("run", study, "--set", "measuring.budget_minutes=5", cwd=tmp_path).returncode == 0


@pytest.mark.nightly
def test_a_second_run_in_the_folder_is_refused_naming_the_first(tmp_path: Path) -> None:
    # Long enough for the second to start on a busy machine; nobody waits for its end.
    study = write_study(tmp_path, workload={"kind": "noop", "seconds": 60.0})
    first = start("run", study, cwd=tmp_path)
    try:
        wait_until(lambda: (tmp_path / "runs" / "s" / "plan.json").exists(), what="the first run's plan")
        second = rankwise("run", study, cwd=tmp_path)
        assert second.returncode == 1
        assert f"process {first.pid}" in second.stderr
        assert first.poll() is None, "the first goes on"
    finally:
        os.killpg(first.pid, signal.SIGINT)
        assert first.wait(timeout=600) != 0


@pytest.mark.nightly
def test_logs_can_be_followed_while_a_run_goes_on(tmp_path: Path) -> None:
    study = write_study(tmp_path, workload={"kind": "noop", "seconds": 1.0})
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(tmp_path / "runs" / "s"), what="a measurement")
    followed = subprocess.run(
        [RANKWISE, "logs", "runs/s", "--follow"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert first.wait(timeout=600) == 0
    assert "rank_0" in followed.stdout and followed.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a network namespace needs root")
def test_a_study_needs_no_network(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    script = f"ip link set lo up && exec {RANKWISE} run {study}"
    put_database(tmp_path / "data" / "prefect" / "prefect.db")
    env = os.environ | {"RANKWISE_DATA": str(tmp_path / "data"), "RANKWISE_SERVER_LINGER": "0"}
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: not processes_of(tmp_path), seconds=30, what="the end of the local server")
