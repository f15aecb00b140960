"""Command and environment that start the ranks of one node, through torchrun or DeepSpeed's launcher.

Both use the fixed rendezvous address of the registration, and are started through a module of the engine that saves
the ranks' exit codes as data.
"""

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.common.secrets import holds_secret
from configs.common.system.forking import Forked, fork, run_module, unfit_to_fork
from configs.common.system.proc import end_with_parent
from configs.common.torchrun_options import without_torchrun_options
from configs.plans.job import Job
from configs.records.record import Status
from configs.targets.resources import ClusterTarget
from configs.targets.target import EndpointTarget
from configs.workloads import descriptor_of
from slurm.launcher.end_cause import JobVerdict, NotStartedError
from slurm.launcher.node_registration import Rendezvous

_DROPPED_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "PREFECT_", "SUBMITIT_", "HUGGING_FACE_HUB_")


def torchrun_argv(job: Job, job_json: Path, node_rank: int, meeting: Rendezvous, folder: Path) -> list[str]:
    """The command that starts this node's ranks: torchrun, without restarts, meeting at a fixed address.

    Started through `engine.agents.torchrun_agent`, which keeps the ranks' exit codes in `folder`; all its arguments but
    the first are torchrun's own.
    """
    argv = [sys.executable, "-m", "engine.agents.torchrun_agent", str(exits_file(folder))]
    argv += ["--nnodes", str(job.cell.nodes), "--nproc-per-node", str(job.ranks_per_node)]
    argv += ["--node-rank", str(node_rank), "--rdzv-backend", "static", "--rdzv-id", job.name]
    argv += ["--master-addr", meeting.head_address, "--master-port", str(meeting.port), "--max-restarts", "0"]
    # Without an address of its own torchrun asks the resolver for this machine's name, which can take seconds.
    argv += ["--local-addr", meeting.own_address, "--shutdown-timeout", "2", "--log-dir", str(folder)]
    return [*argv, "-m", "engine.worker", str(job_json)]


def deepspeed_argv(
    job: Job, job_json: Path, node_rank: int, meeting: Rendezvous, folder: Path, devices: str | None
) -> list[str]:
    """The same through DeepSpeed's launcher of one node. devices: CUDA_VISIBLE_DEVICES, which it sets anew.

    Raises NotStartedError where DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        message = f"target.launcher: deepspeed is not installed for {sys.executable}. Install it, or use torchrun"
        raise NotStartedError(JobVerdict(status=Status.FAILED, kind="LauncherMissing", message=message))
    given = [name for name in (devices or "").split(",") if name]
    slots = given if len(given) >= job.ranks_per_node else [str(rank) for rank in range(job.ranks_per_node)]
    # Only the number of slots of the other nodes matters here.
    world = {f"node{rank}": slots[: job.ranks_per_node] for rank in range(job.cell.nodes)}
    argv = [sys.executable, "-m", "engine.agents.deepspeed_agent", str(exits_file(folder))]
    argv += [f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}"]
    argv += [f"--node_rank={node_rank}", f"--master_addr={meeting.head_address}", f"--master_port={meeting.port}"]
    return [*argv, "--no_local_rank", "--module", "engine.worker", str(job_json)]


def script_argv(job_json: Path, node_rank: int, meeting: Rendezvous, hosts: Sequence[str]) -> list[str]:
    """The agent that starts a script by the launcher that its workload names; hosts: of the job, by node rank."""
    place = {
        "node_rank": node_rank,
        "nodes": max(1, len(hosts)),
        "hosts": list(hosts),
        "head_address": meeting.head_address,
        "own_address": meeting.own_address,
        "port": meeting.port,
    }
    return [sys.executable, "-m", "engine.agents.script_agent", json.dumps(place), str(job_json)]


def start_argv(
    job: Job,
    job_json: Path,
    node_rank: int,
    meeting: Rendezvous,
    folder: Path,
    devices: str | None,
    hosts: Sequence[str] = (),
) -> list[str]:
    """The command of the launcher that the workload or the target names. Raises NotStartedError."""
    if descriptor_of(job.cell.workload).own_program:
        return script_argv(job_json, node_rank, meeting, hosts)
    if isinstance(job.target, ClusterTarget) and job.target.launcher == "deepspeed":
        return deepspeed_argv(job, job_json, node_rank, meeting, folder, devices)
    return torchrun_argv(job, job_json, node_rank, meeting, folder)


def start_process(argv: list[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes] | Forked":
    """Start torchrun or DeepSpeed's launcher, in a session of its own, by a command of `start_argv`.

    It is forked where this process has its module already (`slurm.forking.fork_parent`). It ends when this process
    ends.
    """
    launcher, (python, _, module, *arguments) = os.getpid(), argv

    def forked() -> int:
        end_with_parent(signal.SIGKILL, launcher)
        os.setsid()
        return run_module(module, arguments, environment)

    if python == sys.executable and module in sys.modules and unfit_to_fork() is None:
        return fork(forked)
    return subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(signal.SIGKILL, launcher),
    )


def exits_file(folder: Path) -> Path:
    """Where the ranks' exit codes are kept, in the folder of torchrun or DeepSpeed."""
    return folder / "exits.json"


def is_private(name: str, value: str = "") -> bool:
    """Whether a variable must not reach the ranks: secrets, and what belongs to the orchestrator."""
    return name.startswith(_DROPPED_PREFIXES) or holds_secret(name, value)


def rank_environment(
    job: Job, inherited: Mapping[str, str], launcher_pid: int, interface: str | None = "lo"
) -> dict[str, str]:
    """Environment of torchrun and the ranks. What the cell says in `env` has the last word.

    interface: by which this node reaches the others; for their traffic, unless the inherited variables name another.
    """
    inherited = without_torchrun_options(inherited)
    environment = {name: value for name, value in inherited.items() if not is_private(name, value)}
    threads = str(job.cell.cores_per_rank)
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment |= {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONSAFEPATH": "1",  # a folder named like one of ours in the user's working directory must not be imported
        "RANKWISE_LAUNCHER_PID": str(launcher_pid),
    }
    if not descriptor_of(job.cell.workload).own_program:
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("TP_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one, no prefix
    if job.target.device == "cpu" and not isinstance(job.target, EndpointTarget):
        # Scripts and other projects' servers take the GPUs that they see. HIP passes over an empty list.
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    if job.measuring_pass == "memory":
        # glibc otherwise raises its threshold as blocks are freed, and the peak depends on history (mallopt(3)).
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    return environment | job.cell.env
