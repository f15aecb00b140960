"""A study as a folder for sbatch: written, run by a stand-in for srun on this machine, collected elsewhere.

Slurm itself runs it in test_lab_manifests; here `srun` starts one node's task with the variables that Slurm sets.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from configs.common.base import WrongArgument, utc_now
from configs.plans.job import Job, Launcher, Progress, Submission
from configs.plans.paths import RunPaths
from configs.records.record import Status
from configs.spec.study import StudyError, load_study
from tasks.bundle.collect import collect_bundle
from tasks.bundle.write import write_bundle
from tasks.campaign.run_lock import run_lock
from tests.support.run_folders.studies import rankwise, rankwise_here, status, write_study

SLURM = {"kind": "slurm", "name": "cluster", "partition": "batch"}
SRUN = """#!/bin/bash
[ -z "${BROKEN:-}" ] || exit 1
while [[ $1 == --* ]]; do shift; done
step=$(cat "$STEPS" 2> /dev/null || echo 0)
echo $((step + 1)) > "$STEPS"
export SLURM_STEP_ID=$step SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
exec "$@"
"""
SACCT = """#!/bin/bash
cat "$ACCOUNTS"
"""


def manifest(folder: Path, out: str = "manifest", **changes: object) -> RunPaths:
    """The folder that a noop study's manifest is; `changes` are of the study."""
    path = write_study(folder, **{"targets": [SLURM], **changes})
    write_bundle(load_study(path), folder, folder / "cache", folder / out, None)
    return RunPaths(folder / out)


