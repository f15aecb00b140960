"""An allocation as Slurm 22.05 described it, and what it is too small for; steps' words. On a real Slurm: lab/."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.common.base import write_atomically
from configs.plans.job import Launcher, SrunProcess, Submission, Submitting
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.targets.target import SlurmTarget
from slurm.launcher.processes import of_job
from slurm.schedulers import steps
from slurm.schedulers.commands.allocation import Allocation, allocation_lacks, current_allocation, read_cores
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.commands.partitions import Need
from slurm.schedulers.commands.step_command import last_words, waiting_reason
from tests.support.cluster.launches import read_end
from tests.support.cluster.slurm_jobs import made
from tests.support.cluster.slurm_programs import stand_in_cluster

# `scontrol --oneliner show job`, times shortened; the GPUs' part is that of TRES on a cluster that has them.
HELD = (
    "JobId=29543642 JobName=no-shell UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901757 Nice=0 "
    "Account=root QOS=normal JobState={state} Reason=None Dependency=(null) Requeue=0 Restarts=0 BatchFlag=0 Reboot=0 "
    "ExitCode=0:0 RunTime=00:00:03 SubmitTime=1000 StartTime=1016 Partition=lab NodeList=hpc[1-2] BatchHost=hpc1 "
    "NumNodes=2 NumCPUs=2 TRES=cpu=2,mem=18078M,node=2,billing=2,gres/gpu=8 Command=(null)\n"
)


def scontrol(folder: Path, text: str, code: int = 0) -> dict[str, str]:
    """An environment in which scontrol says so, in the allocation."""
    (folder / "says").write_text(text)
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\ncat {folder}/says{' >&2' if code else ''}\nexit {code}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "29543642", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}


def test_the_allocation_is_read(tmp_path: Path) -> None:
    held = current_allocation(scontrol(tmp_path, HELD.format(state="RUNNING")))
    assert held == Allocation("29543642", "RUNNING", ("hpc1", "hpc2"), (4, 4), 8)


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("ReqTRES=cpu=2,gres/gpu=9 AllocTRES=cpu=2,mem=18078M,node=2,billing=2,gres/gpu=8,gres/gpu:a100=8", 8),
        ("ReqTRES=cpu=2 AllocTRES=cpu=2,gres/gpu:a100=4,gres/gpu:h100=2,gres/gpumem=80", 6),  # counted by type alone
        ("ReqTRES=cpu=2,gres/gpu=9 AllocTRES=(null)", 0),
    ],
)
def test_gpus_are_read_as_later_versions_of_slurm_write_them(tmp_path: Path, tres: str, gpus: int) -> None:
    text = HELD.format(state="RUNNING").replace("TRES=cpu=2,mem=18078M,node=2,billing=2,gres/gpu=8", tres)
    assert current_allocation(scontrol(tmp_path, text)).gpus == gpus


@pytest.mark.parametrize(
    ("gres", "gpus"), [("gpu:h100:4", 4), ("gpu:4", 4), ("gpu:a100:1,gpu:1g.10gb:2,lustre:1", 3), ("(null)", 0)]
)
def test_gpus_are_read_where_the_cluster_does_not_account_for_them(tmp_path: Path, gres: str, gpus: int) -> None:
    """AccountingStorageTRES names none by default; the line is Slurm 22.05's, asked for details."""
    tres = f"TRES=cpu=2,mem=18078M,node=2,billing=2 Socks/Node=* CoreSpec=* JOB_GRES={gres}   "
    tres += "Nodes=hpc[1-2] CPU_IDs=0 Mem=9039 GRES=gpu:h100:2(IDX:0-1)"
    text = HELD.format(state="RUNNING").replace("TRES=cpu=2,mem=18078M,node=2,billing=2,gres/gpu=8", tres)
    told, plain = tmp_path / "details", tmp_path / "plain"
    told.write_text(text)
    plain.write_text(text.replace(f"JOB_GRES={gres}", ""))
    environment = scontrol(tmp_path, "")
    shown = f'case " $* " in *" --details "*) cat {told} ;; *) cat {plain} ;; esac'
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{shown}\n")
    held = current_allocation(environment)
    assert (held.gpus, held.nodes) == (gpus, ("hpc1", "hpc2"))


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        (HELD.format(state="TIMEOUT"), 0, r"has ended \(TIMEOUT\)"),
        ("slurm_load_jobs error: Invalid job id specified", 1, "slurmctld does not know it"),
        ("slurm_load_jobs error: Unable to contact slurm controller", 1, "does not answer"),
    ],
)
def test_an_allocation_that_is_of_no_use_is_told(tmp_path: Path, text: str, code: int, why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        current_allocation(scontrol(tmp_path, text, code))


def test_outside_of_an_allocation_the_message_says_what_to_do() -> None:
    with pytest.raises(ClusterError, match="Run inside `salloc` or a script of sbatch, or leave allocation out"):
        current_allocation({})


def test_what_does_not_fit_names_the_allocation() -> None:
    held = Allocation("7", "RUNNING", ("a", "b"), (4, 1), 2)
    target = SlurmTarget(allocation="current", gpus_per_node=2, ranks_per_node=2)
    assert allocation_lacks(target, [Need(nodes=1, cores=4)], held) == []
    cores, gpus = allocation_lacks(target, [Need(nodes=2, cores=4)], held)
    assert "job 7 is too small for 2 nodes with 4 cores each: it has 2 nodes with 4, 1 core" in cores
    assert "too small for 4 GPUs on 2 nodes: it has 2" in gpus


@pytest.mark.parametrize(
    ("text", "cores"),
    [("4(x2),1", (4, 4, 1)), ("16", (16,)), ("", ()), ("many", ()), ("4(x2),x", ()), ("1(x999999)", ())],
)
def test_cores_of_nodes_are_read(text: str, cores: tuple[int, ...]) -> None:
    assert read_cores(text) == cores


@pytest.mark.parametrize("field", [{"partition": "gpu"}, {"account": "me"}, {"exclusive": True}, {"extra": {"x": 1}}])
def test_what_only_sbatch_takes_is_refused_beside_an_allocation(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(field))):
        SlurmTarget.model_validate({"allocation": "current"} | field)


