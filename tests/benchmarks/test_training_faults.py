"""Ranks of real runs killed: by the campaign, and under a study, which tries again by itself."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from benchmarks.training.faults import main
from configs.plans.job import Progress
from configs.records.record import Status, read_record
from tests.support.run_folders.studies import rankwise, start, wait_until


@pytest.mark.nightly
def test_two_killed_ranks_of_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--cases", "2", "--only", "ddp, a rank killed"])
    table = capsys.readouterr().out
    assert code == 0, table
    assert "| ddp, a rank killed | 2 | 2 |" in table


@pytest.mark.nightly
def test_a_study_goes_on_with_training_that_lost_a_rank(tmp_path: Path) -> None:
    study = {
        "study": "s",
        "models": [{"id": "synthetic:llama-1m@0"}],
        "workload": {"kind": "train", "steps": 60, "checkpoint_every": 5, "sequence_length": 64},
        "experiments": {"one": {"kind": "sweep", "over": {"dp": [2]}}},
        "measuring": {"repeats": 1, "memory": False, "cell_timeout_seconds": 120},
    }
    (tmp_path / "s.yaml").write_text(json.dumps(study))
    flow = start("run", "s.yaml", cwd=tmp_path)
    try:
        run = tmp_path / "runs" / "s"
        wait_until(lambda: list(run.glob("checkpoints/*/step_*")), 120, "a checkpoint")
        (progress,) = run.glob("jobs/*/progress_1.json")
        pid = Progress.model_validate_json(progress.read_bytes().rstrip(b" \0")).pid
        os.kill(pid, signal.SIGKILL)
        assert flow.wait(timeout=600) == 0, (tmp_path / "out.log").read_text()
    finally:
        flow.kill()
        flow.wait()
    records = [read_record(path) for path in sorted(run.glob("records/*/r0-a*.json"))]
    assert [record.status for record in records] == [Status.FAILED, Status.COMPLETED]
    assert records[0].failure is not None and records[0].failure.kind == "SIGKILL"
    resumed_from = records[1].figures["resumed_from_step"]
    assert isinstance(resumed_from, int) and resumed_from >= 5
    (samples,) = run.glob("records/*/r0-a2.npz")
    with np.load(samples) as columns:
        assert len(columns["0/loss"]) == 60, "the loss curve is whole"
        assert len(columns["0/step_seconds"]) < 60 - resumed_from + 1, "times are of this attempt's steps"
    assert rankwise("status", run, cwd=tmp_path).returncode == 0
