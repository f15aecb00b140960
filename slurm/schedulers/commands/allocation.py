"""The Slurm allocation that this process runs in (`salloc`, or a script of sbatch): its nodes, and what it is too small
for.

    held = current_allocation()                              # ClusterError: one sentence for whoever starts a run
    allocation_lacks(target, [Need(nodes=2, cores=1)], held)     # problems, each naming what the allocation has

SLURM_JOB_ID and SLURM_JOB_CPUS_PER_NODE (`2(x3),1`, in the order of the nodes) are documented in salloc(1) and
sbatch(1); the rest is what slurmctld says of the job.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.common.printable import plural
from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.calls import SchedulerAnswer, run_slurm
from slurm.schedulers.commands.details import JobDetails, details_command, read_details
from slurm.schedulers.commands.listing import ClusterError, count_gpus
from slurm.schedulers.commands.partitions import Need
from slurm.schedulers.commands.states import bare, standing

_CALL_SECONDS = 10.0
_TRES = re.compile(r" (?:Alloc)?TRES=(\S+)")
"""Of Slurm up to 22.05, and of later ones, which say `ReqTRES` and `AllocTRES`."""
_JOB_GRES = re.compile(r" JOB_GRES=(\S+)")
"""Of `--details` (Slurm 22.05). TRES has GPUs only where AccountingStorageTRES names them."""
_GPUS = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=([0-9]{1,9})")
_CORES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")


@dataclass(frozen=True)
class Allocation:
    """A job that Slurm has started and that others start steps in. `cores`: of each node; () where unknown."""

    job_id: str
    state: str
    nodes: tuple[str, ...]
    cores: tuple[int, ...] = ()
    gpus: int = 0
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether no step can be started any more."""
        return standing(self.state).place not in ("waiting", "running")

    @property
    def ending(self) -> bool:
        """Whether its end is near, and how it will be called is not known yet."""
        return bare(self.state) == "COMPLETING"


def current_allocation(environment: Mapping[str, str] | None = None) -> Allocation:
    """The allocation that this process runs in. Raises ClusterError where there is none, or it has ended."""
    environment = os.environ if environment is None else environment
    job_id = environment.get("SLURM_JOB_ID", "")
    if not job_id.isdigit():
        raise ClusterError(
            "allocation: current, but SLURM_JOB_ID is not set: this is no allocation. Run inside `salloc` or a script "
            "of sbatch, or leave allocation out to submit jobs"
        )
    found, answer = read_allocation(job_id, environment)
    if found is None:
        why = "slurmctld does not know it" if answer.unknown_job else "`scontrol show job` does not answer"
        raise ClusterError(f"allocation: job {job_id} of SLURM_JOB_ID: {why}. Run inside an allocation that lasts")
    if found.ended:
        raise ClusterError(f"allocation: job {job_id} of SLURM_JOB_ID has ended ({found.state}). Make another one")
    return found


def read_allocation(
    job_id: str, environment: Mapping[str, str] | None = None
) -> tuple[Allocation | None, SchedulerAnswer]:
    """An allocation as slurmctld has it, and its answer; None where it says nothing of the job."""
    environment = os.environ if environment is None else environment
    answer = run_slurm(details_command(job_id, "--details"), environment, _CALL_SECONDS)
    shown: dict[str, JobDetails] = read_details(answer.text)
    if not shown:
        return None, answer
    details = next(iter(shown.values()))  # under an array's id where it is a task of one
    cores = read_cores(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    cores = cores if len(cores) == len(details.nodes) and environment.get("SLURM_JOB_ID") == job_id else ()
    held = Allocation(job_id, details.state, details.nodes, cores, read_gpus(answer.text), details.reason)
    return held, answer


def read_gpus(text: str) -> int:
    """GPUs that a job has, of `scontrol --details show job`; where they are counted by type alone, of all types."""
    if (gres := _JOB_GRES.search(text)) and (count := count_gpus(gres[1], None)):
        return count
    tres = _TRES.search(text)
    counts = _GPUS.findall(tres[1]) if tres else []
    whole = [int(count) for kind, count in counts if not kind]
    return whole[0] if whole else sum(int(count) for _, count in counts)


def read_cores(text: str) -> tuple[int, ...]:
    """`2(x3),1` -> 2, 2, 2, 1; () for what is none."""
    matches = [_CORES.fullmatch(part) for part in text.split(",")]
    counts = [(int(match[1]), int(match[2] or 1)) for match in matches if match]
    if len(counts) != len(matches) or sum(times for _, times in counts) > 65_536:
        return ()
    return tuple(cores for cores, times in counts for _ in range(times))


def allocation_lacks(target: SlurmTarget, needs: Sequence[Need], held: Allocation) -> list[str]:
    """Return the requirements of a study that an allocation does not meet, as `field: what is wrong`."""
    cores = held.cores or (0,) * len(held.nodes)
    problems = []
    for need in dict.fromkeys(needs):
        large = [count for count in cores if count >= need.cores or not held.cores]
        there = plural(len(held.nodes), "node")
        if held.cores:
            there += f" with {', '.join([*map(str, held.cores[:-1]), plural(held.cores[-1], 'core')])}"
        if len(large) < need.nodes:
            problems.append(
                f"allocation: job {held.job_id} is too small for {need}: it has {there}. Allocate more "
                f"(salloc --nodes={need.nodes} --ntasks-per-node=1 --cpus-per-task={need.cores})"
            )
        gpus = need.nodes * (target.gpus_per_node or 0)
        if held.gpus < gpus:
            problems.append(
                f"allocation: job {held.job_id} is too small for {plural(gpus, 'GPU')} on {plural(need.nodes, 'node')}"
                f": it has {held.gpus}. Allocate more (salloc --gpus-per-node={target.gpus_per_node})"
            )
    return problems
