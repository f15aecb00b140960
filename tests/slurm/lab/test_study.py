"""Studies of a cluster on a real one: what is asked of Slurm before a run, and cells from one node to two."""

import json
from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.targets.target import SlurmTarget
from reports.reading.load import load_run
from slurm.schedulers.commands.partitions import Need, cluster_identity, lacks, partition_nodes, read_cluster
from tests.support.cluster.lab import Lab
from tests.support.run_folders.studies import rankwise, write_study

pytestmark = pytest.mark.slurm


def target_of(lab: Lab, **changes: object) -> dict[str, object]:
    return {"kind": "slurm", "name": "lab", "partition": "lab", "nodes": 2, "poll_seconds": 1} | changes


def test_the_scheduler_says_what_there_is(lab: Lab) -> None:
    cluster = read_cluster()
    assert {"lab", "high", "link-100mbit", "link-1gbit"} <= cluster.partitions.keys()
    assert cluster.default is not None and cluster.default.name == "lab"
    target = SlurmTarget.model_validate(target_of(lab))
    assert partition_nodes(target) == lab.plan.node_names
    assert cluster_identity(target, cluster).startswith(f"cluster {cluster.name}, partition lab, nodes of 1 CPU, ")
    assert lacks(target, [Need(2, 1)], cluster) == []


def test_what_the_cluster_lacks_is_said_before_anything_is_started(lab: Lab, tmp_path: Path) -> None:
    targets = [
        target_of(lab, partition="bal"),
        target_of(lab, name="wide", cores_per_rank=2),
        target_of(lab, name="gone", shared=str(tmp_path / "none")),
    ]
    finished = rankwise("run", write_study(tmp_path, targets=targets), cwd=tmp_path)
    assert finished.returncode == 2 and not (tmp_path / "runs").exists()
    assert "targets[0].partition: unknown partition bal of cluster" in finished.stderr
    assert "targets[1].partition: lab cannot give 1 node with 2 cores: it has 2 nodes of 1 CPU" in finished.stderr
    assert f"targets[2].shared: no such folder: {tmp_path}/none" in finished.stderr
    assert "3 problems, nothing started" in finished.stderr


def test_a_scheduler_that_is_away_is_one_sentence(lab: Lab, tmp_path: Path) -> None:
    elsewhere = tmp_path / "slurm.conf"
    text = lab.plan.slurm_conf.read_text()
    elsewhere.write_text(text.replace("SlurmctldPort=", "SlurmctldPort=1#"))
    study = write_study(tmp_path, targets=[target_of(lab)])
    finished = rankwise("run", study, cwd=tmp_path, SLURM_CONF=str(elsewhere))
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert f"targets[0]: Slurm: no response (SLURM_CONF={elsewhere}): " in finished.stderr


def test_weak_scaling_from_one_node_to_two(lab: Lab, tmp_path: Path) -> None:
    study = write_study(
        tmp_path,
        workload={"kind": "noop", "seconds": 0.2},
        experiments={"weak": {"kind": "weak", "grow": "nodes", "to": 2}},
        targets=[target_of(lab, preflight=False)],
    )
    finished = rankwise("run", study, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "  target   lab  Slurm, partition lab, up to 2 nodes, 1 rank per node" in finished.stdout
    run = RunPaths(tmp_path / "runs" / "s")
    plan = Plan.model_validate_json(run.plan.read_bytes())
    results = load_run(run).cells
    hosts = [sorted(results[point.cell].measurements[0].record.hosts) for point in plan.experiments[0].points]
    assert len(hosts[0]) == 1 and hosts[1] == sorted(lab.plan.node_names)
    environment = json.loads((run.folder / "environment.json").read_text())
    assert "partition lab, nodes of 1 CPU, " in environment["target lab"] and "cores" not in environment
    # Everything is there: the same folder goes on from whatever machine submits.
    again = rankwise("run", study, cwd=tmp_path)
    assert again.returncode == 0 and "2 of 2 measurements were already completed" in again.stdout


@pytest.mark.slow
def test_the_shipped_study_of_two_nodes(lab: Lab, tmp_path: Path) -> None:
    """As the how-to says: copied, and run on the lab; here once instead of three times."""
    copied = rankwise("examples", "two-nodes", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    settings = ("--set", "measuring.repeats=1", "--set", "measuring.min_seconds=0.1", "--set", "measuring.memory=false")
    finished = rankwise("run", "two_nodes.yaml", "--no-calibrate", *settings, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = load_run(RunPaths(tmp_path / "runs" / "two-nodes")).cells.values()
    assert {len(result.measurements[0].record.hosts) for result in results if result.measurements} == {1, 2}
