"""What a target's cluster has, whatever its scheduler is; each is asked once.

inventory = Inventory()
inventory.lacks(target, [Need(nodes=2, cores=1)])     # problems; ClusterError where the scheduler does not answer
usable_nodes(target)                                  # names of nodes that can take a job
"""

from collections.abc import Sequence

from configs.targets.resources import ClusterTarget
from configs.targets.target import PbsTarget, SlurmTarget, SshTarget
from slurm.schedulers.commands import partitions
from slurm.schedulers.commands.allocation import allocation_lacks, current_allocation
from slurm.schedulers.commands.partitions import Clusters, Need
from slurm.schedulers.commands.trial import trial
from slurm.schedulers.pbs.vnodes import PbsCluster, read_pbs_cluster
from slurm.ssh.connection import is_away


class Inventory:
    """The clusters of a study's targets."""

    def __init__(self) -> None:
        self._clusters = Clusters()
        self._pbs: dict[str | None, PbsCluster] = {}

    def lacks(self, target: ClusterTarget, needs: Sequence[Need]) -> list[str]:
        """Return the requirements of a study that a cluster does not meet, as `field: what is wrong`.

        Raises ClusterError.
        """
        if isinstance(target, PbsTarget):
            return self._pbs_cluster(target).lacks(target, needs)
        assert isinstance(target, SlurmTarget)
        if target.allocation is None:
            found = partitions.lacks(target, needs, self._clusters.of(target))
        else:
            found = allocation_lacks(target, needs, current_allocation())
        return found or _refused_by_sbatch(target, needs)

    def identity(self, target: ClusterTarget) -> str:
        """What figures of a target are comparable by. Raises ClusterError."""
        if isinstance(target, PbsTarget):
            return self._pbs_cluster(target).identity(target)
        assert isinstance(target, SlurmTarget)
        return partitions.cluster_identity(target, self._clusters.of(target))

    def _pbs_cluster(self, target: PbsTarget) -> PbsCluster:
        if target.server not in self._pbs:
            self._pbs[target.server] = read_pbs_cluster(target.server)
        return self._pbs[target.server]


def usable_nodes(target: ClusterTarget) -> tuple[str, ...]:
    """Nodes that take the target's jobs, by name; none where the scheduler cannot say, or jobs cannot avoid nodes.

    PBS selects nodes by what they have, and leaves none out by name.
    """
    if isinstance(target, SshTarget):
        return tuple(host.name for host in target.hosts if not is_away(target, host))
    return partitions.partition_nodes(target) if isinstance(target, SlurmTarget) else ()


def _refused_by_sbatch(target: SlurmTarget, needs: Sequence[Need]) -> list[str]:
    """What sbatch says against the largest job of a target, which its partitions could hold."""
    if not needs:
        return []
    largest = max(needs, key=lambda need: (need.nodes, need.cores))
    refused = trial(target, largest.nodes, largest.cores)
    return [] if refused is None else [refused.removeprefix("target.")]
