"""The command that starts one node's ranks, through torchrun or DeepSpeed's launcher, and their environment.

Both meet at a fixed address that the roll call found, and are started through a module of the engine that keeps the
ranks' exit codes as data.
"""

import base64
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from configs.job import Job
from configs.record import Status
from configs.target import SlurmTarget
from slurm.rollcall import Meeting
from slurm.verdict import NotStartedError, Verdict

_DROPPED_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "PREFECT_", "SUBMITIT_", "HUGGING_FACE_HUB_")
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")


def torchrun_argv(job: Job, job_json: Path, node_rank: int, meeting: Meeting, folder: Path) -> list[str]:
    """The command that starts this node's ranks: torchrun, without restarts, meeting at a fixed address.

    Started through `engine.processes`, which keeps the ranks' exit codes in `folder`; all its arguments but the first
    are torchrun's own.
    """
    argv = [sys.executable, "-m", "engine.processes", str(exits_file(folder))]
    argv += ["--nnodes", str(job.cell.nodes), "--nproc-per-node", str(job.ranks_per_node)]
    argv += ["--node-rank", str(node_rank), "--rdzv-backend", "static", "--rdzv-id", job.name]
    argv += ["--master-addr", meeting.head_address, "--master-port", str(meeting.port), "--max-restarts", "0"]
    # Without an address of its own torchrun asks the resolver for this machine's name, which can take seconds.
    argv += ["--local-addr", meeting.own_address, "--shutdown-timeout", "2", "--log-dir", str(folder)]
    return [*argv, "-m", "engine.worker", str(job_json)]


def deepspeed_argv(
    job: Job, job_json: Path, node_rank: int, meeting: Meeting, folder: Path, devices: str | None
) -> list[str]:
    """The same through DeepSpeed's launcher of one node. devices: CUDA_VISIBLE_DEVICES, which it sets anew.

    Raises NotStartedError where DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        message = f"target.launcher: deepspeed is not installed for {sys.executable}; install it, or use torchrun"
        raise NotStartedError(Verdict(status=Status.FAILED, kind="LauncherMissing", message=message))
    given = [name for name in (devices or "").split(",") if name]
    slots = given if len(given) >= job.ranks_per_node else [str(rank) for rank in range(job.ranks_per_node)]
    # Only the number of slots of the other nodes matters here.
    world = {f"node{rank}": slots[: job.ranks_per_node] for rank in range(job.cell.nodes)}
    argv = [sys.executable, "-m", "engine.deepspeed_agent", str(exits_file(folder))]
    argv += [f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}"]
    argv += [f"--node_rank={node_rank}", f"--master_addr={meeting.head_address}", f"--master_port={meeting.port}"]
    return [*argv, "--no_local_rank", "--module", "engine.worker", str(job_json)]


def start_argv(
    job: Job, job_json: Path, node_rank: int, meeting: Meeting, folder: Path, devices: str | None
) -> list[str]:
    """The command of the launcher that the target names. Raises NotStartedError."""
    if isinstance(job.target, SlurmTarget) and job.target.launcher == "deepspeed":
        return deepspeed_argv(job, job_json, node_rank, meeting, folder, devices)
    return torchrun_argv(job, job_json, node_rank, meeting, folder)


def exits_file(folder: Path) -> Path:
    """Where the ranks' exit codes are kept, in the folder of torchrun or DeepSpeed."""
    return folder / "exits.json"


def is_private(name: str) -> bool:
    """Whether a variable must not reach the ranks: secrets, and what belongs to the orchestrator."""
    return name.startswith(_DROPPED_PREFIXES) or any(part.endswith(_SECRET_WORDS) for part in name.upper().split("_"))


def rank_environment(
    job: Job, inherited: Mapping[str, str], launcher_pid: int, interface: str | None = "lo"
) -> dict[str, str]:
    """Environment of torchrun and the ranks. What the cell says in `env` has the last word.

    interface: by which this node reaches the others; for their traffic, unless the inherited variables name another.
    """
    environment = {name: value for name, value in inherited.items() if not is_private(name)}
    threads = str(job.cell.cores_per_rank)
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment |= {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONSAFEPATH": "1",  # a folder named like one of ours in the user's working directory must not be imported
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RANKWISE_LAUNCHER_PID": str(launcher_pid),
    }
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface is not None and job.cell.nodes > 1:
        environment.setdefault("TP_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one, no prefix
    if job.measuring_pass == "memory":
        # glibc otherwise raises its threshold as blocks are freed, and the peak depends on history (mallopt(3)).
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    return environment | job.cell.env
