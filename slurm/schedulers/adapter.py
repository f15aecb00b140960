"""Interface between the orchestrator and job schedulers: submit, poll, cancel. A folder identifies a job.

No state is kept in the submitting process: all operations work from any process of the same user on the submitting
machine, using the files in the job folder, so a killed study can be resumed.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from slurm.schedulers.refusals import JobState

_ADAPTERS = {
    "local": "slurm.schedulers.local",
    "slurm": "slurm.schedulers.cluster",
    "ssh": "slurm.schedulers.ssh.adapter",
    "steps": "slurm.schedulers.steps",
    "pbs": "slurm.schedulers.cluster",
}


class Adapter(Protocol):
    """What every way of starting jobs can do. The folder holds `job.json`; its path is absolute."""

    def submit(self, folder: Path) -> None:
        """Start the job and return at once. Raises OSError where that cannot be, and as `submit_many`."""

    def submit_many(self, folders: Sequence[Path]) -> None:
        """Start jobs of one target; those of one shape together, as one array where the scheduler has such.

        Raises Refused and Unavailable; what was started before that stays.
        """

    def poll(self, folder: Path) -> JobState:
        """Where the job stands; after "ended" there is an `end.json`. Never waits for a scheduler."""

    def await_end(self, folder: Path, seconds: float) -> None:
        """Sleep for so long, or until the job's end where that is noticed without polling."""

    def note(self, folder: Path) -> str:
        """One line for a person about a job that has not ended: its name at the scheduler, why it waits, its nodes."""

    def cancel(self, folder: Path) -> None:
        """End the job; return when nothing of it is left, within 8 seconds. May be called at any time."""

    def cancel_many(self, folders: Sequence[Path]) -> None:
        """End jobs of one target together, as `cancel` does."""


def adapter_for(name: str) -> "Adapter":
    """The adapter of this name (`target.adapter`). Raises ValueError for a name that has none."""
    if name not in _ADAPTERS:
        raise ValueError(f"target.adapter: got {name!r}, expected one of {sorted(_ADAPTERS)}")
    return cast(Adapter, importlib.import_module(_ADAPTERS[name]))
