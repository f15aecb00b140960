"""Scaling laws of a CSV file, as JSON or text.

    data = read_points(path)                        # ValueError naming line and column of every problem
    laws = fit_laws(data.points, data.kind, data.paired)
    print(laws_text(laws, data))                    # or json.dumps(laws_json(laws))

Columns: `ranks` and `throughput`; `repeat` (rows of one repeat are a block, compared within itself) and
`kind` (strong or weak, one for the file) may be there. Any other column is a condition: where it differs
from the smallest point's, the point is marked, because then not only the ranks changed.
"""

import csv
import difflib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.common.files.reading import brief, read_text
from configs.common.printable import printable
from reports.laws.laws import TITLES, LawKind, MeasuredPoint, ScalingLaws
from reports.laws.text import changed_text, law_lines, more_than_linear, residuals_text
from reports.numbers.statistics import Ratio, min_repeats
from reports.text import UNKNOWN, Table, aligned, estimate_cell, joined, number, plural, ratio_cell

NEEDED = ("ranks", "throughput")
OPTIONAL = ("repeat", "kind")
MOST_PROBLEMS = 20


@dataclass(frozen=True)
class PointFile:
    """The points of a file. `paired`: rows say which repeat they are, so that repeats pair over the ranks."""

    points: tuple[MeasuredPoint, ...]
    kind: LawKind
    paired: bool
    conditions: tuple[str, ...]


_MAX_CHARACTERS = 1800
_MAX_RANKS = 10**9
_MIN_THROUGHPUT, _MAX_THROUGHPUT = 1e-30, 1e30
"""Beyond these a square is no longer a finite number."""


@dataclass(frozen=True)
class _Row:
    line: int
    ranks: int
    throughput: float
    repeat: int | None
    conditions: Mapping[str, str]


