"""What becomes of jobs by what the programs of PBS answer; they are stand-ins. On a real PBS: tests/slurm/lab."""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.plans.job import Job, JobEnd, Submission, Submitting
from configs.plans.paths import JobPaths
from configs.records.record import Accounting, Status
from configs.targets.target import PbsTarget
from slurm.launcher.node import PBS_NODES, pbs_node, rank_under
from slurm.schedulers import cluster, ending
from slurm.schedulers.commands.partitions import Need
from slurm.schedulers.pbs.jobs import host_names, read_jobs, size_bytes
from slurm.schedulers.pbs.submission import job_script, options, qsub_refusal
from slurm.schedulers.pbs.vnodes import read_nodes
from slurm.schedulers.refusals import REFUSED, Limited, Refused, Unavailable
from tests.support.cluster.launches import read_end, wait_until
from tests.support.cluster.slurm_jobs import begin, made, node_ends
from tests.support.cluster.slurm_programs import Cluster, stand_in_pbs

JOB = "7.head"


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = stand_in_pbs(tmp_path)
    monkeypatch.setattr(cluster, "shared_pbs_queue", lambda *_: found.queue)
    monkeypatch.setattr(ending, "LOST_SECONDS", 0.1)
    monkeypatch.setattr(ending, "ACCOUNTS_SECONDS", 0.1)
    monkeypatch.setenv("PATH", found.queue.environment["PATH"])
    return found


def told(state: str, job_id: str = JOB, **fields: Any) -> str:
    """An answer of qstat on one job of two nodes."""
    job = {"job_state": state, "exec_host": "n1/0+n2/0*2", "etime": "Mon Nov 23 12:54:56 2026"} | fields
    lines = [f"    {name} = {value}" for name, value in job.items()]
    return "\n".join([f"Job Id: {job_id}", *lines, "    Variable_List = PBS_O_HOME=/root,A = b", "", ""])


def made_job(tmp_path: Path, submitted: bool = True, **target: Any) -> JobPaths:
    under = PbsTarget.model_validate({"name": "lab", "nodes": 2, "poll_seconds": 0.01} | target)
    paths = made(tmp_path / "run", nodes=2, under=under)
    if submitted:
        paths.submitting.write_text(Submitting(name="rw-1-0001-timed").model_dump_json())
        paths.submission.write_text(Submission(job_id=JOB, submitted_at="2026-11-01T12:00:00Z").model_dump_json())
    return paths


def polls(paths: JobPaths, condition: Callable[[], bool]) -> None:
    wait_until(lambda: (cluster.poll(paths.folder), condition())[1], "the queue's thread", limit_seconds=20)


def ended(paths: JobPaths) -> JobEnd:
    polls(paths, paths.end.exists)
    return read_end(paths)


@pytest.mark.parametrize(
    ("state", "fields", "word"),
    [
        ("Q", {}, "PENDING"),
        ("H", {}, "PENDING"),
        ("R", {"substate": 42}, "RUNNING"),
        ("E", {}, "COMPLETING"),
        ("S", {}, "SUSPENDED"),
        ("F", {"Exit_status": 0, "substate": 92}, "COMPLETED"),
        ("F", {"Exit_status": 3, "substate": 93}, "FAILED"),
        ("F", {"Exit_status": -29, "substate": 93}, "TIMEOUT"),
        ("F", {"Exit_status": -27, "substate": 93}, "OUT_OF_MEMORY"),
        ("F", {"Exit_status": -14, "substate": 93}, "NODE_FAIL"),
        ("F", {"Exit_status": -1, "substate": 93}, "LAUNCH_FAILED"),
        ("F", {"Exit_status": 0, "substate": 91}, "CANCELLED"),  # qdel of one that handled SIGTERM
        ("F", {"substate": 91}, "CANCELLED"),  # of one that waited
        ("new", {}, "RUNNING"),
    ],
)
def test_states_are_translated(state: str, fields: dict[str, Any], word: str) -> None:
    assert read_jobs(told(state, **fields))[JOB].sight.state == word


