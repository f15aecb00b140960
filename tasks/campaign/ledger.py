"""Completed and missing measurements of a run folder. Does not import Prefect.

An unreadable file is moved to `set_aside/` and its repeat counts as missing. A file of a newer schema stops the
run, because one folder must not mix two schemas.
"""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from configs.plans.job import Measurement
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.plans.record import MeasuringPass, Record, SchemaError, Status, read_record
from configs.spec.cell import Cell
from configs.workloads import descriptor_of

RepeatKey = tuple[str, MeasuringPass, int]
"""Cell key, measuring pass, repeat."""


@dataclass(frozen=True)
class LedgerEntry:
    """One attempt that left a record."""

    attempt: int
    status: Status
    path: Path
    record: Record


@dataclass
class Ledger:
    """All readable records of a run folder, and the files moved to `set_aside/`."""

    entries: dict[RepeatKey, list[LedgerEntry]] = field(default_factory=dict)
    attempts: dict[RepeatKey, int] = field(default_factory=dict)
    set_aside: list[str] = field(default_factory=list)

    def add(self, path: Path, record: Record) -> None:
        place = (record.key, record.measuring_pass, record.repeat)
        self.entries.setdefault(place, []).append(LedgerEntry(record.attempt, record.status, path, record))
        self.attempts[place] = max(self.attempts.get(place, 0), record.attempt)

    def decisive(self, place: RepeatKey) -> LedgerEntry | None:
        """Return the deciding attempt: a completed one, else the last."""
        entries = self.entries.get(place, [])
        completed = [entry for entry in entries if entry.status is Status.COMPLETED]
        return max(completed or entries, key=lambda entry: entry.attempt, default=None)


def read_ledger(run: RunPaths) -> Ledger:
    """Read all records. Raises SchemaError naming the file."""
    ledger = Ledger()
    for path in sorted(run.records.glob("*/*.json")):
        try:
            record = read_record(path)
            if record.num_columns and not _samples_whole(path.with_suffix(".npz")):
                raise ValueError(f"{path.with_suffix('.npz').name}: missing or damaged samples")
        except SchemaError:
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
    return f"{path.relative_to(run.folder)} is unreadable and was moved to set_aside/: {reason}"


_UNTIMED = "|".join(name for name in get_args(MeasuringPass) if name != "timed")
_RECORD_NAME = re.compile(rf"^([0-9a-f]{{16}})--(?:({_UNTIMED})-)?r(\d+)-a(\d+)\.json")


def _attempts_set_aside(run: RunPaths) -> Iterator[tuple[RepeatKey, int]]:
    for path in run.set_aside.glob("*.json*"):
        match = _RECORD_NAME.match(path.name)
        if match:
            key, measuring_pass, repeat, attempt = match.groups()
            yield (key, cast(MeasuringPass, measuring_pass or "timed"), int(repeat)), int(attempt)


def places(plan: Plan) -> list[RepeatKey]:
    """Everything that the plan asks for."""
    timed: list[RepeatKey] = [(key, "timed", repeat) for key in plan.cells for repeat in range(plan.repeats[key])]
    memory: list[RepeatKey] = [(key, "memory", 0) for key in plan.cells if _has_memory_pass(plan, key)]
    profiled = [key for key, cell in plan.cells.items() if is_profiled(cell)]
    profiles = ("profile",) if plan.measuring.profile else ()
    passes = (*profiles, plan.measuring.profiler) if plan.measuring.profiler else profiles
    return timed + memory + [(key, name, 0) for name in passes for key in profiled]


def _has_memory_pass(plan: Plan, key: str) -> bool:
    workload = plan.cells[key].workload
    return plan.measuring.memory and not workload.keeps_answers


def is_profiled(cell: Cell) -> bool:
    """Whether a profiling pass measures the cell: its workload marks what is to be recorded, and is no comparison."""
    return descriptor_of(cell.workload).marks_work and not cell.workload.keeps_answers


def missing_measurements(
    plan: Plan, ledger: Ledger, measuring_pass: MeasuringPass, only_failed: bool
) -> list[Measurement]:
    """Return the missing measurements of one measuring pass.

    only_failed: only those that were attempted and failed.
    """
    measurements = []
    for place in places(plan):
        key, place_pass, repeat = place
        entry = ledger.decisive(place)
        done = entry is not None and entry.status is Status.COMPLETED
        if place_pass != measuring_pass or done or (only_failed and entry is None):
            continue
        measurements.append(Measurement(cell=plan.cells[key], repeat=repeat, attempt=ledger.attempts.get(place, 0) + 1))
    return measurements
