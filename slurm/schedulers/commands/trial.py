"""Ask sbatch whether it would take a target's jobs, without submitting one (`sbatch --test-only`).

refused = trial(target, nodes=2, cores=4)         # "target.extra of gpus: sbatch: unrecognized option '--foo'"
"""

import os
import shutil
import subprocess

from configs.common.printable import printable
from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.submission import check_extra, sbatch_refusal, submission_environment
from slurm.schedulers.refusals import Refused

_LIMIT_SECONDS = 30.0
_MAX_CHARACTERS = 400
# sbatch's one sentence for whatever no node has: cores, memory, GPUs, a feature.
_UNAVAILABLE = "Requested node configuration is not available"
_NARROWING = ("memory_per_node", "gres", "gpus_per_node", "constraint")


def trial(target: SlurmTarget, nodes: int, cores: int) -> str | None:
    """Return why sbatch refuses a job of this size, naming the field; None where it does not, or cannot be asked.

    cores: on each node. Of a target that runs in an allocation nothing is asked: sbatch is not called for it.
    """
    if target.allocation is not None:
        return None
    try:
        check_extra(target)
    except Refused as error:
        return str(error)
    if shutil.which("sbatch") is None:
        return None
    words = _refusal(target, nodes, cores)
    if not words:
        return None
    refused = sbatch_refusal(words, target, _culprit(target, nodes, cores) if _UNAVAILABLE in words else None)
    # Words that are about no field of the target come from an sbatch without a cluster.
    about_a_field = isinstance(refused, Refused) and str(refused).startswith("target.")
    return printable(str(refused), _MAX_CHARACTERS) if about_a_field else None


def _refusal(target: SlurmTarget, nodes: int, cores: int) -> str:
    """What sbatch says against such a job; empty where it would take it, or does not answer."""
    command = ["sbatch", "--test-only", "--wrap=true", f"--nodes={nodes}", "--ntasks-per-node=1"]
    command += [f"--cpus-per-task={cores}", *_options(target)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_SECONDS,
            stdin=subprocess.DEVNULL,
            env=submission_environment(target, dict(os.environ)),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stderr or f"exit status {done.returncode}") if done.returncode else ""


def _culprit(target: SlurmTarget, nodes: int, cores: int) -> str | None:
    """The field without which sbatch would take the job; None where no single one is to blame."""
    given = [name for name in _NARROWING if getattr(target, name) is not None]
    for name in given:
        left_out = {name: None} | ({"gpus_per_node": None} if name == "gres" else {})
        if not _refusal(target.model_copy(update=left_out), nodes, cores):
            return name
    return None


def _options(target: SlurmTarget) -> list[str]:
    """The options of sbatch that a target sets, as `slurm.schedulers.commands.submission` passes them."""
    given: dict[str, str | int | bool | None] = {
        "time": target.time_limit_minutes,
        "mem": target.memory_per_node,
        "gpus-per-node": target.gpus_per_node if target.gres is None else None,
        "gres": target.gres,
        "clusters": target.cluster,
        "exclusive": target.exclusive,
        **{name: getattr(target, name) for name in ("partition", "account", "qos", "constraint", "reservation")},
        **target.extra,
    }
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in given.items()
        if value is not None and value is not False
    ]