def test_accounts_are_in_the_same_answer() -> None:
    used = {"walltime": "00:01:02", "cput": "00:00:30", "mem": "2048kb"}
    used = {f"resources_used.{name}": value for name, value in used.items()}
    text = told("F", Exit_status=0, stime="Mon Nov 23 12:55:06 2026", **used)
    accounting = read_jobs(text)[JOB].account.accounting
    assert accounting == Accounting(
        job_id=JOB, state="COMPLETED", nodes=("n1", "n2"), queued_seconds=10, elapsed_seconds=62, cpu_seconds=30
    )
    alone = read_jobs(text.replace("n1/0+n2/0*2", "n1/0"))[JOB].account.accounting
    assert alone.max_rss_bytes == 2 << 20


def test_the_first_node_is_to_blame_where_its_daemon_is_gone() -> None:
    assert read_jobs(told("F", Exit_status=-20))[JOB].account.failed_nodes == ("n1",)
    assert read_jobs(told("F", Exit_status=-14))[JOB].account.failed_nodes == ()


@pytest.mark.parametrize(
    "text", ["", "{", "    job_state = R", "Job Id: 7.head\n    Job_Name = x", "qstat: End of File"]
)
def test_what_is_no_answer_shows_no_job(text: str) -> None:
    assert read_jobs(text) == {}


def test_several_jobs_are_one_answer() -> None:
    jobs = read_jobs(told("R") + told("Q", "8.head", comment="Not Running: x = y"))
    assert {name: job.sight.state for name, job in jobs.items()} == {JOB: "RUNNING", "8.head": "PENDING"}
    assert jobs["8.head"].sight.reason == "x = y"


def test_sizes_and_hosts() -> None:
    assert [size_bytes(text) for text in ("16gb", "3", "1kb", "x", "9" * 40)] == [16 << 30, 3, 1024, None, None]
    assert [size_bytes(text) for text in ("2gw", "512w", "w")] == [16 << 30, 4096, None]  # of eight bytes each
    assert host_names("n1/0*4+n2/1+n1/3") == ("n1", "n2") and host_names("") == ()


