"""The launcher with real ranks: what it starts, how it notices every kind of end, that it leaves nothing."""

import base64
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from configs.common.system.proc import start_ticks
from configs.plans.job import Job, JobEnd, Launcher, Progress, Submission, Submitting
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.targets.target import EndpointTarget, LocalTarget, SlurmTarget
from slurm.launch import is_second_time, is_superseded, write_launcher
from slurm.launcher import ranks
from slurm.launcher.end_cause import NotStartedError
from slurm.launcher.job_files import write_unlaunched_end
from slurm.launcher.node import PBS_NODES, JobNode
from slurm.launcher.node_registration import Rendezvous
from slurm.launcher.processes import oom_kills
from slurm.launcher.ranks import RankSupervisor
from slurm.launcher.starting import exits_file, is_private, rank_environment, start_argv, torchrun_argv
from slurm.staging.version import code_version
from tests.support.cluster.launches import (
    assert_nothing_left,
    in_measurement,
    launch_alone,
    leftovers,
    noop_measurement,
    part,
    read_end,
    read_job,
    read_progress,
    wait_until,
    write_job,
)


@pytest.mark.parametrize(
    ("restarts", "written", "driven", "second"),
    [
        ("1", 0, True, True),
        ("2", 1, True, True),
        ("1", 1, True, False),  # by a launcher of this time, on another node
        ("", 0, True, False),
        ("0", 0, True, False),
        ("1", None, True, False),  # requeued before any launcher began: this is the first time
        ("1", 0, False, False),  # a bundle's job goes on where it stopped
    ],
)
def test_a_requeued_job_is_not_begun_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarts: str,
    written: int | None,
    driven: bool,
    second: bool,
) -> None:
    paths = write_job(tmp_path, [noop_measurement("a", ranks=2)])
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    if driven:
        paths.submitting.write_text(Submitting(name="rw-1").model_dump_json())
    if written is not None:
        launcher = Launcher(pid=1, pid_started=1, host="n1", started_at="2026-11-01T12:00:00Z", restarts=written)
        paths.node_launcher(0).write_text(launcher.model_dump_json())
    assert is_second_time(paths, 0) is second


