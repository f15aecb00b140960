"""Where the time of a run went, and what its repeats gave, from the time stamps and records of its folder alone.

    phases = phases_of(folder, wall_seconds=112.0)      # seconds by phase, of every launch and in total
    cells = cells_of(folder)                            # for each cell: seconds of a pass by repeat, peak memory, ...

It reads plain JSON and not the models of `configs`, so that folders of another version can be held against each other.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

_ANSWERS = ("answer_tokens", "answer_logits")


@dataclass(frozen=True)
class Launch:
    """Moments of one launch, in seconds since the epoch. `begun` and `ended`: of its first and last measurement."""

    name: str
    written: float
    begun: float
    ended: float


@dataclass(frozen=True)
class Phases:
    """Seconds by phase. `rest` is what lies before the first launch and after the last; None without a wall time."""

    launches: int
    start_up: float
    measuring: float
    idle: float
    rest: float | None

    @property
    def overhead(self) -> float:
        """What launches cost beside measuring."""
        return self.start_up + self.idle


@dataclass
class Cell:
    """What a run gave for one cell. pass_seconds: the median pass of each repeat, each from a launch of its own."""

    label: str
    pass_seconds: dict[int, float] = field(default_factory=dict)
    answers: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    peak_memory_bytes: float | None = None
    figures: set[str] = field(default_factory=set)
    failures: int = 0


def phases_of(folder: Path, wall_seconds: float | None = None) -> Phases:
    """The phases of a run whose launches followed each other, as those of this machine do.

    start-up: from the writing of job.json to the first measurement's begin. measuring: to the last measurement's end.
    idle: from there to the next job.json. Raises ValueError where nothing was measured.
    """
    launches = _launches(folder)
    if not launches:
        raise ValueError(f"{folder}: no launch has measured anything")
    start_up = sum(launch.begun - launch.written for launch in launches)
    measuring = sum(launch.ended - launch.begun for launch in launches)
    idle = sum(later.written - earlier.ended for earlier, later in pairwise(launches))
    rest = None if wall_seconds is None else wall_seconds - start_up - measuring - idle
    return Phases(len(launches), start_up, measuring, idle, rest)


def _launches(folder: Path) -> list[Launch]:
    by_job: dict[str, list[dict[str, Any]]] = {}
    for record in _records(folder):
        if record["started_at"]:
            by_job.setdefault(record["job"], []).append(record)
    found = [
        Launch(
            name,
            (folder / "jobs" / name / "job.json").stat().st_mtime,
            min(_moment(record["started_at"]) for record in records),
            max(_moment(record["finished_at"]) for record in records),
        )
        for name, records in by_job.items()
    ]
    return sorted(found, key=lambda launch: launch.written)


def _records(folder: Path) -> list[dict[str, Any]]:
    return [{**json.loads(path.read_bytes()), "path": path} for path in sorted(folder.glob("records/*/*.json"))]


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def cells_of(folder: Path) -> dict[str, Cell]:
    """The cells of a run, by a label that does not depend on the version of the schema."""
    cells: dict[str, Cell] = {}
    for record in _records(folder):
        label = _label(record["cell"])
        cell = cells.setdefault(label, Cell(label))
        cell.failures += record["status"] != "completed"
        if record["status"] != "completed":
            continue
        if record["measuring_pass"] == "memory":
            cell.peak_memory_bytes = record["figures"].get("peak_memory_bytes")
        elif record["measuring_pass"] == "timed":
            cell.figures |= set(record["figures"])
            _add_samples(cell, record["repeat"], record["path"].with_suffix(".npz"))
    return cells


def _label(cell: dict[str, Any]) -> str:
    work, layout = cell["workload"], cell["layout"]
    ranks = " ".join(f"{name}={layout[name]}" for name in ("dp", "tp", "pp") if layout[name] > 1) or "1 rank"
    parts = [str(cell["model"]).split(":")[-1], ranks, cell["dtype"], cell["engine"]]
    parts += [f"batch {work.get('batch_size')}", f"{work.get('num_prompts') or work.get('limit') or 'all'} prompts"]
    return ", ".join(parts + (["answers"] if work.get("answers") else []))


def _add_samples(cell: Cell, repeat: int, path: Path) -> None:
    with np.load(path, allow_pickle=False) as samples:
        names = list(samples.files)
        passes = [samples[name] for name in names if name.endswith("/pass_seconds")]
        if passes:
            cell.pass_seconds[repeat] = float(max(np.median(seconds) for seconds in passes))
        kept = sorted(name for name in names if name.endswith(_ANSWERS))
        cell.answers[repeat] = tuple(samples[name].tobytes() for name in kept)


def print_phases(rows: Iterable[tuple[str, Phases]]) -> None:
    """A table: seconds and shares by phase, and what a launch costs beside measuring."""
    print(f"{'':<10} {'launches':>8} {'start-up':>9} {'measuring':>10} {'idle':>7} {'rest':>7} {'a launch costs':>15}")
    for name, phases in rows:
        rest = f"{phases.rest:>7.1f}" if phases.rest is not None else f"{'':>7}"
        seconds = f"{phases.start_up:>9.1f} {phases.measuring:>10.1f} {phases.idle:>7.1f} {rest}"
        print(f"{name:<10} {phases.launches:>8} {seconds} {phases.overhead / phases.launches:>13.2f} s")
