"""How a job on hosts that are reached by SSH ended: what its nodes left, and what was lost of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.common.base import utc_now
from configs.common.files.reading import read_tail
from configs.common.printable import some_of
from configs.common.secrets import excerpt
from configs.plans.job import Job, JobEnd
from configs.plans.paths import JobPaths
from configs.records.record import Status
from slurm.launcher.job_files import measurement_under_way
from slurm.schedulers.commands.states import NEVER_BEGAN, composed
from slurm.schedulers.job_files import node_end, node_launcher
from slurm.ssh.connection import HostRefused

_LAST_BYTES = 600


@dataclass(frozen=True)
class EndedFromOutside:
    """Why a job was ended from outside; nodes: those to blame."""

    status: Status
    message: str
    nodes: tuple[str, ...] = ()
    kind: str | None = None

    @classmethod
    def of_error(cls, error: Exception, names: Sequence[str]) -> "EndedFromOutside":
        """Of what a host refuses or cannot do; its message begins with the host's name."""
        said = str(getattr(error, "strerror", None) or error)
        blamed = tuple(name for name in names if said.startswith(f"{name}:"))
        kind = "HostRefused" if isinstance(error, HostRefused) else "HostError"
        return cls(Status.NODE_FAILED, f"host {said}", blamed, kind)


def concluded(
    job: Job,
    paths: JobPaths,
    names: Sequence[str],
    losses: Sequence[EndedFromOutside],
    never_started: Collection[int] = (),
) -> JobEnd:
    """The end of a job that is over on all its hosts, or given up. names: of the hosts, by node rank.

    never_started: ranks of hosts whose turn to start did not come. What they did not say means nothing.
    """
    ranks = [rank for rank in range(len(names)) if rank not in never_started] or list(range(len(names)))
    ends = [node_end(paths, rank) for rank in ranks]
    measurement = measurement_under_way(paths)
    if losses:
        return JobEnd(
            status=losses[0].status,
            return_code=None,
            measurement=measurement or next((end.measurement for end in ends if end and end.measurement), None),
            nodes=tuple(name for loss in losses for name in loss.nodes),
            kind=losses[0].kind,
            message=excerpt("; ".join(loss.message for loss in losses), _LAST_BYTES),
            finished_at=utc_now(),
        )
    silent = [rank for rank, end in zip(ranks, ends, strict=True) if end is None]
    if silent and all(end is None or end.status in (Status.COMPLETED, Status.CANCELLED) for end in ends):
        return _silent(paths, names, silent, measurement)
    began = [node_launcher(paths, rank) is not None for rank in ranks]
    return composed(job, ends, None, [names[rank] for rank in ranks], began, measurement)


def _silent(paths: JobPaths, names: Sequence[str], silent: Sequence[int], measurement: str | None) -> JobEnd:
    """The end of a job whose launchers are gone without a word, from the hosts that are reached and know nothing."""
    who = tuple(names[rank] for rank in silent)
    if any(node_launcher(paths, rank) is not None for rank in silent):
        message = f"the launcher on {some_of(who)} exited without a result; see launcher_{silent[0]}.log"
        return JobEnd(
            status=Status.LOST, return_code=None, measurement=measurement, nodes=who, message=message,
            finished_at=utc_now(),
        )  # fmt: skip
    log = paths.folder / f"start_{silent[0]}.log"
    try:
        said = read_tail(log, _LAST_BYTES).strip().splitlines()[-1:]
    except (OSError, ValueError):
        said = []
    message = f"the launcher on {some_of(who)} did not start: {''.join(said) or 'no message'}; see {log.name}"
    return JobEnd(
        status=Status.FAILED, return_code=None, suspects=who, kind=NEVER_BEGAN, message=excerpt(message, _LAST_BYTES),
        finished_at=utc_now(),
    )  # fmt: skip
