"""Manifests on a real Slurm: one sbatch measures a study on two nodes, with and without a container; hosts train."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from configs.records.record import Status
from configs.spec.study import load_study
from slurm.sbatch_bundle.scripts import multi_node_example, sbatch_line, setup_script
from tasks.bundle.collect import collect_bundle
from tasks.bundle.write import write_bundle
from tests.support.cluster.lab import Lab
from tests.support.run_folders.studies import rankwise, under_measurement, wait_until, write_study

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[3]
SLURM = {"kind": "slurm", "name": "lab", "partition": "lab", "nodes": 2}
TRAINING = '''"""A layer trained for five steps by DDP over whatever nodes started it."""
import torch
import torch.distributed as dist
from torch import nn

from engine import all_reduce_tensor, barrier, gather_tensors, get_node_info, is_master_process

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
info = get_node_info()
losses = []
for _ in range(5):
    loss = (model(torch.full((8, 4), 0.1 + info["rank"])) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(all_reduce_tensor(loss).item())
weights = gather_tensors(model.module.weight)
if is_master_process():
    alike = all(torch.equal(weights[0], other) for other in weights)
    print("trained", info["world_size"], info["nnodes"], alike, losses[-1] < losses[0], flush=True)
barrier()
dist.destroy_process_group()
'''


def manifest(folder: Path, **changes: object) -> RunPaths:
    path = write_study(folder, **{"targets": [SLURM], **changes})
    write_bundle(load_study(path), folder, folder / "cache", folder / "manifest", None)
    return RunPaths(folder / "manifest")


def submit(lab: Lab, run: RunPaths, *options: str, **variables: str) -> str:
    """Submit as a user does; returns the job's id."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sbatch", "--parsable", *options, "submit.sbatch"]
    environment = os.environ | {"PATH": path, **variables}
    done = subprocess.run(command, cwd=run.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_sbatch_measures_one_and_two_nodes_and_is_collected_at_home(lab: Lab, tmp_path: Path) -> None:
    run = manifest(tmp_path, experiments={"strong": {"kind": "strong", "grow": "dp", "to": 2}})
    job = submit(lab, run)
    assert lab.wait_until_ended(job, 120) == "COMPLETED", (run.folder / f"s-{job}.out").read_text()
    home = tmp_path / "home" / "s"
    shutil.copytree(run.folder, home)
    done = rankwise("collect", home, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(path.read_text()) for path in home.glob("records/*/*.json")]
    assert sorted(len(record["hosts"]) for record in records) == [1, 2]
    assert {host for record in records for host in record["hosts"]} == set(lab.plan.node_names)
    assert {record["accounting"]["job_id"] for record in records} == {f"{job}.0", f"{job}.1"}
    assert all(record["accounting"]["state"] == "COMPLETED" for record in records)
    assert (home / "outputs" / "rank_1.log").exists() and (home / "outputs" / f"sacct_{job}.txt").exists()


def test_in_a_container_a_job_differs_by_its_wrapper_only(lab: Lab, tmp_path: Path) -> None:
    """A stand-in for Apptainer makes the binds; nothing but these and the image's own folders is seen inside."""
    image, said, scratch = tmp_path / "an image.sif", tmp_path / "said", tmp_path / "scratch"
    image.touch()
    (scratch / "models").mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "apptainer").symlink_to(ROOT / "tests" / "support" / "stand_in_apptainer")
    run = manifest(tmp_path, layout={"dp": 2}, workload={"kind": "noop", "seconds": 0.01})
    job = submit(
        lab,
        run,
        APPAINTER_IMAGE=str(image),  # the name that some sites have spread
        CODE_ROOT=str(ROOT),
        SCRATCH_ROOT=str(scratch),
        EXPERIMENT_ROOT=str(tmp_path / "experiment"),
        PATH=f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        STAND_IN_IMAGE=":".join({sys.prefix, sys.base_prefix}),
        STAND_IN_SAID=str(said),
    )
    assert lab.wait_until_ended(job, 120) == "COMPLETED", (run.folder / f"s-{job}.out").read_text()
    calls = [json.loads(line) for line in said.read_text().splitlines()]
    assert len(calls) == 2
    for call in calls:
        binds = [call[position + 1] for position, word in enumerate(call) if word == "--bind"]
        assert binds == [f"{run.folder}:/tmp/workspace", f"{scratch}/models:/workspace/models", f"{ROOT}:/app"]
    assert (tmp_path / "experiment" / "outputs" / "rank_1.log").exists()
    collected = collect_bundle(run.folder)
    assert [record.status for record in collected.records] == [Status.COMPLETED] * 2 and collected.missing == 0


