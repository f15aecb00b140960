"""Targets: what squeue, sacct, sinfo, qstat and pbsnodes print, and host lists."""

from collections.abc import Callable

from slurm.launcher.node import host_names
from slurm.schedulers.commands.accounting import SACCT_FIELDS, read_accounts
from slurm.schedulers.commands.listing import read_partitions
from slurm.schedulers.pbs.jobs import read_jobs
from slurm.schedulers.pbs.vnodes import parse_answer, read_nodes
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
_QSTAT = (
    "Job Id: 7.head\n    job_state = F\n    Exit_status = -29\n    substate = 93\n    exec_host = n1/0*2+n2/0\n"
    "    etime = Mon Nov 23 12:54:56 2026\n    stime = Mon Nov 23 12:54:58 2026\n    comment = x\n"
    "    resources_used.walltime = 00:00:21\n    resources_used.cput = 00:01:00\n    resources_used.mem = 12kb\n"
)
_PBSNODES = (
    '{"pbs_server": "head", "nodes": {"n1": {"state": "free", "queue": "q", "resources_available": '
    '{"host": "n1", "ncpus": 2, "mem": "12kb", "ngpus": 1}}}, "Queue": {"q": {"resources_max": {"walltime": "1:0:0"}}}}'
)


def targets() -> dict[str, Callable[[bytes], object]]:
    """Parsers of the output of schedulers' programs."""
    return {
        "slurm.squeue": lambda data: read_squeue(_text(data)),
        "slurm.sacct": lambda data: read_accounts(_text(data)),
        "slurm.sinfo": lambda data: read_partitions(_text(data)),
        "slurm.hosts": lambda data: host_names(_text(data)),
        "pbs.qstat": lambda data: read_jobs(_text(data)),
        "pbs.nodes": lambda data: _pbs_nodes(_text(data)),
    }


def seeds() -> dict[str, tuple[bytes, ...]]:
    """A few lines of each."""
    return {
        "slurm.squeue": (_SQUEUE.encode(),),
        "slurm.sacct": (_SACCT.encode(),),
        "slurm.sinfo": (_SINFO.encode(),),
        "pbs.qstat": (_QSTAT.encode(),),
        "pbs.nodes": (_PBSNODES.encode(),),
        "slurm.hosts": (b"node[01-03,7],gpu1", b"a[1-2]b[3-4]", b"localhost"),
    }


def _pbs_nodes(text: str) -> object:
    said = parse_answer(text)
    return None if said is None else read_nodes(said, said)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
