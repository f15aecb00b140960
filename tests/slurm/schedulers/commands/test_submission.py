"""What sbatch and srun are asked for."""

from pathlib import Path
from typing import Any

import pytest

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from slurm.launcher.containers import srun_container, wrapped
from slurm.launcher.peer_monitor import limits_of
from slurm.schedulers.commands.calls import run_slurm
from slurm.schedulers.commands.listing import ClusterNode
from slurm.schedulers.commands.listing import asked as slurm_answer
from slurm.schedulers.commands.step_command import step_environment
from slurm.schedulers.commands.submission import _run_sbatch, parameters, sbatch, submission_environment
from slurm.schedulers.commands.trial import trial
from slurm.schedulers.refusals import Refused, Unavailable


def job(**target: Any) -> Job:
    cell = Cell(workload=NoopWorkload(), layout=Layout(dp=2), nodes=1)
    return Job(
        name="j", study="s", measuring_pass="timed", measuring=Measuring(), ranks_per_node=2, timeout_seconds=60,
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),), inputs="", cache="",
        target=SlurmTarget.model_validate(target),
    )  # fmt: skip


def asked(**target: Any) -> dict[str, Any]:
    return parameters([job(**target)], "rw-1", "/runs/s", Path("/work"))


def test_gpus_are_asked_for_once_by_either_name() -> None:
    plain = asked(gpus_per_node=4, ranks_per_node=4)
    assert plain["gpus_per_node"] == 4 and "gres" not in plain["additional_parameters"]
    by_gres = asked(gpus_per_node=4, ranks_per_node=4, gres="gpu:a100:4")
    assert by_gres["gpus_per_node"] is None and by_gres["additional_parameters"]["gres"] == "gpu:a100:4"


def test_a_retry_leaves_out_nodes_beside_those_that_the_target_excludes() -> None:
    """sbatch has one --exclude: the target's took the place of the failed node's, to which the retry went again."""
    retried = job(extra={"exclude": "n[1-2]"}).model_copy(update={"exclude": ("n7", "n8")})
    assert parameters([retried], "rw-1", "/runs/s", Path("/work"))["additional_parameters"]["exclude"] == "n[1-2],n7,n8"
    assert asked(extra={"exclude": "n[1-2]"})["additional_parameters"]["exclude"] == "n[1-2]"
    by_file = job(extra={"exclude": "./bad"}).model_copy(update={"exclude": ("n7",)})
    assert parameters([by_file], "rw-1", "/runs/s", Path("/work"))["additional_parameters"]["exclude"] == "./bad"
    plain = parameters([job().model_copy(update={"exclude": ("n7",)})], "rw-1", "/runs/s", Path("/work"))
    assert plain["exclude"] == "n7" and "exclude" not in plain["additional_parameters"]
    listed = job(name="gpus", extra={"nodelist": "n[7-8]"})
    assert parameters([listed], "rw-1", "/runs/s", Path("/work"))["additional_parameters"]["nodelist"] == "n[7-8]"
    with pytest.raises(Refused, match=r"of gpus: jobs that list their nodes \(n\[7-8\]\) can leave none out \(n7\)"):
        parameters([listed.model_copy(update={"exclude": ("n7",)})], "rw-1", "/runs/s", Path("/work"))


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_nodes_that_bring_an_image_are_waited_for_and_the_job_lives_as_long(runtime: str) -> None:
    """Each node brings it by itself: one that was a minute behind the head was blamed, and left out of the retry."""
    container = {"image": "docker://ghcr.io/rw/rw:1", "runtime": runtime}
    assert limits_of(SlurmTarget()).call_seconds == 30 and asked()["time"] == 3
    assert limits_of(SlurmTarget.model_validate({"container": container})).call_seconds == 300
    assert asked(container=container)["time"] == 8, "60 s of ranks, 120 around, 270 more for the nodes"


def test_options_of_srun_come_after_ours_where_the_last_one_counts() -> None:
    assert asked(srun_args=["--mpi=pmix", "--cpu-bind=cores"])["srun_args"][-3:] == [
        "--mpi=none",
        "--mpi=pmix",
        "--cpu-bind=cores",
    ]


def test_a_comment_takes_the_place_of_the_run_folder() -> None:
    assert asked()["comment"] == "/runs/s"
    assert asked(comment="project 7")["comment"] == "project 7"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gres": "gpu:a100:4"}, "gres: got gpu:a100:4, and gpus_per_node None"),
        ({"gres": "gpu:2,lustre:1", "gpus_per_node": 4}, "make them equal"),
        ({"gres": "lustre:1"}, "gres"),
        ({"srun_args": ["--ntasks=9"]}, "srun_args"),
        ({"srun_args": ["mpi"]}, "got 'mpi', expected an option such as --mpi=pmix"),
        ({"job_name": "a b"}, "job_name"),
        ({"comment": "two\nlines"}, "comment"),
        ({"partition": "gpu\ntouch /tmp/x"}, "partition\n.*got 'gpu.ntouch /tmp/x', expected one line"),
        ({"account": "lab\n"}, "account\n.*expected one line"),
        (
            {"extra": {"licenses": "gpfs\ntouch /tmp/x"}},
            "extra\n.*licenses: got 'gpfs.ntouch /tmp/x', expected one line",
        ),
        ({"extra": {"licenses\n": "gpfs"}}, "is not a long option of sbatch"),
    ],
)
def test_what_cannot_be_asked_for_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        SlurmTarget.model_validate(fields)


