"""Which machines are asked before a run measures."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.spec.study import StudyError
from slurm.schedulers.commands.listing import ClusterError
from tasks.campaign.progress import RunProgress
from tasks.campaign.repeats import targets_in_use
from tasks.campaign.session import Session
from tasks.checks.machine import check_clusters
from tasks.provision import provision
from tests.support.run_folders.made_studies import MODEL, decoded, planned, write_plan, write_record

STUDY = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}
targets: [{name: here}, {kind: slurm, name: lab}]
measuring: {repeats: 2, memory: false}
experiments: {sizes: {kind: sweep, over: {batch_size: [1]}}}
"""


def test_a_cluster_on_which_nothing_is_missing_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it was away, or after its nodes had changed, the cells of this machine could not be measured either."""
    plan = planned(STUDY)
    plan = plan.model_copy(update={"models": (MODEL.model_copy(update={"manifest": ""}),)})  # no file of it is needed
    run = write_plan(tmp_path / "run", plan)
    (there,) = (cell for cell in plan.cells.values() if cell.target == "lab")
    for repeat in range(2):
        write_record(run, there, repeat, samples=decoded(there, 1.0))
    environment = run.folder / "environment.json"
    environment.write_text(json.dumps({"target lab": "nodes of another kind"}))
    monkeypatch.setenv("PATH", str(tmp_path))  # without the commands of Slurm
    session = Session(run, plan, tmp_path, RunProgress(), SimpleNamespace(check=lambda: None))
    assert [target.name for target in targets_in_use(plan, run)] == ["here"]
    check_clusters(plan, targets_in_use(plan, run))
    provision(session, False, False)
    kept = json.loads(environment.read_bytes())
    assert kept["target lab"] == "nodes of another kind" and "gpus of target here" in kept
    run.record(there.key, "timed", 1, 1).unlink()
    with pytest.raises(StudyError, match="`scontrol`: not found on PATH"):
        check_clusters(plan, targets_in_use(plan, run))
    with pytest.raises(ClusterError, match="`scontrol`: not found on PATH"):
        provision(session, False, False)
    provision(session, False, True)  # --only-failed leaves it out: it was never tried