def test_a_time_limit_decides_over_nodes_that_were_told_to_end(pbs: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    pbs.says("qstat", told("R"))
    polls(paths, lambda: cluster.note(paths.folder) == f"job {JOB} on n1, n2")
    begin(paths)
    node_ends(paths, Status.CANCELLED)
    pbs.says("qstat", told("F", Exit_status=-29, substate=93, comment="and exceeded resource walltime"))
    end = ended(paths)
    assert (end.status, end.kind) == (Status.TIMEOUT, "TIMEOUT")
    assert end.message == "PBS ended the job at its time limit (TIMEOUT; and exceeded resource walltime)"
    assert Accounting.model_validate_json(paths.accounting.read_bytes()).nodes == ("n1", "n2")


def test_a_server_that_does_not_answer_loses_no_job_and_is_asked_ever_less(pbs: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    pbs.says("qstat", told("R"))
    polls(paths, lambda: bool(cluster.note(paths.folder).endswith("n2")))
    pbs.away("qstat", "Connection refused\nqstat: cannot connect to server head (errno=15010)")
    before, until = len(pbs.calls("qstat")), time.monotonic() + 1.0
    while time.monotonic() < until:
        assert cluster.poll(paths.folder) == "running"
        time.sleep(0.01)
    assert 2 <= len(pbs.calls("qstat")) - before <= 8
    assert not paths.end.exists() and pbs.calls("qdel") == []


@pytest.mark.parametrize("status", [Status.COMPLETED, None])
def test_a_job_without_a_history_ends_as_its_nodes_say_else_it_is_lost(
    pbs: Cluster, tmp_path: Path, status: Status | None
) -> None:
    paths = made_job(tmp_path)
    begin(paths)
    if status is not None:
        node_ends(paths, status)
    assert ended(paths).status is (status or Status.LOST)
    assert pbs.calls("qdel") == ([] if status else [JOB])


NO_HISTORY = """#!/bin/sh
echo "$@" >> {folder}/{name}.calls
case "$1" in -x) echo "{name}: job_history_enable is set to false" >&2; exit 0;; esac
cat {folder}/{name}.says; exit $(cat {folder}/{name}.code)
"""
"""What a server without a history answers to `-x`: nothing, of whatever job, with exit code 0."""


def without_history(pbs: Cluster) -> None:
    for name in ("qstat", "qselect"):
        (pbs.folder / name).write_text(NO_HISTORY.format(folder=pbs.folder, name=name))
        (pbs.folder / f"{name}.code").write_text("0")


def test_jobs_of_a_server_without_a_history_are_seen_and_end(pbs: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    without_history(pbs)
    pbs.says("qstat", told("R"))
    polls(paths, lambda: cluster.note(paths.folder) == f"job {JOB} on n1, n2")
    begin(paths)
    node_ends(paths, Status.COMPLETED)
    pbs.says("qstat", "")
    (pbs.folder / "qstat.code").write_text("153")
    assert ended(paths).status is Status.COMPLETED
    assert sum(call.startswith("-x") for call in pbs.calls("qstat")) == 1


def test_a_job_of_a_server_without_a_history_is_found_by_its_name(pbs: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    paths.submission.unlink()
    without_history(pbs)
    pbs.says("qselect", f"{JOB}\n")
    cluster.poll(paths.folder)
    assert Submission.model_validate_json(paths.submission.read_bytes()).job_id == JOB


def test_a_waiting_job_of_a_server_without_a_history_that_is_cancelled_is_not_lost(
    pbs: Cluster, tmp_path: Path
) -> None:
    paths = made_job(tmp_path)
    without_history(pbs)
    pbs.says("qstat", told("Q"))
    polls(paths, lambda: pbs.calls("qstat") != [])
    pbs.says("qstat", "")
    (pbs.folder / "qstat.code").write_text("153")
    cluster.cancel(paths.folder)
    assert (read_end(paths).status, read_end(paths).message) == (Status.CANCELLED, "cancelled on request")


def test_two_jobs_are_one_call(pbs: Cluster) -> None:
    queue = pbs.queue
    for job_id in (JOB, "8.head"):
        queue.watch(job_id, 60.0)
    queue.look()
    assert pbs.calls("qstat") == [f"-x -f -w {JOB} 8.head"]


def test_a_requeue_is_ended_and_no_result(pbs: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    pbs.says("qstat", told("R"))
    begin(paths)
    polls(paths, lambda: bool(cluster.note(paths.folder).endswith("n2")))
    pbs.says("qstat", told("Q", comment="Not Running: Server has been requeued"))
    polls(paths, lambda: pbs.calls("qdel") == [JOB])
    assert not paths.end.exists()
    pbs.says("qstat", told("F", substate=91))
    end = ended(paths)
    assert end.status is Status.PREEMPTED and "PBS requeued the job" in (end.message or "")


def test_reasons_to_wait(pbs: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_HOPELESS_SECONDS", 0.1)
    paths = made_job(tmp_path)
    pbs.says("qstat", told("Q", comment="Not Running: Insufficient amount of resource: ncpus"))
    reason = f"job {JOB} pending: Insufficient amount of resource: ncpus"
    polls(paths, lambda: cluster.note(paths.folder) == reason)
    pbs.says("qstat", told("H", Hold_Types="u"))
    polls(paths, lambda: cluster.note(paths.folder) == f"job {JOB} held (Hold_Types u). `qrls {JOB}` lets it start")
    pbs.says("qstat", told("Q", comment="Can Never Run: Insufficient amount of resource: ncpus (R: 9 A: 4 T: 4)"))
    end = ended(paths)
    assert (end.status, end.kind) == (Status.FAILED, REFUSED) and pbs.calls("qdel") == [JOB]
    assert "target.cores_per_rank of lab: PBS cannot start the job: Can Never Run" in (end.message or "")


def test_a_job_whose_submitter_died_is_found_by_its_name(pbs: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    paths.submission.unlink()
    pbs.says("qselect", f"3.head\n{JOB}\n")
    pbs.says("qstat", told("R"))
    polls(paths, lambda: cluster.note(paths.folder) == f"job {JOB} on n1, n2")
    assert pbs.calls("qselect") == ["-x -N rw-1-0001-timed"]


def test_a_job_of_a_run_folder_that_was_removed_is_not_taken_for_one_that_was_not_taken(
    pbs: Cluster, tmp_path: Path
) -> None:
    """The server keeps the former job for weeks; it is asked for the new one by its name, since it did not answer."""
    pbs.says("qsub", "3.head\n")
    paths = made_job(tmp_path, submitted=False)
    cluster.submit(paths.folder)
    former = Submitting.model_validate_json(paths.submitting.read_bytes()).name
    (pbs.folder / "qselect").write_text(f'#!/bin/sh\ncase "$*" in *" {former}") echo 3.head;; esac\n')
    shutil.rmtree(tmp_path / "run")
    paths = made_job(tmp_path, submitted=False)
    pbs.away("qsub", "qsub: cannot connect to server head (errno=15010)")
    with pytest.raises(Unavailable):
        cluster.submit(paths.folder)
    name = Submitting.model_validate_json(paths.submitting.read_bytes()).name
    pbs.says("qsub", "4.head\n")
    cluster.submit(paths.folder)
    assert Submission.model_validate_json(paths.submission.read_bytes()).job_id == "4.head"
    # The server may have taken it the first time after all: it is known by one name.
    assert Submitting.model_validate_json(paths.submitting.read_bytes()).name == name != former


def test_submitting_names_everything_that_is_asked(pbs: Cluster, tmp_path: Path) -> None:
    target = {
        "queue": "gpu", "account": "a", "project": "p", "gpus_per_node": 1, "memory_per_node": "2gb",
        "place": "scatter:excl", "chunk": {"model": "x"}, "resources": {"fs": "home"}, "attributes": {"umask": 27},
        "time_limit_minutes": 2, "server": "head", "setup": ["export A='1 2'"], "python": "/p y/python",
    }  # fmt: skip
    paths = made_job(tmp_path, submitted=False, **target)
    pbs.says("qsub", f"{JOB}\n")
    cluster.submit(paths.folder)
    assert Submission.model_validate_json(paths.submission.read_bytes()).job_id == JOB
    (call,) = pbs.calls("qsub")
    name = Submitting.model_validate_json(paths.submitting.read_bytes()).name
    assert call == (
        f"-N {name} -r n -m n -j oe -o /dev/null -S /bin/bash -l select=2:ncpus=1:mpiprocs=1:ngpus=1:mem=2gb:model=x "
        f"-l place=scatter:excl -q gpu -A a -P p -l fs=home -W umask=27 -l walltime=00:02:00 {paths.folder}/pbs.sh"
    )
    job = Job.model_validate_json(paths.job.read_bytes())
    assert options(job, "x")[:2] == ["-N", "x"]
    script = job_script(job, paths.folder, Path("/opt/bin/pbsdsh"))
    assert (paths.folder / "pbs.sh").read_text() == script.replace("/opt/bin", str(tmp_path))
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_sites_default_of_processes_puts_no_node_into_the_list_twice(tmp_path: Path) -> None:
    """PBS adds a queue's `default_chunk.mpiprocs = 4` to a chunk that says nothing of it: each node came four times in
    PBS_NODEFILE, and no job began."""
    job = Job.model_validate_json(made_job(tmp_path).job.read_bytes())
    select = next(word for word in options(job, "x") if word.startswith("select="))
    chunk = {"mpiprocs": "4"} | dict(part.split("=") for part in select.split(":")[1:])
    names = [name for name in ("n1", "n2") for _ in range(int(chunk["mpiprocs"]))]
    node = pbs_node({"PBS_JOBID": JOB, "PBS_NODENUM": "1", PBS_NODES: ",".join(names)})
    assert node.names == ("n1", "n2")


@pytest.mark.parametrize("around", ["{}", "Checking queue limits: 3 of 50\n{}", "{}\nYour job is in queue gpu", " {} "])
def test_the_id_is_told_apart_from_what_a_site_writes(pbs: Cluster, tmp_path: Path, around: str) -> None:
    paths = made_job(tmp_path, submitted=False)
    pbs.says("qsub", f"{around.format(JOB)}\n")
    cluster.submit(paths.folder)
    assert Submission.model_validate_json(paths.submission.read_bytes()).job_id == JOB


def test_the_script_hands_the_nodes_on(tmp_path: Path) -> None:
    """A stand-in for pbsdsh starts what it is given on two nodes, one after the other."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PBS_NODENUM of ${PBS_NODES}: $*" >> {tmp_path}/seen\n')
    pbsdsh = tmp_path / "pbsdsh"
    pbsdsh.write_text('#!/bin/sh\nshift\nfor n in 0 1; do PBS_NODENUM=$n "$@"; done\n')
    (tmp_path / "nodes").write_text("n1\nn2\n")
    for each in (python, pbsdsh):
        each.chmod(0o755)
    paths = made_job(tmp_path, python=str(python))
    script = job_script(Job.model_validate_json(paths.job.read_bytes()), paths.folder, pbsdsh)
    (paths.folder / "pbs.sh").write_text(script)
    done = subprocess.run(
        ["bash", paths.folder / "pbs.sh"], env={"PATH": "/usr/bin:/bin", "PBS_NODEFILE": f"{tmp_path}/nodes"}
    )
    assert done.returncode == 0
    command = f"-m slurm.launch {paths.folder}/job.json"
    assert (tmp_path / "seen").read_text() == f"0 of n1,n2: {command}\n1 of n1,n2: {command}\n"


@pytest.mark.parametrize(
    ("words", "kind", "field"),
    [
        ("qsub: Unknown queue", Refused, "target.queue 'gpu' of lab: qsub: Unknown queue"),
        ("qsub: Unknown resource: foo", Refused, "target.chunk"),
        ("qsub: Unknown resource Resource_List.nosuch", Refused, "target.resources"),
        ("qsub: Illegal attribute or resource value Resource_List.walltime", Refused, "target.time_limit_minutes"),
        ("qsub: Invalid account", Refused, "target.account 'a'"),
        ("qsub: illegal -N value", Refused, "target.job_name of lab"),
        ("qsub: something new", Refused, "target lab: qsub: something new"),
        ("qsub: would exceed limit on jobs in the queue", Limited, "would exceed"),
        ("Connection refused\nqsub: cannot connect to server head (errno=15010)", Unavailable, "cannot connect"),
        ("Connection refused\nqsub: cannot connect to server hpc-nodes (errno=111)", Unavailable, "cannot connect"),
        ("qsub: cannot connect to server account-max_queued.site (errno=15010)", Unavailable, "cannot connect"),
    ],
)
def test_refusals_name_the_field(words: str, kind: type[Exception], field: str) -> None:
    error = qsub_refusal(words, PbsTarget(name="lab", queue="gpu", account="a"))
    assert type(error) is kind and field in str(error)


def test_what_pbs_cannot_do_is_refused_by_name(pbs: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path, submitted=False)
    job = Job.model_validate_json(paths.job.read_bytes()).model_copy(update={"exclude": ("n1",)})
    paths.job.write_text(job.model_dump_json())
    with pytest.raises(Refused, match=r"PBS cannot leave nodes out \(n1\)"):
        cluster.submit(paths.folder)
    assert not paths.submitting.exists() and pbs.calls("qsub") == []
    with pytest.raises(ValueError, match="pyxis, a plugin of Slurm"):
        PbsTarget.model_validate({"container": {"image": "a", "runtime": "pyxis"}})
    for field in ({"chunk": {"ncpus": 2}}, {"resources": {"select": 1}}, {"chunk": {"a": "b+c"}}):
        with pytest.raises(ValueError):
            PbsTarget.model_validate(field)


def vnode(**fields: Any) -> dict[str, Any]:
    return {"state": "free", "resources_available": {"ncpus": 4, "mem": "8388608kb", "ngpus": 1} | fields}


def test_what_a_queue_and_its_nodes_lack() -> None:
    nodes = {"a": vnode(host="a"), "b": vnode(host="b"), "c": vnode(host="c") | {"state": "down,offline"},
             "d": vnode(host="d", ncpus=64) | {"queue": "big"}}  # fmt: skip
    queues = {"workq": {"enabled": "True", "started": "False", "resources_max": {"walltime": "01:00:00"}}, "big": {}}
    found = read_nodes({"pbs_server": "head", "nodes": nodes}, {"Queue": queues})
    target = PbsTarget(queue="big", nodes=2)
    assert found.lacks(target, [Need(2, 4)]) == []
    assert found.lacks(PbsTarget(queue="bg"), []) == [
        "queue: unknown queue bg of server head\n  use one of: big, workq"
    ]
    assert found.lacks(PbsTarget(queue="workq", time_limit_minutes=90), []) == [
        "queue: workq starts no jobs (started is False)",
        "time_limit_minutes: got 90, but queue workq allows 60",
    ]
    (cores,) = found.lacks(target, [Need(2, 8)])
    assert cores.startswith(
        "nodes: server head cannot give 2 nodes with 8 cores each: it has 3 nodes of 4 CPUs, 8192 MB"
    )
    (away,) = found.lacks(PbsTarget(), [Need(3, 4)])
    assert "now: c is down (down) (pbsnodes -l says why)" in away
    (memory,) = found.lacks(PbsTarget(memory_per_node="9gb"), [Need(1, 1)])
    assert "9216 MB" in memory
    (words,) = found.lacks(PbsTarget(memory_per_node="2gw"), [Need(1, 1)])
    assert "16384 MB" in words, "it was taken for nothing asked"
    assert found.identity(PbsTarget()) == "server head, default queue, nodes of 4 CPUs, 8 GiB, 1 GPU"
    silent = read_nodes({"pbs_server": "head", "nodes": {"a": vnode(host="a", mem="")}}, {"Queue": queues})
    assert silent.lacks(PbsTarget(), [Need(1, 4, 16_000)]) == []


@pytest.mark.parametrize("queue", [None, "route"])
def test_nodes_that_are_all_kept_for_queues_are_those_of_the_default_queue_too(queue: str | None) -> None:
    nodes = {"a": vnode(host="a") | {"queue": "workq"}, "b": vnode(host="b") | {"queue": "workq"}}
    queues = {name: {"queue_type": "Execution"} for name in ("workq", "debug")} | {"route": {"queue_type": "Route"}}
    found = read_nodes({"pbs_server": "head", "nodes": nodes}, {"Queue": queues})
    assert found.lacks(PbsTarget(queue=queue, nodes=2), [Need(2, 4)]) == []
    assert found.identity(PbsTarget(queue=queue)).endswith("nodes of 4 CPUs, 8 GiB, 1 GPU")
    (none,) = found.lacks(PbsTarget(queue="debug"), [Need(1, 4)])
    assert none.endswith("it has no nodes")


def test_a_node_knows_its_place() -> None:
    variables = {"PBS_JOBID": JOB, "PBS_NODENUM": "1", PBS_NODES: "n1,n2"}
    assert rank_under("pbs", variables) == 1 and rank_under("slurm", variables) is None
    assert rank_under("pbs", {"PBS_JOBID": JOB}) is None
    node = pbs_node(variables)
    assert (node.name, node.head, node.count, node.job_id) == ("n2", "n1", 2, JOB)
    for nodes in ("n1", "n1,n1"):
        with pytest.raises(ValueError, match="PBS_NODENUM"):
            pbs_node(variables | {PBS_NODES: nodes})