@pytest.mark.parametrize(
    ("gres", "kind"),
    [
        ("gpu:4", None),
        ("gpu:h100:4", "h100"),
        ("gpu:2080ti:4", "2080ti"),
        ("gpu:3090:4", "3090"),
        ("gpu:1g.10gb:4,lustre:1", "1g.10gb"),
    ],
)
def test_gpus_are_named_by_any_type_that_slurm_takes(gres: str, kind: str | None) -> None:
    target = SlurmTarget(gres=gres, gpus_per_node=4)
    assert target.gpu_type == kind
    node = ClusterNode("n1", 8, 1000, "idle", (), f"{gres.partition(',')[0]}(S:0-1)")
    assert node.gpus_of(kind) == 4


def test_pyxis_has_srun_start_the_tasks_in_the_image() -> None:
    container = {"image": "/images/rw.sqsh", "runtime": "pyxis", "binds": ["/data:/data:ro"]}
    target = SlurmTarget.model_validate({"container": container, "shared": "/scratch"})
    assert wrapped(["python3"], target, ["/runs"]) == ["python3"]
    assert srun_container(["/runs/s", "/runs/s/jobs/1", "/cache"], target) == [
        "--container-image=/images/rw.sqsh",
        "--container-mounts=/cache:/cache,/runs/s:/runs/s,/scratch:/scratch,/data:/data:ro",
        "--container-workdir=/runs/s",
    ]
    assert srun_container(["/runs"], SlurmTarget()) == []
    with pytest.raises(ValueError, match="pyxis does not support commas and colons"):
        srun_container(["/runs/a,b"], target)


def test_what_a_site_writes_in_another_encoding_loses_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_bytes(b"#!/bin/sh\nprintf 'acc\\351l\\351r\\351\\n' >&2\necho Submitted batch job 12\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert _run_sbatch(tmp_path / "script.sh", SlurmTarget()) == "Submitted batch job 12\n"
    answer = run_slurm([str(program)], {"PATH": "/usr/bin:/bin"}, 10)
    assert not answer.failed and answer.text == "Submitted batch job 12\n"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("Submitted batch job 12\\n", "12"),
        ("Submitted batch job 12 on cluster b\\n", "12"),
        ("--> 3 of 50 jobs in the queue, your last was job 7\\nSubmitted batch job 12\\n", "12"),
        ("Welcome\\n", None),
    ],
)
def test_what_a_site_writes_beside_the_jobs_id_names_no_other_job(
    said: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id of job 7 was kept, which would have been watched, and cancelled; without an id the run broke off."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nprintf %b '{said}'\n")  # without srun, as on some login nodes
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "run" / "jobs" / "j"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(job().model_dump_json())
    if found is not None:
        assert sbatch([folder], "rw-1", "", tmp_path / "work") == [found]
        return
    with pytest.raises(Unavailable, match="sbatch: no job id in its answer 'Welcome") as caught:
        sbatch([folder], "rw-1", "", tmp_path / "work")
    assert caught.value.may_have_taken


def test_no_variable_overrules_what_a_target_says_by_a_further_option() -> None:
    """sbatch takes its variables before what the script says: jobs were charged to the account of the shell."""
    own = {"SBATCH_ACCOUNT": "mine", "SBATCH_QOS": "normal"}
    assert submission_environment(SlurmTarget(), own) == own
    assert submission_environment(SlurmTarget(extra={"account": "project"}), own) == {"SBATCH_QOS": "normal"}


def test_what_a_job_has_of_its_own_is_not_handed_to_the_jobs_that_are_submitted_from_it() -> None:
    """Its folder for temporary files is gone when it ends, and mpirun of the new job took its variables of PMI."""
    temporary, kept = {"TMPDIR": "/scratch/4711"}, {"TMP": "/tmp/u47110", "SLURM_CONF": "/etc/slurm.conf"}
    own = {"SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "n1", "PMIX_RANK": "0", "PMI_SIZE": "1", **temporary, **kept}
    assert submission_environment(SlurmTarget(), own) == kept
    assert submission_environment(SlurmTarget(), temporary) == temporary
    step = step_environment(SlurmTarget(allocation="current"), own)
    assert step == kept | temporary | {"PYTHONSAFEPATH": "1"}


def test_no_variable_sends_a_job_to_another_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch takes SLURM_CLUSTERS before what its script says; ids of one cluster name other jobs on the next."""
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\necho Submitted batch job 12\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CLUSTERS", "b")
    monkeypatch.setenv("SBATCH_CLUSTERS", "b")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    target = SlurmTarget(cluster="a")

    def told() -> set[str]:
        names = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
        return {name for name in names if name.startswith(("SLURM_", "SBATCH_"))}

    _run_sbatch(tmp_path / "script.sh", target)
    assert told() == {"SLURM_CONF"}
    assert trial(target, nodes=1, cores=1) is None
    assert told() == {"SLURM_CONF"}
    program.rename(tmp_path / "sinfo")
    slurm_answer(["sinfo"])
    assert "SLURM_CLUSTERS" not in told()
