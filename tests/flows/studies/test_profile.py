"""A study with a profile pass, for real: planned, launched on two ranks, merged with its traces, reported, kept."""

import gzip
import json
from pathlib import Path
from typing import get_args

import pytest
import yaml

from configs.plans.job import Measurement
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import MeasuringPass
from flows.server.local import lease_server
from reports.reading.load import load_run
from tasks.campaign.ledger import missing_measurements, read_ledger, set_aside_damaged
from tests.support.run_folders.reports import whole_report
from tests.support.run_folders.studies import rankwise

STUDY = {
    "study": "s",
    "models": [{"name": "tiny", "id": "synthetic:llama-1m@7"}],
    "workload": {"kind": "train", "global_batch_size": 4, "sequence_length": 32, "steps": 3},
    "experiments": {"strong": {"kind": "strong", "grow": "dp", "points": [2]}},
    "measuring": {"repeats": 1, "memory": False, "profile": True, "cell_timeout_seconds": 90},
    "objectives": {"exposed_communication_share": 0.999},
}


@pytest.mark.slow
def test_a_profile_pass_from_the_command_line_to_the_report(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    with lease_server() as lease:
        lease.wait_until_healthy()
        done = rankwise("run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cell, 1 measurement + 1 for profile, 2 launches" in done.stdout
    run = RunPaths(tmp_path / "runs" / "s")
    study = load_run(run)
    for key, result in study.cells.items():
        assert result.profile is not None and result.profile.completed and len(result.completed) == 1
        ranks = result.cell.layout.ranks
        for rank in range(ranks):
            trace = run.records / key / f"profile-r0-a1.trace_rank_{rank}.json.gz"
            names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
            assert "profiled region" in names and ("gloo:all_reduce" in names) == (ranks > 1)
        shares = result.profile.numbers_by_rank("communication_share")
        assert len(shares) == ranks and all((share > 0) == (ranks > 1) for share in shares)
    assert not list(run.jobs.glob("*/parts/*")), "everything was merged"
    report = whole_report(run)
    assert "## Time split" in report and "of the pass is exposed" in report
    assert "exposed communication at most 99.9 %" in report and "every rank is within the bound" in report
    _damaged_and_missing(run, study.plan)


def _damaged_and_missing(run: RunPaths, plan: Plan) -> None:
    """Nothing is left to do, until a profile's record is damaged: it is set aside, and its attempt still counts."""
    assert not _missing(run, plan)
    damaged = next(iter(run.records.glob("*/profile-r0-a1.json")))
    damaged.write_text("{")
    (measurement,) = _missing(run, plan)
    assert damaged.exists() and not run.set_aside.exists(), "a look moves nothing"
    set_aside_damaged(run)
    assert len(list(run.set_aside.iterdir())) == 2, "the record and its samples"
    assert _missing(run, plan) == [measurement]
    assert (measurement.cell.key, measurement.attempt) == (damaged.parent.name, 2)


def _missing(run: RunPaths, plan: Plan) -> list[Measurement]:
    ledger = read_ledger(run)
    return [
        measurement
        for measuring_pass in get_args(MeasuringPass)
        for measurement in missing_measurements(plan, ledger, measuring_pass, only_failed=False)
    ]
