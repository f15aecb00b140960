"""A service as a Slurm job with a node to itself: submitted, found by its name, ended.

    submit_service(target, "rw-3f2a", ["python", "-m", ...], folder, minutes=60)
    service_job("rw-3f2a", target)        # ServiceJob(state="RUNNING", node="n1", reason=""); None: no such job
    end_service("rw-3f2a", target)

The name identifies the job, so that one whose id was never read is found too. A job is not requeued: on another node
nobody would find the service.
"""

import os
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from configs.common.base import Frozen
from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.calls import called, on_cluster, run_slurm
from slurm.schedulers.commands.states import standing
from slurm.schedulers.commands.submission import check_path, sbatch_refusal, submission_environment
from slurm.schedulers.refusals import Unavailable

_LIMIT_SECONDS, _END_SECONDS, _LOOK_SECONDS = 60.0, 60.0, 0.5
_AGREEING_LOOKS = 2


class ServiceJob(Frozen):
    """A job in the queue. node: none while it waits; reason: why it waits."""

    state: str
    node: str | None = None
    reason: str = ""


def submit_service(target: SlurmTarget, name: str, argv: Sequence[str], folder: Path, minutes: int) -> None:
    """Submit a job that becomes argv on one node. folder: for its output. Raises Refused, Unavailable."""
    check_path(folder)
    options = {
        "job-name": name,
        "nodes": "1",
        "ntasks": "1",
        "mem": "0",  # all of the node's: a partition's default (DefMemPerNode) may be a part
        "time": str(minutes),
        "output": str(folder / "job.log"),
        "open-mode": "append",
        "chdir": str(folder),
        "partition": target.partition,
        "account": target.account,
        "qos": target.qos,
    }
    words = [f"--{option}={value}" for option, value in options.items() if value is not None]
    wrap = f"--wrap=export PYTHONSAFEPATH=1; exec {shlex.join(argv)}"
    command = on_cluster(["sbatch", "--parsable", "--exclusive", "--no-requeue", *words, wrap], target.cluster)
    done = called(command, submission_environment(target, dict(os.environ)), _LIMIT_SECONDS)
    if done is None:
        raise Unavailable("sbatch: not on PATH, or no answer in time")
    if done.returncode != 0:
        raise sbatch_refusal(done.stderr or done.stdout, target)


def service_job(name: str, target: SlurmTarget) -> ServiceJob | None:
    """Return the job of this name in the queue; None: there is none. Raises Unavailable.

    squeue has shown nothing while jobs ran: looks must agree before a job is called gone.
    """
    for look in range(_AGREEING_LOOKS):
        time.sleep(_LOOK_SECONDS if look else 0)
        if (shown := _shown_job(name, target)) is not None:
            return shown
    return None


def _shown_job(name: str, target: SlurmTarget) -> ServiceJob | None:
    command = ["squeue", "--all", "--noheader", f"--name={name}", f"--user={os.getuid()}", "--format=%T|%N|%r"]
    answer = run_slurm(command, os.environ, _LIMIT_SECONDS, target.cluster)
    if answer.failed:
        raise Unavailable("squeue: no answer")
    for line in answer.text.splitlines():
        fields = line.strip().split("|", 2)
        if len(fields) < 3:
            continue  # `CLUSTER: a`, which some versions print of a named one
        state, node, reason = fields
        if state and standing(state).place != "ended":
            return ServiceJob(state=state, node=node or None, reason="" if reason == "None" else reason)
    return None


def slurm_node_address(node: str, target: SlurmTarget) -> str:
    """Return the address by which Slurm itself reaches a node; its name where it does not say."""
    answer = run_slurm(["scontrol", "show", "node", node, "--oneliner"], os.environ, _LIMIT_SECONDS, target.cluster)
    found = re.search(r"\bNodeAddr=(\S+)", answer.text)
    return found[1] if found else node


def end_service(name: str, target: SlurmTarget) -> bool:
    """End the job of this name; returns whether it has left the queue. Raises Unavailable."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        # Before the first look too, whatever that shows.
        run_slurm(["scancel", f"--name={name}", f"--user={os.getuid()}"], os.environ, _LIMIT_SECONDS, target.cluster)
        if service_job(name, target) is None:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
