"""The lab that tests marked `slurm` run on: real daemons on this machine, one lab for a test session.

    def test_something(lab: Lab) -> None:
        assert lab.slurm("srun", "--nodes=2", "hostname").split() == list(lab.plan.node_names)

LAB=name pytest -m slurm ... uses the lab of this name that is up, and leaves it up.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm.lab import cluster, nodes
from slurm.lab.commands import why_no_lab
from slurm.lab.plan import LabPlan, LabRequest
from tests.support.patience import patient


@dataclass
class Lab:
    """A lab that is up, and questions to it."""

    plan: LabPlan

    def slurm(self, *argv: str, check: bool = True) -> str:
        """What a command of Slurm says."""
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def on_node(self, node: str, *argv: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on a node, as root, beside the jobs."""
        return subprocess.run([*nodes.inside(self.plan.name, node), *argv], capture_output=True, text=True, timeout=600)

    def add_qos(self, name: str, *limits: str) -> None:
        """A QOS for root. Returns when slurmctld knows it, which the database tells it."""
        self.slurm("sacctmgr", "-i", "add", "qos", name, *limits, check=False)
        self.slurm("sacctmgr", "-i", "modify", "user", "root", "set", f"qos+={name}")
        deadline = time.monotonic() + 20
        while f" {name}(" not in self.slurm("scontrol", "show", "assoc_mgr", "flags=qos").replace("QOS=", " "):
            assert time.monotonic() < deadline, f"slurmctld does not know the qos {name}"
            time.sleep(0.2)

    def queue(self) -> list[str]:
        """Ids of all jobs that wait, run or end."""
        return self.slurm("squeue", "--noheader", "--array", "--format=%i").split()

    def state(self, job: str) -> str:
        """A job's state by its accounts, such as COMPLETED; empty until there are any."""
        told = self.slurm("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job, "--format=state")
        return told.split()[0] if told.split() else ""

    def wait_until_ended(self, job: str, limit_seconds: float = 60.0) -> str:
        """Its state when it has left the queue and its accounts say so."""
        deadline = time.monotonic() + patient(limit_seconds)
        while job in self.queue() or self.state(job) in ("", "PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"job {job} is {self.state(job)} after {limit_seconds:g} s"
            time.sleep(0.2)
        return self.state(job)


@contextmanager
def lab_for_tests(folder: Path) -> Iterator[Lab]:
    """A lab of two nodes, or the one that the environment names; skips where there can be none."""
    if named := os.environ.get("LAB"):
        plan = cluster.find_lab(named)
    else:
        if (why := why_no_lab()) is not None:
            pytest.skip(why)
        # Two sessions at a time on one machine do not meet.
        request = LabRequest(
            name=f"t{os.getpid() % 10**6}x", folder=folder, bandwidths=("100mbit", "1gbit"), enforce_limits=True
        )
        cluster.up(request)
        plan = cluster.find_lab(request.name, folder)
    os.environ["SLURM_CONF"] = str(plan.slurm_conf)
    try:
        yield Lab(plan)
    finally:
        del os.environ["SLURM_CONF"]
        if not named:
            cluster.down(plan.name, plan.folder)