def test_the_reason_of_a_step_that_waits_is_srun_s_own(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path)
    assert (waiting_reason(paths), last_words(paths)) == ("", "")
    paths.srun_log.write_text(
        "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
        "srun: Job 7 step creation still disabled, retrying (Requested nodes are busy)\n"
    )
    assert waiting_reason(paths) == "Requested nodes are busy"
    with paths.srun_log.open("a") as log:
        log.write("srun: Step created for job 7\n")
    assert waiting_reason(paths) == ""
    paths.srun_log.write_text(
        "srun: error: Unable to create step for job 7: More processors requested than permitted\nsrun: bye\n"
    )
    assert last_words(paths) == "Unable to create step for job 7: More processors requested than permitted"


@pytest.fixture
def waiting_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobPaths]:
    """A job, and an srun that waits for nodes."""
    os.mkfifo(tmp_path / "never")
    (tmp_path / "srun").write_text(f"#!/bin/sh\nread line < {tmp_path}/never\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    paths = made(tmp_path / "run")
    yield paths
    for process in of_job(paths.folder):
        process.kill()


@pytest.mark.parametrize("file", ["srun", "submission"])
def test_an_srun_that_cannot_be_written_down_is_ended(
    waiting_step: JobPaths, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """On a full disk, or by Ctrl-C in that moment: nobody would find it."""

    def full(path: Path, *rest: str) -> None:
        assert path != waiting_step.srun or waiting_step.submission.exists(), "a later run reads it beside this one"
        if path == getattr(waiting_step, file):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, *rest)

    monkeypatch.setattr(steps, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        steps._start(waiting_step, Allocation("7", "RUNNING", ("n1",)))
    assert of_job(waiting_step.folder) == [] and not waiting_step.srun.exists()


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_srun_of_a_run_that_was_killed_before_it_wrote_it_down_is_ended(
    waiting_step: JobPaths, cancelled: bool
) -> None:
    steps._start(waiting_step, Allocation("7", "RUNNING", ("n1",)))
    for path in (waiting_step.srun, waiting_step.submission):
        path.unlink()
    assert len(of_job(waiting_step.folder)) == 1
    if cancelled:
        steps.cancel(waiting_step.folder)
    assert steps.poll(waiting_step.folder) == "ended"
    assert of_job(waiting_step.folder) == []
    assert read_end(waiting_step).status is (Status.CANCELLED if cancelled else Status.LOST)


def test_a_step_of_another_host_is_not_lost_while_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = JobPaths(tmp_path)
    paths.submission.write_text(Submission(job_id="7", submitted_at="2026-11-01T12:00:00Z").model_dump_json())
    paths.submitting.write_text(Submitting(name="rw-1").model_dump_json())
    paths.srun.write_text(SrunProcess(pid=1, pid_started=1, host="another").model_dump_json())
    paths.node_launcher(0).write_text("{}")
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    assert steps.poll(tmp_path) == "running" and not paths.end.exists()


@pytest.mark.parametrize(("held", "step"), [("29594044", "29594043_5.0"), ("29594043", "29594043_6.0")])
def test_accounts_of_a_step_in_a_task_of_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, step: str
) -> None:
    """SLURM_JOB_ID is the task's own number, the last task's that of the array; sacct's lines are Slurm 22.05's."""
    stand_in_cluster(tmp_path).says(
        "sacct",
        "JobID|State|NodeList|ElapsedRaw|JobIDRaw\n"
        "29594043_6|RUNNING|n2|9|29594043\n29594043_6.0|COMPLETED|n2|7|29594043.0\n"
        "29594043_5|RUNNING|n1|9|29594044\n29594043_5.0|COMPLETED|n1|6|29594044.0\n",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = Launcher(node_rank=0, pid=1, pid_started=1, host="n1", started_at="2026-11-01T12:00:00Z", step_id="0")
    found = steps._accounting(held, [launcher])
    assert found is not None and (found.job_id, found.elapsed_seconds) == (step, {"n1": 6, "n2": 7}[found.nodes[0]])
    assert "JobIDRaw" in (tmp_path / "sacct.calls").read_text()


def test_a_step_in_a_hidden_partition_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue shows steps there only where it is asked for all, even of a job that is named."""
    paths = made(tmp_path / "run")
    paths.submission.write_text(Submission(job_id="7", submitted_at="2026-11-01T12:00:00Z").model_dump_json())
    paths.submitting.write_text(Submitting(name="rw-1").model_dump_json())
    stand_in_cluster(tmp_path)
    (tmp_path / "squeue").write_text('#!/bin/sh\ncase " $* " in *" --all "*) echo "7.0|rw-1" ;; esac\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert steps._step_of(paths) == ("7.0", True)


def test_a_step_of_another_host_is_not_lost_where_one_look_does_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, cluster = made(tmp_path / "run"), stand_in_cluster(tmp_path)
    paths.submission.write_text(Submission(job_id="7", submitted_at="2026-11-01T12:00:00Z").model_dump_json())
    paths.submitting.write_text(Submitting(name="rw-1").model_dump_json())
    paths.srun.write_text(SrunProcess(pid=1, pid_started=1, host="another").model_dump_json())
    paths.node_launcher(0).write_text("{}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for shown in ("", "7.0|rw-1\n", "7.1|other\n"):
        cluster.says("squeue", shown)
        assert steps.poll(paths.folder) == "running" and not paths.end.exists()
    assert steps.poll(paths.folder) == "ended"
