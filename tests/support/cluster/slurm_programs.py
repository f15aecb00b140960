"""Stand-ins for programs of Slurm and PBS: they say what a test had them say, fail as it had them, and keep calls."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm.schedulers.commands.accounting import SACCT_FORMAT
from slurm.schedulers.job_queue import JobQueue
from slurm.schedulers.pbs.queue import PbsQueue
from slurm.schedulers.queue import Queue
from tests.support.cluster.launches import wait_until

PROGRAM = """#!/bin/sh
echo "$@" >> {folder}/{name}.calls
test -e {folder}/{name}.away && {{ cat {folder}/{name}.away >&2; exit $(cat {folder}/{name}.code); }}
cat {folder}/{name}.says
"""


@dataclass
class Cluster:
    """Two programs whose answers a test gives."""

    folder: Path
    queue: JobQueue

    def says(self, program: str, text: str) -> None:
        (self.folder / f"{program}.away").unlink(missing_ok=True)
        (self.folder / f"{program}.says").write_text(text)

    def away(
        self, program: str, words: str = "Unable to contact slurm controller (connect failure)", code: int = 1
    ) -> None:
        (self.folder / f"{program}.code").write_text(str(code))
        (self.folder / f"{program}.away").write_text(words)

    def calls(self, program: str) -> list[str]:
        path = self.folder / f"{program}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def look(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, "the queue's thread", limit_seconds=20)


def stand_in_cluster(folder: Path) -> Cluster:
    """Programs that know of no job, and a view of the queue by them."""
    _write_programs(folder, "squeue", "sacct", "scontrol", "scancel")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SQUEUE_STATES": "PENDING"}
    made = Cluster(folder, Queue(environment=environment))
    for name in ("squeue", "sacct", "scancel"):
        made.says(name, "")
    made.away("scontrol", UNKNOWN)
    return made


def stand_in_pbs(folder: Path) -> Cluster:
    """Programs of PBS that know of no job, and a view of its jobs by them."""
    names = ("qsub", "qstat", "qselect", "qdel", "pbsnodes")
    _write_programs(folder, *names)
    made = Cluster(folder, PbsQueue(environment={"PATH": f"{folder}:{os.environ['PATH']}"}))
    for name in names:
        made.says(name, "")
    made.away("qstat", "qstat: Unknown Job Id 7.head", 153)
    return made


def _write_programs(folder: Path, *names: str) -> None:
    for name in names:
        program = folder / name
        program.write_text(PROGRAM.format(folder=folder, name=name))
        program.chmod(0o755)


UNKNOWN = "slurm_load_jobs error: Invalid job id specified"


def details(job_id: str, state: str, nodes: str = "(null)", array: str = "") -> str:
    """A line of scontrol."""
    times = "RunTime=00:00:07 SubmitTime=1000 StartTime=1002"
    return f"JobId={job_id} {array}JobName=a JobState={state} Reason=None Dependency=(null) {times} NodeList={nodes}\n"


def account(job_id: str, state: str = "COMPLETED", nodes: str = "") -> str:
    fields = dict.fromkeys(SACCT_FORMAT.split(","), "") | {"JobID": job_id, "State": state, "NodeList": nodes}
    return f"{SACCT_FORMAT.replace(',', '|')}\n{'|'.join(fields.values())}\n"