def test_a_job_that_is_told_to_stop_keeps_what_it_has(lab: Lab, tmp_path: Path) -> None:
    """USR1 is what Slurm sends the script a minute before the time limit (--signal=B:USR1@60)."""
    run = manifest(tmp_path, layout={"dp": 2}, workload={"kind": "noop", "seconds": 120}, measuring={"repeats": 2})
    job = submit(lab, run)
    wait_until(lambda: under_measurement(run.folder), 120, "a measurement")
    lab.slurm("scancel", "--batch", "--signal=USR1", job)
    lab.wait_until_ended(job, 60)
    collected = collect_bundle(run.folder)
    assert [record.status for record in collected.records] == [Status.TIMEOUT]
    assert collected.not_begun == 1 and collected.missing == 4  # two cells, twice each: one launch was begun
    output = (run.folder / f"s-{job}.out").read_text()
    assert "stopped: TIMEOUT. Submit this job again to resume" in output


@pytest.mark.parametrize("value", ['two "nodes" for $5', "it's `x` $(y)", "back\\slash # no", "a#b; c|d", "%j", '\\"'])
def test_sbatch_reads_an_option_as_it_was_meant(lab: Lab, tmp_path: Path, value: str) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{sbatch_line('comment', value, 'extra.comment')}\n#SBATCH --hold\ntrue\n")
    job = lab.slurm("sbatch", "--parsable", "--output=/dev/null", str(script)).strip()
    told = lab.slurm("scontrol", "--oneliner", "show", "job", job)
    lab.slurm("scancel", job)
    assert f" Comment={value} " in told


def test_two_hosts_train_by_the_setup_script(lab: Lab, tmp_path: Path) -> None:
    script, training = tmp_path / "setup_multi_node.sh", tmp_path / "train.py"
    script.write_text(setup_script())
    training.write_text(TRAINING)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(rank: int, *variables: str) -> "subprocess.CompletedProcess[str]":
        node = lab.plan.node_names[rank]
        own = (f"PATH={path}", f"MASTER_ADDR={lab.plan.node_names[0]}", f"NODE_RANK={rank}", "NPROC_PER_NODE=1")
        return lab.on_node(node, "env", *own, *variables, "bash", str(script), str(training))

    with ThreadPoolExecutor(2) as pool:
        second, first = pool.submit(start, 1), pool.submit(start, 0)
        assert first.result().returncode == 0, first.result().stderr
        assert second.result().returncode == 0, second.result().stderr
    assert "trained 2 2 True True" in first.result().stdout
    wrong = start(1, "NODE_RANK=0")
    assert wrong.returncode == 2 and "is not an address of" in wrong.stderr
    alone = start(1, "WAIT_SECONDS=1")
    assert alone.returncode == 3 and "node 0 does not respond" in alone.stderr


def test_two_hosts_train_the_shipped_example(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "setup_multi_node.sh").write_text(setup_script())
    (tmp_path / "multi_node_example.py").write_text(multi_node_example())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(rank: int) -> "subprocess.CompletedProcess[str]":
        own = (f"PATH={path}", f"MASTER_ADDR={lab.plan.node_names[0]}", f"NODE_RANK={rank}", "NPROC_PER_NODE=1")
        files = (str(tmp_path / "setup_multi_node.sh"), str(tmp_path / "multi_node_example.py"))
        return lab.on_node(lab.plan.node_names[rank], "env", *own, "bash", *files)

    with ThreadPoolExecutor(2) as pool:
        first, second = list(pool.map(start, (0, 1)))
    assert first.returncode == 0 and second.returncode == 0, first.stderr + second.stderr
    assert "trained on 2 processes: " in first.stdout and "process 1 of 2" in second.stdout
