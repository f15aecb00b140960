"""Completed and missing measurements of a run folder. Does not import Prefect.

    ledger = read_ledger(run)                # changes nothing: status, dry runs
    ledger = set_aside_damaged(run)          # a run: what is damaged goes to `set_aside/`, its repeat is measured again

A file of a newer schema stops the run, because one folder must not mix two schemas.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import get_args

from configs.common.files.reading import reason_of
from configs.common.printable import printable
from configs.plans.job import Measurement
from configs.plans.packing import Launch, pack_launches
from configs.plans.passes import passes_of
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import MeasuringPass, Record, SchemaError, Status, place_set_aside, read_record
from configs.records.samples import DamagedSamplesError
from reports.reading.read import decisive_reading

RepeatKey = tuple[str, MeasuringPass, int]
"""Cell key, measuring pass, repeat."""

_MAX_TOLD = 8


@dataclass(frozen=True)
class LedgerEntry:
    """One attempt that left a record."""

    attempt: int
    status: Status
    path: Path
    record: Record


@dataclass
class Ledger:
    """All readable records of a run folder, those that are damaged and why, and lines on files that were moved away."""

    entries: dict[RepeatKey, list[LedgerEntry]] = field(default_factory=dict)
    attempts: dict[RepeatKey, int] = field(default_factory=dict)
    damaged: dict[Path, Exception] = field(default_factory=dict)
    set_aside: list[str] = field(default_factory=list)

    def add(self, path: Path, record: Record) -> None:
        place = (record.key, record.measuring_pass, record.repeat)
        self.entries.setdefault(place, []).append(LedgerEntry(record.attempt, record.status, path, record))
        self.tried(place, record.attempt)

    def tried(self, place: RepeatKey, attempt: int) -> None:
        """Count an attempt, whatever became of its record."""
        self.attempts[place] = max(self.attempts.get(place, 0), attempt)

    def decisive(self, place: RepeatKey) -> LedgerEntry | None:
        """Return the deciding attempt: a completed one, else the last."""
        entries = self.entries.get(place, [])
        completed = [entry for entry in entries if entry.status is Status.COMPLETED]
        return max(completed or entries, key=lambda entry: entry.attempt, default=None)


def read_ledger(run: RunPaths) -> Ledger:
    """Read all records with their samples; changes nothing. Raises SchemaError naming the file."""
    ledger = Ledger()
    for path in sorted(run.records.glob("*/*.json")):
        try:
            record = read_record(path)
            decisive_reading(record, path, path.name, defaultdict(list))  # whether its samples are whole and fit it
        except SchemaError:
            raise
        except FileNotFoundError:
            continue  # a run has set it aside since the folder was listed
        except DamagedSamplesError as error:
            ledger.damaged[path] = error.refusal or error
        except (ValueError, OSError) as error:
            ledger.damaged[path] = error
        else:
            ledger.add(path, record)
    names = [f"{path.parent.name}--{path.name}" for path in ledger.damaged]
    for name in [*names, *(path.name for path in run.set_aside.glob("*.json*"))]:
        if found := place_set_aside(name):
            ledger.tried(found[:3], found[3])
    return ledger


def set_aside_damaged(run: RunPaths) -> Ledger:
    """Move damaged records to `set_aside/`, and read the rest. Raises as `read_ledger`, and OSError.

    A file that the system does not let us read (permissions, a full table of files) is not damaged: OSError.
    """
    ledger = read_ledger(run)
    for path, error in ledger.damaged.items():
        if isinstance(error, OSError):
            raise error
        ledger.set_aside.append(set_aside(run, path, str(error)))
    ledger.damaged.clear()
    return ledger


def set_aside(run: RunPaths, path: Path, reason: str) -> str:
    """Move a damaged file, and the samples beside it, out of the way. Returns a line that says so."""
    run.set_aside.mkdir(exist_ok=True)
    for damaged in (path, path.with_suffix(".npz")):
        if damaged.exists():
            name = f"{damaged.parent.name}--{damaged.name}"
            # To look through the folder for each of its files takes minutes where thousands are damaged.
            names = chain([name], (f"{name}.{number}" for number in count(1)))
            shutil.move(damaged, next(path for path in map(run.set_aside.joinpath, names) if not os.path.lexists(path)))
    shown = printable(reason.replace(f"{path}: ", "").replace(f"{run.folder}/", ""), 300)
    return f"{path.relative_to(run.folder)} is unreadable and was moved to set_aside/: {shown}"


def told_set_aside(lines: Sequence[str]) -> list[str]:
    """The lines on files that were moved, for a terminal: of many the first ones, and how many more."""
    rest = len(lines) - _MAX_TOLD
    more = f"{rest:,} more unreadable files were moved to set_aside/"
    return [*lines[:_MAX_TOLD], more] if rest > 1 else [*lines]


def damaged_places(ledger: Ledger) -> dict[RepeatKey, str]:
    """Why a repeat has no record that can be read, by repeat: of those that have a damaged one."""
    found: dict[RepeatKey, str] = {}
    for path, error in ledger.damaged.items():
        if place := place_set_aside(f"{path.parent.name}--{path.name}"):
            found[place[:3]] = printable(reason_of(error).replace(f"{path}: ", ""), 300)
    return found


def planned_repeats(plan: Plan) -> list[RepeatKey]:
    """Everything that the plan asks for."""
    timed: list[RepeatKey] = [(key, "timed", repeat) for key in plan.cells for repeat in range(plan.repeats[key])]
    order = get_args(MeasuringPass)
    once = [(key, name, 0) for key in plan.cells for name in passes_of(plan, key)]
    return timed + sorted(once, key=lambda place: order.index(place[1]))


def targets_to_measure(plan: Plan, ledger: Ledger, only_failed: bool) -> set[str]:
    """Return the names of targets of which a measurement of any pass is missing, as `missing_measurements` has it."""
    passes = get_args(MeasuringPass)
    missing = [each for one in passes for each in missing_measurements(plan, ledger, one, only_failed)]
    return {measurement.cell.target for measurement in missing}


def missing_measurements(
    plan: Plan, ledger: Ledger, measuring_pass: MeasuringPass, only_failed: bool
) -> list[Measurement]:
    """Return the missing measurements of one measuring pass.

    only_failed: only those that were attempted and failed.
    """
    measurements = []
    for place in planned_repeats(plan):
        key, place_pass, repeat = place
        entry = ledger.decisive(place)
        done = entry is not None and entry.status is Status.COMPLETED
        if place_pass != measuring_pass or done or (only_failed and entry is None):
            continue
        measurements.append(Measurement(cell=plan.cells[key], repeat=repeat, attempt=ledger.attempts.get(place, 0) + 1))
    return measurements


def missing_launches(plan: Plan, ledger: Ledger, only_failed: bool = False) -> list[Launch]:
    """Return the launches of what `missing_measurements` has of every measuring pass, in the order of a run."""
    return [
        launch
        for measuring_pass in get_args(MeasuringPass)
        for launch in pack_launches(
            missing_measurements(plan, ledger, measuring_pass, only_failed),
            measuring_pass,
            plan.measuring.seed,
            plan.pack,
        )
    ]
