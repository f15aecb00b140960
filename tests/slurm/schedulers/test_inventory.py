"""Which nodes of a target take jobs; of partitions: tests/slurm/schedulers/commands/test_partitions.py."""

from types import SimpleNamespace

import pytest

from configs.targets.target import SshTarget
from slurm.schedulers.inventory import usable_nodes
from slurm.ssh import connection
from slurm.ssh.connection import host_of


def test_a_host_that_its_jobs_cannot_reach_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `shared` they have a connection of their own, for their interpreter; the one of the checks was asked."""
    monkeypatch.setattr(connection, "_hosts", {})
    target = SshTarget(hosts=["gpu-a", "gpu-b"], shared="/scratch")
    of_jobs = target.model_copy(update={"python": "/scratch/rankwise/envs/1a2b/bin/python"})
    assert usable_nodes(target) == ("gpu-a", "gpu-b")
    host_of(of_jobs, target.hosts[0]).away_since = 1.0
    assert usable_nodes(target) == usable_nodes(of_jobs) == ("gpu-b",)
    monkeypatch.setattr(host_of(target, target.hosts[0]), "_line", line := SimpleNamespace(closed=False))
    assert usable_nodes(target) == ("gpu-a", "gpu-b"), "it is back"
    line.closed = True
    assert usable_nodes(target) == ("gpu-b",)
