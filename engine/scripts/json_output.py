"""Figures of a command that writes JSON, to a file or as the last document of its standard output.

series_of_json(work.json_figures, folder, standard_output, wall_seconds)
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.common.files.reading import MIB, brief, parse_json, read_json
from configs.records.record import Figure
from configs.workloads.script_figures import RANK_RATE, RATE, SECONDS, UNITS, JsonFigures
from engine.scripts.series import NoFiguresError, StepSeries

_MAX_BYTES = 16 * MIB


FileState = tuple[int, int, int]


def series_of_json(
    asked: JsonFigures,
    folder: Path,
    standard: bytes,
    wall_seconds: float,
    earlier: FileState | None = None,
    ranks: int = 1,
) -> StepSeries:
    """One step for the whole run: its seconds, where the document has none, are those of the process.

    earlier: state of the file before the run. ranks: of the job, for the rate of one. Raises NoFiguresError naming the
    path that is not in the document, and for a file that the run did not write.
    """
    if earlier is not None and earlier == state_of_file(asked, folder):
        raise NoFiguresError(
            f"workload.json_figures.file: {asked.file} was there before the script, which did not write it. "
            "Let the script write it, or correct the name"
        )
    where = f"workload.json_figures.{'file' if asked.file else 'figures'}"
    try:
        document = read_json(folder / asked.file, _MAX_BYTES, finite=False) if asked.file else last_document(standard)
    except (OSError, ValueError) as error:
        raise NoFiguresError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
    figures: dict[str, Figure] = {}
    for name, path in asked.figures.items():
        value = _at(document, path)
        if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            raise NoFiguresError(f"workload.json_figures.figures.{name}: no figure at {path}")
        figures[name] = value[:200] if isinstance(value, str) else value
    seconds, units, rate, of_rank = (_number(figures, name) for name in (SECONDS, UNITS, RATE, RANK_RATE))
    seconds = wall_seconds if seconds is None else seconds
    rate = of_rank * ranks if rate is None and of_rank is not None else rate
    if units is None and rate is not None:
        units = rate * seconds
    series = StepSeries(figures={name: value for name, value in figures.items() if name not in (SECONDS, UNITS)})
    series.add(seconds, units)
    return series


def state_of_file(asked: JsonFigures | None, folder: Path) -> FileState | None:
    """What changes when the file of the figures is written; None where there is no file."""
    if asked is None or asked.file is None:
        return None
    with suppress(OSError):
        status = (folder / asked.file).stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


def last_document(standard: bytes) -> Any:
    """The last JSON object or list that begins a line of a text. Raises ValueError where there is none."""
    text = standard.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    found, place = None, 0
    starts = [at for at in range(len(text)) if text[at] in "{[" and (at == 0 or text[at - 1] == "\n")]
    for at in starts:
        if at < place:
            continue
        try:
            _, place = decoder.raw_decode(text, at)
            found = text[at:place]
        except (ValueError, RecursionError):
            continue
    if found is None:
        raise ValueError("no JSON document on standard output")
    return parse_json(found.encode(), "standard output", finite=False)


def _at(document: Any, path: str) -> Any:
    """The value at a dotted path; numbers select of a list, negative ones from its end. None where it is not there.

    A name may have dots itself, as fio's percentiles have: jobs.0.read.clat_ns.percentile.99.000000.
    """
    parts = path.split(".")
    while parts:
        part, taken = parts[0], 1
        if isinstance(document, dict):
            names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            part = next((name for name in names if name in document), part)
            taken = part.count(".") + 1
            document = document.get(part)
        elif isinstance(document, list) and part.lstrip("-").isdigit() and -len(document) <= int(part) < len(document):
            document = document[int(part)]
        else:
            return None
        parts = parts[taken:]
    return document


def _number(figures: dict[str, Figure], name: str) -> float | None:
    """A figure that is computed with; None where it is not asked for. Raises NoFiguresError for one that cannot be."""
    value = figures.get(name)
    if value is None:
        return None
    if isinstance(value, bool | str) or value < 0 or (name == SECONDS and not value):
        least = "above 0" if name == SECONDS else "of at least 0"
        raise NoFiguresError(f"workload.json_figures.figures.{name}: expected a number {least}, got {brief(value)}")
    return float(value)
