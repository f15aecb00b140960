"""The call of srun for a job that runs as a step of an allocation, and what srun says while it waits.

step_command(job, folder, name="rw-1a2b3c4d-0001-timed", allocation="123")
waiting_reason(paths)                    # "Requested nodes are busy"
"""

import re
from pathlib import Path

from configs.common.files.reading import read_tail
from configs.plans.job import Job
from configs.plans.paths import JobPaths
from configs.targets.target import SlurmTarget
from slurm.launcher.containers import interpreter, srun_container, wrapped
from slurm.launcher.setup_lines import prepared
from slurm.schedulers.commands.submission import (
    TEMPORARY_FOLDERS,
    check_path,
    folders_needed,
    minutes_of,
    slurm_target,
    submission_environment,
)
from slurm.schedulers.refusals import Refused

_LAST_BYTES = 4096
_BUSY = re.compile(r"step creation (?:temporarily disabled|still disabled), retrying \((.+)\)")


def step_command(job: Job, folder: Path, name: str, allocation: str) -> list[str]:
    """srun and its options, and the launcher that it starts on each node. Raises Refused."""
    target = slurm_target(job)
    check_path(folder)
    cores = job.ranks_per_node * job.cell.cores_per_rank
    needed = folders_needed([job], [folder], target)
    options = [f"--jobid={allocation}", f"--job-name={name}", f"--nodes={job.cell.nodes}"]
    options += [f"--ntasks={job.cell.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cores}", "--exact"]
    # Without a size a step gets all memory of its nodes, and others wait for it.
    options += [f"--mem={target.memory_per_node or 0}", f"--time={minutes_of([job], target)}"]
    options += ["--kill-on-bad-exit=0", "--mpi=none", f"--output={folder}/slurm_%t.log", f"--chdir={folder}"]
    if target.gres is not None:
        options.append(f"--gres={target.gres}")
    elif target.gpus_per_node is not None:
        options.append(f"--gpus-per-node={target.gpus_per_node}")
    if job.exclude:
        options.append(f"--exclude={','.join(job.exclude)}")
    try:
        options += [*target.srun_args, *srun_container(needed, target)]
    except ValueError as error:
        raise Refused(str(error)) from error
    launcher = [interpreter(target), "-m", "slurm.launch", str(folder / "job.json")]
    return ["srun", *options, *prepared(wrapped(launcher, target, needed), target)]


def step_environment(target: SlurmTarget, own: dict[str, str]) -> dict[str, str]:
    """The environment of srun: without secrets, and without the allocation's variables: srun's options."""
    # The folders for temporary files of the allocation are those of its steps.
    kept = submission_environment(target, own) | {name: own[name] for name in TEMPORARY_FOLDERS if name in own}
    return {name: value for name, value in kept.items() if not name.startswith(("SRUN_", "SBATCH_"))} | {
        "PYTHONSAFEPATH": "1"  # a folder named like one of ours must not be imported
    }


def last_words(paths: JobPaths) -> str:
    """What srun said last, its errors where there are any; one line."""
    try:
        text = read_tail(paths.srun_log, _LAST_BYTES)
    except (OSError, ValueError):
        return ""
    lines = [line.removeprefix("srun: ").strip() for line in text.splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next((line for line in reversed(errors or lines) if line), "")


def waiting_reason(paths: JobPaths) -> str:
    """Why srun cannot start the step yet; nothing where it has not said."""
    busy = _BUSY.search(last_words(paths))
    return busy[1] if busy else ""
