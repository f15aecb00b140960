"""A launch in a container, submitted through the adapter: real nodes, and a stand-in for Apptainer."""

import json
import os
import sys
from pathlib import Path

import pytest

from configs.plans.packing import pack_launches
from configs.plans.paths import RunPaths
from configs.records.record import Status
from configs.spec.study import load_study
from flows.precheck import check_study
from tasks.campaign.launches.jobs import run_job, write_job
from tasks.campaign.ledger import Ledger, missing_measurements
from tests.support.cluster.lab import Lab
from tests.support.run_folders.studies import write_study

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[3]


def test_both_nodes_run_their_ranks_in_the_image(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, said, programs = tmp_path / "an image.sif", tmp_path / "said", tmp_path / "bin"
    image.touch()
    programs.mkdir()
    (programs / "apptainer").symlink_to(ROOT / "tests" / "support" / "stand_in_apptainer")
    # The nodes get the environment of whoever submits.
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_IMAGE", ":".join({str(ROOT), sys.prefix, sys.base_prefix}))
    monkeypatch.setenv("STAND_IN_SAID", str(said))
    target = {
        "kind": "slurm",
        "name": "lab",
        "nodes": 2,
        "container": {"image": str(image), "python": sys.executable},
        "setup": [f"echo ready >> {tmp_path}/set_up"],
        "poll_seconds": 1,
    }
    study = load_study(write_study(tmp_path, targets=[target], layout={"dp": 2}))
    run, cache = RunPaths(tmp_path / "runs" / "s"), tmp_path / "cache"
    run.jobs.mkdir(parents=True)
    cache.mkdir()
    plan = check_study(study, tmp_path, cache, run.folder)
    [launch] = pack_launches(missing_measurements(plan, Ledger(), "timed", False), "timed", 0)
    collected = run_job(write_job(launch, plan, run, cache), run, lambda line: None)
    assert [record.status for record in collected.records] == [Status.COMPLETED] * 2, collected
    assert {host for record in collected.records for host in record.hosts} == set(lab.plan.node_names)
    calls = [json.loads(line) for line in said.read_text().splitlines()]
    assert len(calls) == 2 and all(call[0] == "exec" and str(image) in call for call in calls)
    binds = [calls[0][position + 1] for position, word in enumerate(calls[0]) if word == "--bind"]
    assert binds == [str(cache), str(run.folder)]
    assert (tmp_path / "set_up").read_text().split() == ["ready"] * 2