def read_points(path: Path) -> PointFile:
    """Read a file. Raises ValueError with a line for each problem, OSError where it cannot be opened."""
    try:
        text = read_text(path)
    except ValueError as error:
        raise ValueError(f"{error}; save it as CSV in UTF-8") from error
    try:
        lines = [(line, cells) for line, cells in _lines(text) if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise ValueError(f"{path}: not a CSV file ({error})") from error
    if not lines:
        raise ValueError(f"{path}: empty; the first line names the columns: ranks,throughput")
    header_line, header = lines[0][0], [cell.strip().lower() for cell in lines[0][1]]
    problems = [f"{path}:{header_line}: {problem}" for problem in _header_problems(header)]
    if problems:
        raise ValueError(_told(problems))
    rows: list[_Row] = []
    kinds: dict[str, int] = {}
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            problems.append(
                f"{path}:{line}: {plural(len(cells), 'cell')}, the first line names {plural(len(header), 'column')}"
            )
            continue
        named = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        found, wrong = _row(line, named)
        problems += [f"{path}:{line}: {problem}" for problem in wrong]
        if found is not None:
            rows.append(found)
        kinds.setdefault(named.get("kind", "").lower() or "strong", line)
    problems += [f"{path}:{problem}" for problem in _file_problems(rows, kinds)]
    if not rows and not problems:
        problems.append(f"{path}: no rows below the first line; give a row for each measurement")
    if problems:
        raise ValueError(_told(problems))
    kind: LawKind = "weak" if "weak" in kinds else "strong"
    conditions = tuple(name for name in header if name not in (*NEEDED, *OPTIONAL))
    return PointFile(_points(rows, conditions), kind, "repeat" in header, conditions)


def _told(problems: Sequence[str]) -> str:
    """The first problems, a line for each, and how many more there are."""
    lines = [printable(problem, 400) for problem in problems[:MOST_PROBLEMS]]
    while len(lines) > 1 and sum(map(len, lines)) > _MAX_CHARACTERS:
        lines.pop()
    rest = len(problems) - len(lines)
    more = [f"and {plural(rest, 'more problem')}"] if rest else []
    return "\n".join([*lines, *more])


def _lines(text: str) -> list[tuple[int, list[str]]]:
    reader = csv.reader(text.splitlines())
    return [(reader.line_num, cells) for cells in reader]


def _header_problems(header: Sequence[str]) -> list[str]:
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        return ["columns must be separated by commas"]
    problems = [f"column {name}: named twice" for name in sorted({name for name in header if header.count(name) > 1})]
    for name in NEEDED:
        if name not in header:
            close = difflib.get_close_matches(name, header, 1)
            hint = f"; did you mean it by {close[0]}?" if close else ""
            problems.append(f"no column {name}; there are: {', '.join(header)}{hint}")
    return problems


def _row(line: int, named: Mapping[str, str]) -> tuple[_Row | None, list[str]]:
    problems = []
    ranks, throughput = _number(named["ranks"]), _number(named["throughput"])
    if ranks is None or not 1 <= ranks <= _MAX_RANKS or ranks != int(ranks):
        problems.append(f"column ranks: {brief(named['ranks'])} is not a whole number from 1 to {_MAX_RANKS:,}")
    if throughput is None or not _MIN_THROUGHPUT <= throughput <= _MAX_THROUGHPUT:
        problems.append(
            f"column throughput: {brief(named['throughput'])} is not a number above 0 (to {_MAX_THROUGHPUT:g}); "
            "leave out rows that were not measured"
        )
    repeat = _number(named["repeat"]) if "repeat" in named else None
    if "repeat" in named and (repeat is None or not 0 <= repeat <= _MAX_RANKS or repeat != int(repeat)):
        problems.append(f"column repeat: {brief(named['repeat'])} is not a whole number from 0 on")
    kind = named.get("kind", "").lower()
    if kind not in ("", "strong", "weak"):
        problems.append(f"column kind: {brief(named['kind'])}; use strong or weak")
    if problems or ranks is None or throughput is None:
        return None, problems
    conditions = {name: value for name, value in named.items() if name not in (*NEEDED, *OPTIONAL)}
    return _Row(line, int(ranks), throughput, None if repeat is None else int(repeat), conditions), []


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _file_problems(rows: Sequence[_Row], kinds: Mapping[str, int]) -> list[str]:
    """What is wrong between rows: repeats given twice, kinds mixed."""
    problems = []
    seen: dict[tuple[int, int], int] = {}
    for row in rows:
        if row.repeat is not None and (first := seen.setdefault((row.ranks, row.repeat), row.line)) != row.line:
            again = f"repeat {row.repeat} of {plural(row.ranks, 'rank')} is on line {first} already"
            problems.append(f"{row.line}: column repeat: {again}")
    if {"strong", "weak"} <= kinds.keys():
        line = max(kinds["strong"], kinds["weak"])
        problems.append(f"{line}: column kind: strong and weak in one file; each needs a file of its own")
    return problems


def _points(rows: Sequence[_Row], conditions: Sequence[str]) -> tuple[MeasuredPoint, ...]:
    groups: dict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[row.ranks].append(row)
    base = {name: {row.conditions[name] for row in groups[min(groups)]} for name in conditions}
    points = []
    for ranks, members in sorted(groups.items()):
        values = {index if row.repeat is None else row.repeat: row.throughput for index, row in enumerate(members)}
        changed = []
        for name in conditions:
            own = {row.conditions[name] for row in members}
            if own != base[name] or len(own) > 1:
                changed.append(f"{name} {_either(own)} instead of {_either(base[name])}" if own != base[name] else name)
        points.append(MeasuredPoint(ranks, values, tuple(changed)))
    return tuple(points)


def _either(values: set[str]) -> str:
    return " or ".join(value or "nothing" for value in sorted(values))


def laws_json(laws: ScalingLaws) -> dict[str, Any]:
    """Everything as JSON: a law that is not in `laws` is in `refused`, with the reason."""
    found: dict[str, Any] = {}
    for name, fit in laws.fits.items():
        if name == "linear":
            continue
        found[name] = {**fit.parameters}
        if name == "usl":
            found[name]["peak_ranks"] = fit.peak_ranks
        found[name] |= {
            "intervals": {parameter: list(bounds) for parameter, bounds in fit.intervals.items()},
            "at_bound": list(fit.at_bound),
            "scatter": fit.scatter,
            "residuals": {str(ranks): rest for ranks, rest in fit.residuals.items()},
        }
    if "karp_flatt" not in laws.refused:
        found["karp_flatt"] = [
            {"ranks": point.ranks, "serial_fraction": point.value, "interval": point.interval}
            for point in laws.karp_flatt
        ]
    return {
        "laws": found,
        "refused": dict(laws.refused),
        "supported": {"law": laws.support.law, "among": list(laws.support.among), "reason": laws.support.reason},
        "kind": laws.kind,
        "unit_ranks": laws.unit_ranks,
        "points": [
            {
                "ranks": point.ranks,
                "throughput": point.throughput.median,
                "throughput_interval": point.throughput.interval,
                "repeats": point.throughput.count,
                "speedup": _ratio_json(point.speedup),
                "efficiency": _ratio_json(point.efficiency),
                "changed": list(point.changed),
            }
            for point in laws.points
        ],
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else {"value": ratio.value, "interval": ratio.interval, "pairs": ratio.count}


def laws_text(laws: ScalingLaws, data: PointFile) -> str:
    """For a terminal: points, laws, residuals, support, and what to mind."""
    first, last = laws.points[0].ranks, laws.points[-1].ranks
    which = f" from {first} to {last}" if last > first else f", {first}"
    title = f"{laws.kind.capitalize()} scaling, {plural(len(laws.points), 'number')} of ranks{which}"
    parts = [title, aligned(points_table(laws)), "\n".join(_notes(laws, data))]
    parts += [f"- {line}" for line in law_lines(laws, "")]
    fits = {TITLES[name]: fit for name, fit in laws.fits.items() if name != "linear"}
    if fits:
        rests = "\n".join(f"  {title}: {residuals_text(fit)}" for title, fit in fits.items())
        parts.append(f"Residuals, measured / law - 1, by ranks:\n{rests}")
    aloud = more_than_linear([(point.ranks, point.efficiency) for point in laws.points], laws.kind, data.paired)
    marked = changed_text([(point.ranks, point.changed) for point in laws.points])
    parts += [sentence for sentence in (*aloud, marked) if sentence]
    return "\n\n".join(part for part in parts if part) + "\n"


def points_table(laws: ScalingLaws) -> Table:
    """One row for each number of ranks."""
    fractions = {point.ranks: point for point in laws.karp_flatt}
    rows = []
    for point in laws.points:
        own = point.ranks == laws.unit_ranks
        fraction = fractions.get(point.ranks)
        rows.append(
            (
                str(point.ranks),
                str(point.throughput.count),
                estimate_cell(point.throughput),
                "1" if own else ratio_cell(point.speedup),
                "1" if own else ratio_cell(point.efficiency),
                UNKNOWN if fraction is None else _fraction_cell(fraction.value, fraction.interval),
                ", ".join(point.changed) or UNKNOWN,
            )
        )
    columns = ("ranks", "repeats", "throughput", "speed-up", "efficiency", "serial fraction", "also changed")
    return Table(columns, tuple(rows), text_columns=0).without_empty_columns()


def _fraction_cell(value: float, interval: tuple[float, float] | None) -> str:
    return number(value) if interval is None else f"{number(value)} ({number(interval[0])} to {number(interval[1])})"


def _notes(laws: ScalingLaws, data: PointFile) -> list[str]:
    """How the intervals of the table and of the laws came to be."""
    counts = [point.throughput.count for point in laws.points]
    needed = min_repeats(max(1, len(laws.points) - 1))
    notes = []
    alone = [str(point.ranks) for point in laws.points if point.speedup is None]
    if max(counts) == 1:
        notes.append("One value for each number of ranks: the noise is known from the residuals of the laws only.")
    else:
        how = "paired by repeat" if data.paired else "unpaired: there is no column repeat"
        notes.append(f"Medians; parentheses hold 95 % intervals, brackets the range. Speed-ups are {how}.")
        if data.paired and min(counts) < needed and len(alone) < len(laws.points) - 1:
            notes.append(f"All speed-ups of this table together get intervals from {plural(needed, 'repeat')} on.")
    if alone:
        notes.append(
            f"No speed-up at {joined(alone)} ranks: no repeat was measured there and at {laws.unit_ranks} too. Rows "
            "that were measured together have the same repeat; without that column, speed-ups are unpaired."
        )
    if data.conditions:
        notes.append(f"Held to be conditions: {joined(data.conditions)}.")
    return notes
