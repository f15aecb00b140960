"""Nodes are tested before a study is measured: a slow one is named, left out where another will do, and shown."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from configs.plans.job import Progress
from configs.plans.paths import RunPaths
from configs.records.record import read_record
from reports.preflight import read_preflight
from tests.support.cluster.lab import Lab
from tests.support.run_folders.reports import whole_report
from tests.support.run_folders.studies import LIMIT_SECONDS, rankwise, start, wait_until, write_study

pytestmark = pytest.mark.slurm

_SLICE_SECONDS = 0.1
TARGET = {"kind": "slurm", "name": "cluster", "partition": "lab", "nodes": 2, "poll_seconds": 1.0}
GRID = {
    "kind": "optimization",
    "baseline": {"label": "large", "dp": 2, "items": 2},
    "variants": {"small": {"label": "small", "dp": 1, "items": 1}},
}


@contextmanager
def slowed(pid: int, share: float = 0.05) -> Iterator[None]:
    """A process that runs for this share of the time only: less than other work leaves to those beside it."""
    over = threading.Event()

    def hold_back() -> None:
        with suppress(ProcessLookupError):
            while not over.wait(_SLICE_SECONDS * share):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(_SLICE_SECONDS * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def rank_of(run: RunPaths, rank: int) -> int | None:
    """Pid of a trial's rank that computes or is about to; None as long as there is none."""
    for path in run.folder.glob(f"preflight/jobs/*/progress_{rank}.json"):
        with suppress(ValueError):
            progress = Progress.model_validate_json(path.read_bytes())
            return progress.pid if progress.phase in ("ready", "measurement") else None
    return None


def hosts(run: RunPaths) -> dict[str, list[str]]:
    """Where each cell was measured, by its label."""
    records = [read_record(path) for path in run.records.glob("*/*.json")]
    return {record.cell.workload.label: record.hosts for record in records}


def test_a_slow_node_is_named_and_left_out_where_another_will_do(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.plan.node_names
    study = write_study(tmp_path, targets=[TARGET], experiments={"grid": GRID}, pack=False)
    run = RunPaths(tmp_path / "runs" / "s")
    going = start("run", study, cwd=tmp_path)
    wait_until(lambda: rank_of(run, 1), LIMIT_SECONDS, "a trial's rank")
    pid = rank_of(run, 1)
    assert pid is not None
    with slowed(pid):
        wait_until(lambda: run.preflight.exists() or going.poll() is not None, LIMIT_SECONDS, "the end of the trial")
    assert going.wait(LIMIT_SECONDS) == 0, (tmp_path / "out.log").read_text()
    said = (tmp_path / "out.log").read_text()
    found = read_preflight(run)
    assert found is not None
    assert {node.node: node.verdict for node in found.targets[0].nodes} == {first: "good", second: "slow"}, said
    (pair,) = found.targets[0].pairs
    assert pair.nodes == (first, second) and pair.bytes_per_second > 1e6
    assert f"node {second} is slow" in " ".join(said.split())
    assert f"| {second} | slow |" in whole_report(run)
    assert hosts(run) == {"small": [first], "large": [first, second]}, "a job that needs both gets both"
    tested = found.targets[0].at
    again = rankwise("run", study, "--set", "measuring.repeats=2", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    known = read_preflight(run)
    assert known is not None and known.targets[0].at == tested, "nodes are not tested again within hours"


def test_a_study_on_single_nodes_is_not_held_up(lab: Lab, tmp_path: Path) -> None:
    study = write_study(tmp_path, targets=[TARGET])
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_preflight(RunPaths(tmp_path / "runs" / "s")) is None
