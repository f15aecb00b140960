"""The command of one node that starts a script's ranks: torchrun, deepspeed, accelerate, mpirun, srun, or nothing.

command = node_command(work, words, NodePlace(...), folder)     # None: nothing to start on this node
"""

import base64
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.plans.job import Measurement
from configs.workloads.placeholders import ParameterValue
from configs.workloads.script import ScriptWorkload
from engine.scripts.rank_start import LOCAL_RANK, NODES

RANK_START = Path(__file__).with_name("rank_start.py")
_ACCELERATE_FILE = Path(__file__).with_name("accelerate.json")
"""Of a training without anything but ranks; options come before it."""


@dataclass(frozen=True)
class NodePlace:
    """This node among those of the launch, and where the ranks meet."""

    node_rank: int
    nodes: int
    ranks_per_node: int
    head_address: str
    port: int
    own_address: str
    hosts: tuple[str, ...]
    cores_per_rank: int
    gpus: bool

    @property
    def ranks(self) -> range:
        """This node's ranks."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)


def script_interpreter(work: ScriptWorkload) -> str:
    """The Python of a .py command and of its launcher."""
    return os.path.expanduser(work.python) if work.python else sys.executable


def program_line(work: ScriptWorkload, words: list[str]) -> list[str]:
    """The command of one rank: a .py file is run by the interpreter, `python` means that interpreter."""
    if words[0].endswith(".py"):
        inserted = [f"--local_rank={LOCAL_RANK}"] if work.launcher == "deepspeed" else []
        return [script_interpreter(work), "-u", words[0], *inserted, *words[1:]]
    if words[0] in ("python", "python3"):
        return [script_interpreter(work), *words[1:]]
    return words


def started_from_first_node(work: ScriptWorkload) -> bool:
    """Whether one command on the first node starts the ranks of all."""
    return work.launcher in ("srun", "mpirun")


def node_command(work: ScriptWorkload, words: list[str], place: NodePlace, folder: Path) -> list[str] | None:
    """The command of this node; None where another node's command starts its ranks.

    folder: this node's, beside those of the others, which are named by their numbers. Raises ValueError naming the
    field where the launcher is not there or cannot start these ranks.
    """
    rank = [sys.executable, "-I", str(RANK_START), *program_line(work, words)]
    python = [script_interpreter(work), "-P"] if _has_safe_path(work) else [script_interpreter(work)]
    if work.launcher == "torchrun":
        return [
            *python,
            "-m",
            "torch.distributed.run",
            *_torchrun_options(place, folder / "launcher"),
            "--no-python",
            *rank,
        ]
    if work.launcher == "deepspeed":
        slots = [str(local) for local in range(place.ranks_per_node)]
        world = {f"node{number}": slots for number in range(place.nodes)}
        argv = [*python, "-m", "deepspeed.launcher.launch"]
        argv += [f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}"]
        argv += [f"--node_rank={place.node_rank}", f"--master_addr={place.head_address}"]
        return [*argv, f"--master_port={place.port}", "--no_local_rank", "--no_python", *rank]
    if work.launcher == "accelerate":
        options = _accelerate_options(place, work.planned_name("accelerate"))
        return [*python, "-m", "accelerate.commands.launch", *options, *rank]
    if work.launcher == "none":
        return rank
    if place.node_rank > 0:
        return None
    # Ranks on other nodes take command, variables and folder from what the agent of their node has written.
    rank = [sys.executable, "-I", str(RANK_START), NODES, str(folder.parent), str(place.ranks_per_node)]
    return _srun(rank, place) if work.launcher == "srun" else _mpirun(rank, place)


def rank_variables(work: ScriptWorkload, place: NodePlace) -> dict[str, str]:
    """Variables that a launcher does not set by itself."""
    found = {"MASTER_ADDR": place.head_address, "MASTER_PORT": str(place.port)}
    if work.launcher == "none":
        number = str(place.node_rank * place.ranks_per_node)
        found |= {"RANK": number, "LOCAL_RANK": "0", "WORLD_SIZE": str(place.nodes * place.ranks_per_node)}
        found |= {"LOCAL_WORLD_SIZE": str(place.ranks_per_node)}
    if work.launcher == "mpirun":
        found["SLURM_OVERLAP"] = "1"  # its own srun, which starts a daemon on each node, must not wait for this step
    if work.launcher == "accelerate" and not place.gpus:
        found["ACCELERATE_USE_CPU"] = "true"
    return found


def started_ranks(work: ScriptWorkload, place: NodePlace) -> list[int]:
    """The ranks of this node that are processes of their own: all, or with launcher none the first."""
    return list(place.ranks)[:1] if work.launcher == "none" else list(place.ranks)


def _torchrun_options(place: NodePlace, logs: Path) -> list[str]:
    options = ["--nnodes", str(place.nodes), "--nproc-per-node", str(place.ranks_per_node)]
    options += ["--node-rank", str(place.node_rank), "--rdzv-backend", "static", "--max-restarts", "0"]
    options += ["--master-addr", place.head_address, "--master-port", str(place.port)]
    return [*options, "--local-addr", place.own_address, "--log-dir", str(logs)]


def _accelerate_options(place: NodePlace, file: str | None) -> list[str]:
    """Options of `accelerate launch`; on CPUs it starts several ranks by torchrun only where it is told multi_gpu.

    file: of the planner, which says that and the precision.
    """
    total = place.nodes * place.ranks_per_node
    options = ["--num_processes", str(total), "--num_machines", str(place.nodes)]
    options += ["--machine_rank", str(place.node_rank), "--main_process_ip", place.head_address]
    options += ["--main_process_port", str(place.port), "--dynamo_backend", "no"]
    options += ["--num_cpu_threads_per_process", str(place.cores_per_rank), "--no_python", "--rdzv_backend", "static"]
    if file is not None:
        return [*options, "--config_file", file]
    options += ["--mixed_precision", "no"]
    if total == 1 and not place.gpus:
        return [*options, "--cpu"]
    # Without a file it takes the one that `accelerate config` wrote for another training: GPUs, FSDP, debugging.
    return [*options, "--config_file", str(_ACCELERATE_FILE), *(["--multi_gpu"] if total > 1 else [])]


def _srun(rank: list[str], place: NodePlace) -> list[str]:
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise ValueError("workload.launcher: srun requires a target of kind slurm. Use torchrun")
    total = place.nodes * place.ranks_per_node
    argv = ["srun", "--overlap", "--mem=0", "--export=ALL", f"--nodes={place.nodes}", f"--ntasks={total}"]
    argv += [f"--ntasks-per-node={place.ranks_per_node}", f"--cpus-per-task={place.cores_per_rank}", "--cpu-bind=none"]
    # A rank may abort in its teardown and be complete; agents end the others of a rank that failed.
    return [*argv, "--kill-on-bad-exit=0", *rank]


def _mpirun(rank: list[str], place: NodePlace) -> list[str]:
    found = shutil.which("mpirun")
    if found is None:
        raise ValueError(
            "workload.launcher: mpirun is not on PATH of the node. Install Open MPI or MPICH, or use torchrun"
        )
    hosts = ",".join(f"{host}:{place.ranks_per_node}" for host in place.hosts)
    where = ["--host", hosts] if place.nodes > 1 else []
    return [found, "-np", str(place.nodes * place.ranks_per_node), *where, *rank]


def _has_safe_path(work: ScriptWorkload) -> bool:
    """Whether the interpreter knows -P (3.11): ours does, another one may not."""
    return work.python is None


def cell_values(measurement: Measurement, ranks_per_node: int) -> dict[str, ParameterValue | None]:
    """Value of each placeholder of a cell."""
    cell = measurement.cell
    work = cell.workload
    assert isinstance(work, ScriptWorkload)
    more: Mapping[str, ParameterValue | None] = {
        "dtype": cell.dtype,
        "nodes": cell.nodes,
        "ranks_per_node": ranks_per_node,
        "cores_per_rank": cell.cores_per_rank,
        "model": work.model or cell.model,
        "repeat": measurement.repeat,
    }
    return work.values(cell.layout, dict(more))