def submit(run: RunPaths, job_id: int, **variables: str) -> "subprocess.CompletedProcess[str]":
    """What sbatch would do on a cluster of one node."""
    bin_folder = run.folder.parent / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("sacct", SACCT)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    host = socket.gethostname()
    environment = os.environ | {
        "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": host,
        "SLURM_SUBMIT_DIR": str(run.folder),
        "STEPS": str(run.folder.parent / f"steps_{job_id}"),
        "ACCOUNTS": str(run.folder.parent / "accounts"),
        **variables,
    }
    (run.folder.parent / "accounts").write_text(
        "JobID|State|NodeList|Submit|Start|End|ElapsedRaw|TotalCPU|MaxRSS|ConsumedEnergyRaw|FailedNode|Reason\n"
        f"{job_id}|RUNNING|{host}|1000|1002|Unknown|9|00:00.000||0||None\n"
        f"{job_id}.0|COMPLETED|{host}|1002|1002|1006|4|00:02.500|123456K|0||\n"
    )
    return subprocess.run(
        ["bash", "submit.sbatch"], cwd=run.folder, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_it_is_measured_where_it_was_copied_to_and_collected_where_it_was_brought(tmp_path: Path) -> None:
    made = manifest(tmp_path)
    cluster = RunPaths(tmp_path / "cluster's own disk")
    shutil.move(made.folder, cluster.folder)
    done = submit(cluster, 77)
    assert done.returncode == 0, done.stdout + done.stderr
    home = tmp_path / "home" / "noops"
    shutil.copytree(cluster.folder, home)
    shutil.rmtree(cluster.folder)
    collected = rankwise("collect", home, cwd=tmp_path)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "2 new records" in collected.stdout and (home / "report.md").exists()
    assert {row["status"] for row in status(home)} == {"completed"}
    assert "rank_0.log <==" in (home / "outputs" / "rank_0.log").read_text()
    accounts = json.loads(
        (home / "jobs" / Job.model_validate_json(first_job(home)).name / "accounting.json").read_text()
    )
    assert (accounts["job_id"], accounts["state"], accounts["cpu_seconds"]) == ("77.0", "COMPLETED", 2.5)
    assert accounts["max_rss_bytes"] == 123456 * 1024
    again = rankwise_here("collect", home, cwd=tmp_path)
    assert again.returncode == 0 and "0 new records" in again.stdout


def first_job(folder: Path) -> bytes:
    return min(folder.glob("jobs/*/job.json")).read_bytes()


@pytest.mark.slow
def test_a_second_submission_makes_no_launch_again_that_ended_well(tmp_path: Path) -> None:
    fault = {"kind": "noop", "seconds": 0.01, "fault": "raise", "label": "x"}
    fails = {"kind": "sweep", "base": {"workload": fault}, "over": {"seconds": [0.01]}}
    run = manifest(tmp_path, experiments={"grid": {"kind": "sweep", "over": {"label": ["a"]}}, "fails": fails})
    first = submit(run, 77)
    assert first.returncode == 0, first.stderr  # a rank alone goes on after an exception, so the launch ends well
    assert first.stdout.count(" on 1") == 1
    second = submit(run, 78)
    assert second.returncode == 0 and " on 1" not in second.stdout
    collected = collect_bundle(run.folder)
    assert sorted(record.status for record in collected.records) == [Status.COMPLETED, Status.FAILED]
    assert collected.missing == 1 and collected.not_begun == 0


@pytest.mark.nightly
def test_what_a_killed_rank_left_unreached_goes_on_and_the_rest_is_tried_again_later(tmp_path: Path) -> None:
    fault = {"kind": "noop", "seconds": 0.01, "fault": "kill", "fault_attempts": 1}
    cells = {
        "grid": {"kind": "sweep", "over": {"label": ["a", "b", "c"]}},
        "fails": {"kind": "sweep", "base": {"workload": fault}, "over": {"label": ["x"]}},
    }
    run = manifest(tmp_path, experiments=cells)
    first = submit(run, 77)
    assert first.returncode == 3, first.stdout + first.stderr
    collected = collect_bundle(run.folder)
    assert sorted(record.status for record in collected.records) == [Status.COMPLETED] * 3 + [Status.FAILED]
    [failed] = [record for record in collected.records if record.status is Status.FAILED]
    assert failed.failure is not None and failed.failure.kind == "SIGKILL" and failed.attempt == 1
    assert collected.missing == 1
    second = submit(run, 78)
    assert second.returncode == 0, second.stdout + second.stderr
    assert len([line for line in second.stdout.splitlines() if " on 1" in line]) == 1
    again = collect_bundle(run.folder)
    assert [(record.status, record.attempt) for record in again.records] == [(Status.COMPLETED, 2)]
    assert again.missing == 0


def test_what_was_under_way_when_it_was_collected_is_not_lost_for_good(tmp_path: Path) -> None:
    """Collected while the job ran: its measurement was recorded as lost, and its parts, which came later, removed."""
    cluster = manifest(tmp_path, "cluster")
    home = RunPaths(tmp_path / "home")
    shutil.copytree(cluster.folder, home.folder)
    [paths] = [home.job(path.name) for path in home.jobs.iterdir()]
    first = Job.model_validate_json(paths.job.read_bytes()).measurements[0].name
    began = Launcher(node_rank=0, pid=1, pid_started=1, host="node7", started_at=utc_now())
    paths.node_launcher(0).write_text(began.model_dump_json())
    said = Progress(rank=0, pid=1, pid_started=1, phase="measurement", measurement=first, since=0.0)
    paths.progress(0).write_text(said.model_dump_json())
    assert [record.status for record in collect_bundle(home.folder).records] == [Status.LOST]
    assert collect_bundle(home.folder).records == []
    done = submit(cluster, 77)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(cluster.folder, home.folder, dirs_exist_ok=True)
    collected = collect_bundle(home.folder)
    assert [record.status for record in collected.records] == [Status.COMPLETED] * 2 and collected.missing == 0
    shutil.copytree(cluster.folder, home.folder, dirs_exist_ok=True)
    assert collect_bundle(home.folder).records == []


def test_it_is_not_collected_twice_at_once_nor_while_a_run_measures_in_it(tmp_path: Path) -> None:
    """Jobs under way were taken for lost and ended, and of two collections one wrote records without samples."""
    run = manifest(tmp_path)
    [paths] = [run.job(path.name) for path in run.jobs.iterdir()]
    began = Launcher(node_rank=0, pid=1, pid_started=1, host="node7", started_at=utc_now())
    paths.node_launcher(0).write_text(began.model_dump_json())
    with run_lock(run):
        done = rankwise_here("collect", run.folder, cwd=tmp_path)
    assert done.returncode == 1
    assert "in use" in done.stderr and "Collect when that has ended" in done.stderr and "--runs" not in done.stderr
    assert not paths.end.exists() and not run.records.exists()
    paths.submitting.touch()  # by a run that was killed, while its job goes on
    with pytest.raises(WrongArgument, match=r"not a bundle\. `rankwise run` measures in this folder"):
        collect_bundle(run.folder)
    assert not paths.end.exists()


def test_a_bundle_on_a_disk_without_locks_can_be_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    run = manifest(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert collect_bundle(run.folder).not_begun == 1


def test_a_launch_that_never_began_is_told(tmp_path: Path) -> None:
    run = manifest(tmp_path)
    collected = rankwise_here("collect", run.folder, cwd=tmp_path)
    assert collected.returncode == 3
    assert "2 measurements missing (1 launch not started)" in collected.stdout


def test_what_the_ranks_left_is_gathered_under_the_agreed_names(tmp_path: Path) -> None:
    run = manifest(tmp_path)
    [job] = run.jobs.iterdir()
    for name in ("one.completions_rank_0.jsonl", "two.completions_rank_0.jsonl", "one.nsys_rank_1.nsys-rep"):
        (job / "parts" / name).write_text(f"{name}\n")
    (job / "parts" / "one.perf_rank_0.txt").write_text("cycles\n")
    (job / "rank_0.log").write_text("said\n")
    script = (run.folder / "submit.sbatch").read_text().replace("rank < 1;", "rank < 2;")
    (run.folder / "submit.sbatch").write_text(script)
    done = submit(run, 77, BROKEN="1")
    assert done.returncode == 3
    outputs = run.folder / "outputs"
    assert (
        outputs / "completions_rank_0.jsonl"
    ).read_text() == "one.completions_rank_0.jsonl\ntwo.completions_rank_0.jsonl\n"
    assert (outputs / "nsys_rank_1.one.nsys-rep").exists()
    assert (outputs / "perf_rank_0.txt").read_text() == f"==> jobs/{job.name}/parts/one.perf_rank_0.txt <==\ncycles\n"
    assert (outputs / "rank_0.log").read_text() == f"==> jobs/{job.name}/rank_0.log <==\nsaid\n"
    assert "|COMPLETED|" in (outputs / "sacct_77.txt").read_text()


@pytest.mark.parametrize(
    ("row", "stopped", "status"),
    [
        ("77|NODE_FAIL", None, Status.NODE_FAILED),
        ("77|PREEMPTED", None, Status.PREEMPTED),
        ("77.0|OUT_OF_MEMORY", None, Status.OUT_OF_MEMORY),
        ("77|RUNNING", "TIMEOUT", Status.TIMEOUT),
        ("77|RUNNING", None, Status.LOST),
    ],
)
def test_a_launch_that_ended_without_a_word_is_judged_by_the_accounts(
    tmp_path: Path, row: str, stopped: str | None, status: Status
) -> None:
    run = manifest(tmp_path)
    [paths] = [run.job(path.name) for path in run.jobs.iterdir()]
    job = Job.model_validate_json(paths.job.read_bytes())
    began = Launcher(node_rank=0, pid=1, pid_started=1, host="node7", started_at=utc_now())
    paths.node_launcher(0).write_text(began.model_dump_json())
    paths.submission.write_text(Submission(job_id="77.0", submitted_at=utc_now()).model_dump_json())
    said = Progress(rank=0, pid=1, pid_started=1, phase="measurement", measurement=job.measurements[0].name, since=0.0)
    paths.progress(0).write_text(said.model_dump_json())
    if stopped:
        (paths.folder / "stopped").write_text(f"{stopped}\n")
    (run.folder / "outputs" / "sacct_77.txt").write_text(f"JobID|State|NodeList\n{row}|node7\n")
    collected = collect_bundle(run.folder)
    assert [record.status for record in collected.records] == [status]
    assert collected.missing == 2  # the cell that was begun, and the other


@pytest.mark.slow
def test_a_model_travels_with_the_folder(tmp_path: Path) -> None:
    run = manifest(
        tmp_path,
        models=[{"id": "synthetic:llama-1m@0"}],
        workload={"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "num_prompts": 2, "batch_size": 2},
        experiments={"grid": {"kind": "sweep", "over": {"batch_size": [1, 2]}}},
    )
    shutil.rmtree(tmp_path / "cache")
    script = (run.folder / "submit.sbatch").read_text()
    assert script.count("\nlaunch 1 ") == 1 and script.count("\nprofiled perf 1 ") == 1
    assert script.count("\nprofiled nsys 1 ") == 2  # nsys leaves a report for each launch
    moved = RunPaths(tmp_path / "moved")
    shutil.move(run.folder, moved.folder)
    done = submit(moved, 77)
    assert done.returncode == 0, done.stdout + done.stderr
    assert collect_bundle(moved.folder).missing == 0


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, targets=[SLURM, {**SLURM, "name": "other"}]))
    local = load_study(write_study(tmp_path, "local"))
    held = load_study(write_study(tmp_path, "held", targets=[{"kind": "slurm", "allocation": "current"}]))
    cache, out = tmp_path / "cache", tmp_path / "out"
    for asked, target, said in (
        (local, None, "targets: expected one of kind slurm"),
        (held, None, "allocation: current: a bundle is a job of its own"),
        (study, None, "Select one with --target"),
        (study, "third", "unknown Slurm target 'third'\n  use one of: cluster, other"),
    ):
        with pytest.raises(StudyError, match=said):
            write_bundle(asked, tmp_path, cache, out, target)
    with pytest.raises(StudyError, match="is not an empty folder"):
        write_bundle(study, tmp_path, cache, tmp_path, "other")
    with pytest.raises(ValueError, match="not a bundle"):
        collect_bundle(tmp_path)
    assert not out.exists()


def test_a_study_that_cannot_be_a_bundle_leaves_no_half_of_one(tmp_path: Path) -> None:
    """Once the study was mended, `--out` was refused as not empty."""
    podman = {**SLURM, "container": {"image": "i", "runtime": "pyxis"}}
    (tmp_path / "out").mkdir()
    for out in ("out", "new"):
        with pytest.raises(StudyError, match="a bundle supports apptainer only"):
            manifest(tmp_path, out, targets=[podman])
        assert (tmp_path / out).exists() == (out == "out") and list(tmp_path.glob(f"{out}/*")) == []
        manifest(tmp_path, out)


def test_every_file_is_explained_and_none_is_for_nobody(tmp_path: Path) -> None:
    training = {"kind": "train", "global_batch_size": 8}
    models = [{"id": "synthetic:llama-1m@0"}]
    target = SLURM | {"ranks_per_node": 2, "launcher": "deepspeed"}
    layout = {"dp": 2, "strategy": "zero2"}
    experiments = {"sizes": {"kind": "sweep", "over": {"workload.global_batch_size": [8, 16]}}}
    run = manifest(tmp_path, workload=training, models=models, layout=layout, targets=[target], experiments=experiments)
    text = (run.folder / "README.md").read_text()
    for path in run.folder.iterdir():
        assert path.is_dir() or f"`{path.name}`" in text or path.name == "README.md", path.name
    # No one configuration of DeepSpeed describes a study: its ranks make one for each cell.
    assert "ds_config.json" not in text and list(run.folder.rglob("ds_config.json")) == []
