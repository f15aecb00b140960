"""What a partition has for servers, as sinfo says it. On a real Slurm: test_slurm_deployments.py."""

from pathlib import Path

import pytest

from configs.targets.target import SlurmTarget
from slurm.schedulers.commands.listing import read_partitions
from slurm.schedulers.commands.partitions import Partitions
from tasks.deployment import slurm_places
from tasks.deployment.places import PlaceError
from tasks.deployment.slurm_places import SlurmPartition, SlurmPlace


def test_memory_that_a_cluster_does_not_name_is_no_memory_of_a_mebibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sinfo prints 1 MB where slurm.conf sets no RealMemory: no model fitted into `0.00 GiB`."""
    lines = ["batch|batch*|n1|64|1|(null)|infinite|idle|up|x"]
    monkeypatch.setattr(slurm_places, "read_cluster", lambda _: Partitions("c", read_partitions("\n".join(lines))))
    target = SlurmTarget(name="slurm:batch", partition="batch", shared=str(tmp_path))
    place = SlurmPlace(SlurmPartition(target=target), "d", expires_at=0.0, say=print)
    assert place.cores() == 64
    with pytest.raises(PlaceError, match=r"slurm:batch: the memory of its nodes is unknown: slurm.conf sets no RealM"):
        place.memory_bytes()
    lines.append("batch|batch*|n2|32|256000|(null)|infinite|idle|up|x")
    assert place.memory_bytes() == 256000 << 20 and place.cores() == 32
