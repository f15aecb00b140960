"""What a run folder holds already, and what is still missing. No Prefect here.

A file that cannot be read is moved to `set_aside/` and its repeat counts as missing; a file of a newer
schema stops the run, since to measure beside it would mix two meanings in one folder.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from configs.cell import PROMPTED, Cell
from configs.job import Visit
from configs.paths import RunPaths
from configs.plan import Plan
from configs.record import MeasuringPass, NewerSchemaError, Record, Status, read_record

Place = tuple[str, MeasuringPass, int]
"""Cell key, measuring pass, repeat."""


@dataclass(frozen=True)
class Entry:
    """One attempt that left a record."""

    attempt: int
    status: Status
    path: Path
    record: Record


@dataclass
class Ledger:
    """Every readable record of a run folder, and what had to be set aside."""

    entries: dict[Place, list[Entry]] = field(default_factory=dict)
    attempts: dict[Place, int] = field(default_factory=dict)
    set_aside: list[str] = field(default_factory=list)

    def add(self, path: Path, record: Record) -> None:
        place = (record.key, record.measuring_pass, record.repeat)
        self.entries.setdefault(place, []).append(Entry(record.attempt, record.status, path, record))
        self.attempts[place] = max(self.attempts.get(place, 0), record.attempt)

    def decisive(self, place: Place) -> Entry | None:
        """The attempt that counts: a completed one, else the last."""
        entries = self.entries.get(place, [])
        completed = [entry for entry in entries if entry.status is Status.COMPLETED]
        return max(completed or entries, key=lambda entry: entry.attempt, default=None)


def read_ledger(run: RunPaths) -> Ledger:
    """Read all records. Raises NewerSchemaError naming the file."""
    ledger = Ledger()
    for path in sorted(run.records.glob("*/*.json")):
        try:
            record = read_record(path)
            if record.num_columns and not _samples_whole(path.with_suffix(".npz")):
                raise ValueError(f"{path.with_suffix('.npz').name}: missing or damaged samples")
        except NewerSchemaError:
            raise
        except (ValueError, OSError) as error:
            ledger.set_aside.append(set_aside(run, path, str(error)))
            continue
        ledger.add(path, record)
    for place, attempt in _attempts_set_aside(run):
        ledger.attempts[place] = max(ledger.attempts.get(place, 0), attempt)
    return ledger


def _samples_whole(path: Path) -> bool:
    """Whether the samples archive begins and ends as a zip file does.

    Every column's CRC is checked when it is read; this cheap look finds a file cut short or overwritten.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(max(0, os.path.getsize(path) - 22))
            return start == b"PK\x03\x04" and file.read(4) == b"PK\x05\x06"
    except OSError:
        return False


def set_aside(run: RunPaths, path: Path, reason: str) -> str:
    """Move a damaged file, and the samples beside it, out of the way. Returns a line that says so."""
    run.set_aside.mkdir(exist_ok=True)
    for damaged in (path, path.with_suffix(".npz")):
        if damaged.exists():
            name = f"{damaged.parent.name}--{damaged.name}"
            taken = sum(1 for other in run.set_aside.iterdir() if other.name.startswith(name))
            shutil.move(damaged, run.set_aside / (f"{name}.{taken}" if taken else name))
    return f"{path.relative_to(run.folder)} could not be read and was set aside: {reason}"


_UNTIMED = "|".join(name for name in get_args(MeasuringPass) if name != "timed")
_RECORD_NAME = re.compile(rf"^([0-9a-f]{{16}})--(?:({_UNTIMED})-)?r(\d+)-a(\d+)\.json")


def _attempts_set_aside(run: RunPaths) -> Iterator[tuple[Place, int]]:
    for path in run.set_aside.glob("*.json*"):
        match = _RECORD_NAME.match(path.name)
        if match:
            key, measuring_pass, repeat, attempt = match.groups()
            yield (key, cast(MeasuringPass, measuring_pass or "timed"), int(repeat)), int(attempt)


def places(plan: Plan) -> list[Place]:
    """Everything that the plan asks for."""
    timed: list[Place] = [(key, "timed", repeat) for key in plan.cells for repeat in range(plan.repeats[key])]
    memory: list[Place] = [(key, "memory", 0) for key in plan.cells if _has_memory_pass(plan, key)]
    profiled = [key for key, cell in plan.cells.items() if is_profiled(cell)]
    profiles = ("profile",) if plan.measuring.profile else ()
    passes = (*profiles, plan.measuring.profiler) if plan.measuring.profiler else profiles
    return timed + memory + [(key, name, 0) for name in passes for key in profiled]


def _has_memory_pass(plan: Plan, key: str) -> bool:
    workload = plan.cells[key].workload
    return plan.measuring.memory and not getattr(workload, "answers", False)


def is_profiled(cell: Cell) -> bool:
    """Whether a profiling pass visits the cell: its workload marks what is to be recorded, and is no comparison."""
    return cell.workload.kind in (*PROMPTED, "train") and not getattr(cell.workload, "answers", False)


def missing_visits(plan: Plan, ledger: Ledger, measuring_pass: MeasuringPass, only_failed: bool) -> list[Visit]:
    """What is still to be visited in one measuring pass.

    only_failed: of that, only what was tried before and failed.
    """
    visits = []
    for place in places(plan):
        key, place_pass, repeat = place
        entry = ledger.decisive(place)
        done = entry is not None and entry.status is Status.COMPLETED
        if place_pass != measuring_pass or done or (only_failed and entry is None):
            continue
        visits.append(Visit(cell=plan.cells[key], repeat=repeat, attempt=ledger.attempts.get(place, 0) + 1))
    return visits