@pytest.mark.parametrize(
    ("own", "known", "ended", "superseded"),
    [
        ({"SLURM_JOB_ID": "7"}, None, False, False),  # sbatch has not told the id yet
        ({"SLURM_JOB_ID": "7"}, "7", False, False),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1", False, False),
        ({"SLURM_JOB_ID": "7"}, "8", False, True),  # taken late, and submitted again
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "8_1", False, True),
        ({"SLURM_JOB_ID": "7"}, "7", True, True),  # given up before it began
        ({}, "8", False, False),
        ({"SLURM_JOB_ID": "7"}, "6.3", None, False),  # a bundle's, which goes on in another job
    ],
)
def test_a_job_that_slurm_took_late_is_not_run_beside_its_second_submission(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, str],
    known: str | None,
    ended: bool | None,
    superseded: bool,
) -> None:
    paths = write_job(tmp_path, [noop_measurement("a")])
    if ended is not None:
        paths.submitting.write_text(Submitting(name="rw-1").model_dump_json())
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    node = {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    for name, value in (own and {**node, **own}).items():
        monkeypatch.setenv(name, value)
    if known is not None:
        paths.submission.write_text(Submission(job_id=known, submitted_at="2026-11-01T12:00:00Z").model_dump_json())
    if ended:
        write_unlaunched_end(paths, Status.CANCELLED, "cancelled on request")
    assert is_superseded(paths) is superseded


def test_a_superseded_job_leaves_no_launcher_and_no_end(tmp_path: Path) -> None:
    paths = write_job(tmp_path, [noop_measurement("a")])
    job = read_job(paths.folder).model_copy(update={"target": SlurmTarget()})
    paths.job.write_text(job.model_dump_json())
    paths.submitting.write_text(Submitting(name="rw-1").model_dump_json())
    paths.submission.write_text(Submission(job_id="8", submitted_at="2026-11-01T12:00:00Z").model_dump_json())
    node = {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7"}
    command = [sys.executable, "-m", "slurm.launch", str(paths.job)]
    assert subprocess.run(command, env={**os.environ, **node}, timeout=600).returncode == 0
    assert not paths.node_launcher(0).exists() and not paths.node_end(0).exists()
    assert "submitted again meanwhile, and not run" in paths.node_log(0).read_text()


def test_the_folder_of_a_script_that_was_killed_is_removed_with_its_node(tmp_path: Path) -> None:
    """A bundle kept it, with the script's inputs and checkpoints, and pipes that no program copies."""
    paths = write_job(tmp_path, [noop_measurement("a")])
    job = read_job(paths.folder).model_copy(update={"target": SlurmTarget()})
    paths.job.write_text(job.model_dump_json())
    for rank in (0, 1):
        (paths.script("a", rank) / "work").mkdir(parents=True)
        os.mkfifo(paths.script("a", rank) / "out_0")
    node = {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7"}
    command = [sys.executable, "-m", "slurm.launch", str(paths.job)]
    assert subprocess.run(command, env={**os.environ, **node}, timeout=600).returncode == 0
    assert paths.node_end(0).exists() and paths.scripts() == [paths.script("a", 1)]  # another node's


@pytest.mark.parametrize(
    ("node_rank", "given", "host"),
    [
        (1, {"SLURMD_NODENAME": "gpu02"}, "gpu02"),  # the machine itself may say gpu02.cluster.org, or something else
        (0, {"RANKWISE_NODE_NAME": "gpu-b", "SLURMD_NODENAME": "x"}, "gpu-b"),  # as the target has it
        (0, {}, socket.gethostname()),
        (None, {"SLURMD_NODENAME": "gpu02"}, socket.gethostname()),  # of this machine: `rankwise status` asks for it
    ],
)
def test_a_launcher_names_its_node_as_jobs_are_kept_from_it(
    node_rank: int | None, given: dict[str, str], host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch and srun refuse `--exclude` with a host name, and a job on SSH hosts is kept from none by it."""
    for name in ("SLURMD_NODENAME", "RANKWISE_NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    paths = JobPaths(tmp_path)
    write_launcher(paths, node_rank)
    written = paths.launcher if node_rank is None else paths.node_launcher(node_rank)
    assert Launcher.model_validate_json(written.read_text()).host == host


def test_torchrun_argv(tmp_path: Path) -> None:
    paths = write_job(tmp_path, [noop_measurement("a", ranks=2)])
    argv = torchrun_argv(read_job(paths.folder), paths.job, 0, Rendezvous(23456), paths.folder / "torchrun")
    assert argv[:3] == [sys.executable, "-m", "engine.agents.torchrun_agent"]
    assert argv[-3:] == ["-m", "engine.worker", str(paths.job)]
    options = dict(zip(argv[4:-3:2], argv[5:-3:2], strict=True))
    assert options == {
        "--nnodes": "1",
        "--nproc-per-node": "2",
        "--node-rank": "0",
        "--rdzv-backend": "static",
        "--rdzv-id": "job",
        "--master-addr": "127.0.0.1",
        "--master-port": "23456",
        "--local-addr": "127.0.0.1",
        "--max-restarts": "0",
        "--shutdown-timeout": "2",
        "--log-dir": str(paths.folder / "torchrun"),
    }


def test_rank_environment(tmp_path: Path) -> None:
    timed = read_job(write_job(tmp_path, [noop_measurement("a", env={"OMP_NUM_THREADS": "3"})], name="timed").folder)
    memory = read_job(write_job(tmp_path, [noop_measurement("a")], name="memory", memory=True).folder)
    inherited = {"PATH": "/bin", "HF_TOKEN": "x", "PREFECT_API_URL": "x", "AWS_PROFILE": "x", "MY_API_KEY": "x"}
    inherited |= {"DATABASE_URL": "postgresql://me:hush@host/db", "TRACKING": "https://host/?token=hush"}
    environment = rank_environment(timed, inherited, launcher_pid=7)
    assert not {"DATABASE_URL", "TRACKING"} & environment.keys(), "secrets by their form"
    loopback = {environment[f"{name}_SOCKET_IFNAME"].removeprefix("=") for name in ("GLOO", "NCCL", "TP")}
    assert loopback == {"lo"}, "one node's ranks listen on no other interface"
    assert environment["PATH"] == "/bin"
    assert "x" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "3", "the cell has the last word"
    assert environment["MKL_NUM_THREADS"] == "1"
    assert (environment["HF_HUB_OFFLINE"], environment["RANKWISE_LAUNCHER_PID"]) == ("1", "7")
    assert "MALLOC_MMAP_THRESHOLD_" not in environment
    assert rank_environment(memory, {}, launcher_pid=7)["MALLOC_MMAP_THRESHOLD_"] == "65536"


def test_torchruns_options_are_not_those_of_the_pod(tmp_path: Path) -> None:
    """In a pod of an elastic PyTorchJob (Kubeflow) torchrun met at the pod's address, and no launch began."""
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    options = [each for each in get_args_parser()._actions if isinstance(each, (env, check_env))]
    given = {f"PET_{option.dest.upper()}": "x" for option in options} | {"PET_DATA_DIR": "/data/oxford-pets"}
    assert len(given) > 20
    job = read_job(write_job(tmp_path, [noop_measurement("a")], name="pod").folder)
    environment = rank_environment(job, given, launcher_pid=7)
    assert {name for name in environment if name.startswith("PET_")} == {"PET_DATA_DIR"}


def test_nothing_that_is_started_for_cpus_sees_a_gpu(tmp_path: Path) -> None:
    """Scripts, and servers such as llama.cpp's, computed on the GPUs of a target with `device: cpu`."""
    job = read_job(write_job(tmp_path, [noop_measurement("a")], name="gpus").folder)
    given = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert rank_environment(job, given, launcher_pid=7)["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(job, {}, launcher_pid=7)
    on_cores = job.model_copy(update={"target": LocalTarget(device="cpu")})
    assert rank_environment(on_cores, given, launcher_pid=7)["CUDA_VISIBLE_DEVICES"] == "-1"
    endpoint = EndpointTarget(url="http://127.0.0.1:1", model="m")
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(
        job.model_copy(update={"target": endpoint}), {}, launcher_pid=7
    )


def test_deepspeeds_launcher_is_told_the_gpus_that_the_study_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sets the variable of the ranks anew: with `env: {CUDA_VISIBLE_DEVICES: "4,5"}` they had GPUs 0 and 1."""
    told: list[dict[str, list[str]]] = []

    def started(argv: list[str], environment: dict[str, str]) -> None:
        world = next(word for word in argv if word.startswith("--world_info="))
        told.append(json.loads(base64.urlsafe_b64decode(world.partition("=")[2])))
        raise InterruptedError

    monkeypatch.setattr(ranks, "start_process", started)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = {"CUDA_VISIBLE_DEVICES": "4,5"}
    paths = write_job(tmp_path, [noop_measurement("a", ranks=2, env=devices)], name="deepspeed")
    job = read_job(paths.folder).model_copy(update={"target": SlurmTarget(launcher="deepspeed")})
    with pytest.raises(InterruptedError):
        RankSupervisor(job, paths).run()
    assert told == [{"node0": ["4", "5"]}]


def spread_job(folder: Path, **cell: Any) -> Job:
    """A job of two ranks on two nodes of a Slurm target, not launched."""
    job = read_job(write_job(folder, [noop_measurement("a", ranks=2, **cell)], name="spread").folder)
    measurement = job.measurements[0].model_copy(update={"cell": job.cell.model_copy(update={"nodes": 2})})
    return job.model_copy(update={"measurements": (measurement,), "ranks_per_node": 1, "target": SlurmTarget(nodes=2)})


def test_ranks_talk_over_the_interface_towards_the_head(tmp_path: Path) -> None:
    job = spread_job(tmp_path, env={"TP_SOCKET_IFNAME": "ib1"})
    environment = rank_environment(job, {"NCCL_SOCKET_IFNAME": "bond0"}, launcher_pid=7, interface="eth3")
    assert environment["GLOO_SOCKET_IFNAME"] == "eth3"
    assert environment["NCCL_SOCKET_IFNAME"] == "bond0", "set by the job's own lines"
    assert environment["TP_SOCKET_IFNAME"] == "ib1", "the cell has the last word"
    assert rank_environment(job, {}, launcher_pid=7, interface="eth3")["NCCL_SOCKET_IFNAME"] == "=eth3"
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(job, {}, launcher_pid=7, interface=None)


def test_torchrun_of_the_second_node(tmp_path: Path) -> None:
    meeting = Rendezvous(23456, "10.0.0.1", "10.0.0.2", "eth3")
    argv = start_argv(spread_job(tmp_path), tmp_path / "job.json", 1, meeting, tmp_path, None)
    options = dict(zip(argv[4:-3:2], argv[5:-3:2], strict=True))
    expected = {"--nnodes": "2", "--nproc-per-node": "1", "--node-rank": "1", "--local-addr": "10.0.0.2"}
    assert options.items() >= (expected | {"--master-addr": "10.0.0.1", "--master-port": "23456"}).items()


@pytest.mark.parametrize(("devices", "slots"), [(None, ["0"]), ("", ["0"]), ("5,7", ["5"]), ("GPU-a1", ["GPU-a1"])])
def test_deepspeeds_launcher_keeps_the_gpus_that_slurm_gave(
    tmp_path: Path, devices: str | None, slots: list[str]
) -> None:
    pytest.importorskip("deepspeed")
    job = spread_job(tmp_path).model_copy(update={"target": SlurmTarget(nodes=2, launcher="deepspeed")})
    argv = start_argv(job, tmp_path / "job.json", 1, Rendezvous(23456, "10.0.0.1"), tmp_path, devices)
    assert argv[1:4] == ["-m", "engine.agents.deepspeed_agent", str(tmp_path / "exits.json")]
    world = next(option for option in argv if option.startswith("--world_info=")).partition("=")[2]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"node0": slots, "node1": slots}
    assert argv[-2:] == ["engine.worker", str(tmp_path / "job.json")]


def test_deepspeed_is_refused_by_name_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    job = spread_job(tmp_path).model_copy(update={"target": SlurmTarget(nodes=2, launcher="deepspeed")})
    with pytest.raises(NotStartedError, match="deepspeed is not installed for"):
        start_argv(job, tmp_path / "job.json", 0, Rendezvous(23456), tmp_path, None)


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_REGION", "DB_PASSWORD", "OPENAI_API_KEY"])
def test_private_names(name: str) -> None:
    assert is_private(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATH", "CUDA_VISIBLE_DEVICES", "KEYBOARD_LAYOUT"])
def test_names_that_ranks_may_see(name: str) -> None:
    assert not is_private(name)


def test_code_version_is_a_commit_or_unknown() -> None:
    version = code_version()
    assert version == {} or (len(version["RANKWISE_COMMIT"]) == 40 and version["RANKWISE_DIRTY"] in "01")


def test_kills_for_lack_of_memory_are_counted() -> None:
    assert oom_kills() >= 0


def test_launcher_begins_without_torch() -> None:
    check = "import sys, slurm.launch; print([name for name in ('torch', 'numpy', 'submitit') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_rank_killed_mid_cell(tmp_path: Path) -> None:
    measurements = [
        noop_measurement("before", ranks=2),
        noop_measurement("killed", ranks=2, fault="kill", fault_rank=1),
        noop_measurement("after", ranks=2),
    ]
    paths = write_job(tmp_path, measurements)
    end = launch_alone(paths)
    assert (end.status, end.measurement, end.rank, end.kind) == (Status.FAILED, measurements[1].name, 1, "SIGKILL")
    assert end.message == "rank 1 was killed by SIGKILL"
    for rank in (0, 1):
        assert part(paths, measurements[0], rank).status is Status.COMPLETED
    assert not paths.part(measurements[1].name, 1).exists()
    assert not paths.part(measurements[2].name, 0).exists()
    if paths.part(measurements[1].name, 0).exists():  # torchrun may end the peer before it notices
        failure = part(paths, measurements[1], 0).failure
        assert failure is not None and failure.kind == "PeerLost"
    assert leftovers(paths.folder) == []


def test_exception_on_one_of_two_ranks_ends_the_launch(tmp_path: Path) -> None:
    measurements = [
        noop_measurement("raises", ranks=2, fault="raise", fault_rank=1),
        noop_measurement("after", ranks=2),
    ]
    paths = write_job(tmp_path, measurements)
    end = launch_alone(paths)
    assert (end.status, end.measurement, end.rank, end.kind) == (Status.FAILED, measurements[0].name, 1, "RuntimeError")
    assert end.message == "rank 1: the noop workload was told to raise"
    failure = part(paths, measurements[0], 1).failure
    assert failure is not None and (failure.kind, failure.rank) == ("RuntimeError", 1)
    assert not paths.part(measurements[1].name, 0).exists()
    assert leftovers(paths.folder) == []


def test_hanging_rank_is_ended_at_the_cells_limit_with_its_stack(tmp_path: Path) -> None:
    measurements = [noop_measurement("fine", ranks=2), noop_measurement("hangs", ranks=2, fault="hang", fault_rank=1)]
    paths = write_job(tmp_path, measurements, cell_timeout_seconds=1.5)
    launcher = subprocess.Popen([sys.executable, "-m", "slurm.launch", str(paths.job)])
    wait_until(in_measurement(paths, measurements[1], 1), "rank 1 to hang")
    waited = wait_until(paths.end.exists, "the launcher to give up", limit_seconds=10)
    assert 0.5 < waited < 1.5 + 0.5 + 6
    launcher.wait(600)
    end = read_end(paths)
    assert (end.status, end.measurement, end.kind) == (Status.TIMEOUT, measurements[1].name, "CellTimeout")
    assert "1.5 s" in (end.message or "")
    assert "noop.py" in paths.rank_log(1).read_text(), "the stack says where the rank hung"
    assert part(paths, measurements[0], 1).status is Status.COMPLETED
    assert leftovers(paths.folder) == []


@pytest.mark.slow
def test_silent_peer_is_noticed_at_the_groups_limit(tmp_path: Path) -> None:
    measurements = [noop_measurement("hangs", ranks=2, fault="hang", fault_rank=1)]
    paths = write_job(tmp_path, measurements, group_timeout_seconds=2)
    end = launch_alone(paths)
    assert (end.status, end.measurement, end.rank, end.kind) == (Status.TIMEOUT, measurements[0].name, 1, "PeerLost")
    assert leftovers(paths.folder) == []


def test_job_ends_at_its_own_limit_even_while_it_starts(tmp_path: Path) -> None:
    paths = write_job(tmp_path, [noop_measurement("hangs", fault="hang")], timeout_seconds=0.3)
    end = launch_alone(paths)
    assert (end.status, end.kind, end.measurement) == (Status.TIMEOUT, "JobTimeout", None)
    assert leftovers(paths.folder) == []


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    measurement = noop_measurement("hangs", ranks=2, fault="hang")
    paths = write_job(tmp_path, [measurement])
    launcher = subprocess.Popen([sys.executable, "-m", "slurm.launch", str(paths.job)])
    wait_until(in_measurement(paths, measurement, 0), "the ranks to be in their measurement")
    said = Launcher.model_validate_json(paths.launcher.read_bytes())
    assert (said.pid, said.pid_started) == (launcher.pid, start_ticks(launcher.pid))
    assert os.getsid(launcher.pid) == launcher.pid, "a terminal's Ctrl-C does not reach it"
    assert len(leftovers(paths.folder)) == 4, "launcher, torchrun, two ranks"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert_nothing_left(paths.folder)
    assert not paths.end.exists()
    assert read_progress(paths).phase == "measurement"


def test_job_that_cannot_be_read_ends_with_the_reason(tmp_path: Path) -> None:
    paths = write_job(tmp_path, [noop_measurement("a")])
    paths.job.write_text('{"name": 1}')
    end = launch_alone(paths)
    assert (end.status, end.kind) == (Status.FAILED, "ValueError")
    assert "launcher failed" in (end.message or "")


def test_the_end_of_the_schedulers_daemon_is_no_cancellation(tmp_path: Path) -> None:
    job, node = spread_job(tmp_path), JobNode(1, ("n1", "n2"), "7")
    asked = RankSupervisor(job, JobPaths(tmp_path), node)
    assert asked.cancellation().status is Status.CANCELLED
    orphan = RankSupervisor(job, JobPaths(tmp_path), node, parent=os.getpid())
    assert (orphan.cancellation().status, orphan.cancellation().nodes) == (Status.NODE_FAILED, ("n2",))


def test_a_clock_that_is_set_during_a_measurement_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, now = RankSupervisor(spread_job(tmp_path), JobPaths(tmp_path)), [1000.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 9e9))
    limit = supervisor.job.measuring.cell_timeout_seconds
    said = Progress(rank=0, pid=1, pid_started=1, phase="measurement", measurement="m1", since=1.0)
    assert supervisor.overdue({0: said}, age=1.0) is None
    now[0] += limit - 1
    assert supervisor.overdue({0: said}, age=1.0) is None
    assert supervisor.overdue({0: said.model_copy(update={"measurement": "m2"})}, age=1.0) is None, "another begins"
    now[0] += limit + 1
    verdict = supervisor.overdue({0: said.model_copy(update={"measurement": "m2"})}, age=1.0)
    assert verdict is not None and (verdict.kind, verdict.measurement) == ("CellTimeout", "m2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "pause", "limit"),
    [
        pytest.param(30, 2.5, 2, id="it-goes-on"),
        pytest.param(6, 6.5, 60, id="it-is-over-at-once", marks=pytest.mark.slow),
    ],
)
def test_a_measurement_with_a_pause_in_it_is_preempted(
    tmp_path: Path, seconds: float, pause: float, limit: float
) -> None:
    """Slurm suspends a job by SIGSTOP to all its processes: the clock went on, and its limit called it a time-out."""
    measurement = noop_measurement("paused", seconds=seconds)
    paths = write_job(tmp_path, [measurement], cell_timeout_seconds=limit)
    job = read_job(paths.folder).model_copy(update={"target": SlurmTarget(nodes=1)})
    paths.job.write_text(job.model_dump_json())
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}
    slurm |= {"SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "1"}
    launcher = subprocess.Popen([sys.executable, "-m", "slurm.launch", str(paths.job)], env=os.environ | slurm)
    wait_until(in_measurement(paths, measurement), "the measurement")
    all_of_it = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    for process in all_of_it:
        process.suspend()
    time.sleep(pause)
    for process in all_of_it:
        process.resume()
    launcher.wait(600)
    end = JobEnd.model_validate_json(paths.node_end(0).read_bytes())
    assert (end.status, end.kind, end.measurement) == (Status.PREEMPTED, "Suspended", measurement.name)
    assert "suspended for " in (end.message or "")
    assert leftovers(paths.folder) == []


def test_a_pause_before_the_measurements_counts_towards_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    supervisor = RankSupervisor(spread_job(tmp_path), JobPaths(tmp_path), JobNode(1, ("n1", "n2"), "7"), began=1000.0)
    starting = Progress(rank=1, pid=1, pid_started=1, phase="starting", since=1.0)
    assert supervisor.pause_seconds() == 0
    for gap, continued, pause in ((0.5, True, 0.0), (900.0, False, 0.0), (900.0, True, 900.0), (0.5, False, 0.0)):
        now[0] += gap
        supervisor.continued = continued
        assert supervisor.pause_seconds() == pause, "a stall is no stop, and scancel sends SIGCONT too"
        if pause:
            assert supervisor.suspended({1: starting}, pause) is None
    assert now[0] - supervisor.began == 901


def test_a_rank_that_finished_before_the_first_look_after_a_pause_was_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Awake at once, it ends its measurement, and torchrun ends too, before the launcher has its turn."""
    said = Progress(rank=0, pid=os.getpid(), pid_started=1, phase="measurement", measurement="m1", since=1.0)
    finished = said.model_copy(update={"phase": "finished", "measurement": None})
    supervisor = RankSupervisor(spread_job(tmp_path), JobPaths(tmp_path), JobNode(1, ("n1", "n2"), "7"))
    looks = iter([said, finished])
    monkeypatch.setattr(supervisor, "progress", lambda: {0: next(looks)})

    class Agent:
        waits = 0

        def wait(self, timeout: float) -> int:
            self.waits += 1
            if self.waits == 1:
                raise subprocess.TimeoutExpired("torchrun", timeout)
            supervisor.continued = True
            assert supervisor._looked_at is not None
            supervisor._looked_at -= 16
            return 0

    supervisor.agent = Agent()  # type: ignore[assignment]
    verdict = supervisor.watch()
    assert verdict is not None
    assert (verdict.status, verdict.kind, verdict.measurement) == (Status.PREEMPTED, "Suspended", "m1")


def test_a_rank_that_a_signal_without_a_name_ended_is_told(tmp_path: Path) -> None:
    supervisor = RankSupervisor(spread_job(tmp_path), JobPaths(tmp_path))
    supervisor.agent_folder.mkdir()
    exits_file(supervisor.agent_folder).write_text('[{"rank": 0, "exit_code": -40}]')
    assert supervisor.outcome().message == "rank 0 was killed by signal 40"


def test_a_second_time_under_pbs_is_known_by_what_the_first_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PBS_JOBID": "7.head", "PBS_NODENUM": "0", PBS_NODES: "n1"}.items():
        monkeypatch.setenv(name, value)
    paths = JobPaths(tmp_path)
    paths.submitting.touch()
    assert not is_second_time(paths, 0)
    paths.node_launcher(0).touch()
    assert is_second_time(paths, 0) and not is_second_time(paths, 1)
