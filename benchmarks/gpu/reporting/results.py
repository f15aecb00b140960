"""Results of checks: figures with their bars, one JSON file for each check. Imports the standard library only.

figure = Figure("share of the copy bandwidth", 0.71, "", bar=0.65, low=0.70, high=0.72, samples=20)
figure.state(rehearsal=False)           # "met"
write_result(folder, result); read_results(folder)
"""

import json
import math
import os
import tarfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Sense = Literal["at least", "at most", "is"]
FigureState = Literal["met", "missed", "not reached", "rehearsed", "seen"]
CheckState = Literal["running", "finished", "failed", "crashed", "timed out", "not reached"]
SCHEMA = 1
ARCHIVE = "results.tar.gz"


@dataclass(frozen=True)
class Figure:
    """One value of a check and its bar.

    value: None where it could not be had, with the reason in `note`. low, high: 95 % interval of the median of
    `samples` samples. sense: how value and bar compare; a bar of None asks nothing. speed: what a CPU and tiny shapes
    say nothing about, so that a rehearsal does not judge it.
    """

    name: str
    value: float | str | None
    unit: str = ""
    bar: float | str | None = None
    sense: Sense = "at least"
    low: float | None = None
    high: float | None = None
    samples: int = 0
    note: str = ""
    speed: bool = True

    def state(self, rehearsal: bool) -> FigureState:
        """Return whether the bar is met; `seen` without a bar, `rehearsed` where a rehearsal does not judge."""
        if self.value is None:
            return "not reached"
        if self.bar is None:
            return "seen"
        if rehearsal and self.speed:
            return "rehearsed"
        return "met" if self._meets() else "missed"

    def _meets(self) -> bool:
        if self.sense == "is":
            return self.value == self.bar
        if isinstance(self.value, str) or isinstance(self.bar, str) or self.value is None or self.bar is None:
            return False
        if not math.isfinite(self.value):
            return False
        return self.value >= self.bar if self.sense == "at least" else self.value <= self.bar


@dataclass(frozen=True)
class CheckResult:
    """What a check has found so far, and how its process ended. seconds: of the process; limit_seconds: its share."""

    check: str
    title: str
    state: CheckState
    rehearsal: bool
    began: str = ""
    seconds: float = 0.0
    limit_seconds: float = 0.0
    cause: str = ""
    surroundings: dict[str, Any] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()

    def with_figure(self, figure: Figure) -> "CheckResult":
        """Return the result with one more figure."""
        return replace(self, figures=(*self.figures, figure))

    @property
    def is_whole(self) -> bool:
        """Whether the check came to its end and reached every figure, so that it need not run again."""
        reached = all(figure.value is not None for figure in self.figures)
        return self.state == "finished" and reached

    @property
    def is_clean(self) -> bool:
        """Whether the check came to its end and misses no bar; in a rehearsal, packages may be missing."""
        states = {figure.state(self.rehearsal) for figure in self.figures}
        bad = {"missed"} if self.rehearsal else {"missed", "not reached"}
        return self.state == "finished" and not states & bad


def result_path(folder: Path, check: str) -> Path:
    """Return the file of a check's result."""
    return folder / f"{check}.json"


def write_result(folder: Path, result: CheckResult) -> None:
    """Replace the check's file in one step. Raises OSError."""
    path = result_path(folder, result.check)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"schema": SCHEMA, **asdict(result)}, indent=1) + "\n")
    os.replace(unfinished, path)


def read_result(path: Path) -> CheckResult:
    """Return the result in a file. Raises OSError, and ValueError naming the file for what is no result."""
    try:
        data = json.loads(path.read_text())
        if data.pop("schema") != SCHEMA:
            raise ValueError("written by another version")
        figures = tuple(Figure(**figure) for figure in data.pop("figures"))
        return CheckResult(**data, figures=figures)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a result of a check ({error})") from error


def read_results(folder: Path) -> dict[str, CheckResult]:
    """Return the results in a folder by check, unreadable ones left out: they are made again."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_result(path)
        except (OSError, ValueError):
            continue
        found[result.check] = result
    return found


def pack_results(folder: Path) -> None:
    """Put all results, logs and the study in `results.tar.gz`, one file to bring back; a full disk costs it only."""
    with suppress(OSError), tarfile.open(folder / ARCHIVE, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix != ".tmp" and path.name != ARCHIVE:
                packed.add(path, arcname=path.name)


def write_text(path: Path, text: str) -> None:
    """Write a file that is also printed: a full disk costs the file only."""
    with suppress(OSError):
        path.write_text(text)
