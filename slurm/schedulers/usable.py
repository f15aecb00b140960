"""The nodes of a target that take jobs now, whatever its kind."""

from configs.spec.target import ClusterTarget, SlurmTarget, SshTarget
from slurm.schedulers import partitions
from slurm.ssh.connection import hosts_of


def usable_nodes(target: ClusterTarget) -> tuple[str, ...]:
    """Their names; none where nobody can say."""
    if isinstance(target, SshTarget):
        return tuple(host.name for host in hosts_of(target) if host.away_seconds == 0)
    assert isinstance(target, SlurmTarget)
    return partitions.usable_nodes(target)
