"""Targets: what squeue, sacct and sinfo print, and host lists."""

from collections.abc import Callable

from slurm.launcher.node import host_names
from slurm.schedulers.accounting import SACCT_FIELDS, read_accounts
from slurm.schedulers.partitions import read_partitions
from slurm.schedulers.queue import read_squeue

_SACCT = "\n".join(
    (
        "|".join(SACCT_FIELDS),
        "77|COMPLETED|node[01-02]|1700000000|1700000010|1700000099|89|02:29.120|||None",
        "77.batch|COMPLETED|node01|1700000000|1700000010|1700000099|89|01:10|123456K|0|",
        "78_1|CANCELLED by 0|None assigned|2026-01-01T00:00:00|Unknown|Unknown|0|1-02:03:04|||JobHeldUser",
    )
)
_SQUEUE = "77|RUNNING|node[01-02,7]|None\n78_1|PENDING||Resources\n78_2|PENDING||(Priority)\n"
_SINFO = (
    "lab|lab*|node01|2|9000|gpu:h100:4(S:0-1),gpu:a100:2|1-00:00:00|idle|up|a,b\n"
    "lab|lab*|node02|2|9000|(null)|infinite|down*|up|\n"
)


def targets() -> dict[str, Callable[[bytes], object]]:
    """Parsers of the output of Slurm's programs."""
    return {
        "slurm.squeue": lambda data: read_squeue(_text(data)),
        "slurm.sacct": lambda data: read_accounts(_text(data)),
        "slurm.sinfo": lambda data: read_partitions(_text(data)),
        "slurm.hosts": lambda data: host_names(_text(data)),
    }


def seeds() -> dict[str, tuple[bytes, ...]]:
    """A few lines of each."""
    return {
        "slurm.squeue": (_SQUEUE.encode(),),
        "slurm.sacct": (_SACCT.encode(),),
        "slurm.sinfo": (_SINFO.encode(),),
        "slurm.hosts": (b"node[01-03,7],gpu1", b"a[1-2]b[3-4]", b"localhost"),
    }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
