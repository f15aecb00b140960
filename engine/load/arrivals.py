"""Due times of an open loop: drawn from a process, or read from a trace.

due = arrival_seconds(PoissonArrivals(rate=4), 60.0, None, rng)     # sorted, all below 60 s
rows = read_trace(Path("trace.jsonl"), speed=1.0)
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.common.arrays import Floats
from configs.common.files.jsonl import parse_object
from configs.common.files.reading import TEXT_BYTES, brief, read_bytes
from configs.load.arrivals import ConstantArrivals, GammaArrivals, PoissonArrivals
from configs.load.lengths import MAX_TOKENS

_DRAWN_AT_ONCE = 4096
_MAX_SECONDS = 1e10
"""Since 1970 that is in the year 2286: larger ones are milliseconds."""


class TraceRow(NamedTuple):
    """A request of a trace: when it is due, and its lengths where the trace gives them."""

    seconds: float
    prompt_tokens: int | None = None
    new_tokens: int | None = None


def arrival_seconds(
    arrivals: PoissonArrivals | GammaArrivals | ConstantArrivals,
    duration_seconds: float | None,
    max_arrivals: int | None,
    rng: np.random.Generator,
) -> Floats:
    """Due times in seconds, ascending: those before `duration_seconds`, at most `max_arrivals` of them.

    At least one bound is given. The first gap is drawn too; a constant process begins at 0.
    """
    assert duration_seconds is not None or max_arrivals is not None
    if isinstance(arrivals, ConstantArrivals):
        most = np.inf if duration_seconds is None else np.ceil(duration_seconds * arrivals.rate)
        count = int(min(most, np.inf if max_arrivals is None else max_arrivals))
        return _bounded(np.arange(count) / arrivals.rate, duration_seconds, max_arrivals)
    shape = arrivals.burstiness if isinstance(arrivals, GammaArrivals) else 1.0
    parts: list[Floats] = []
    last, count = 0.0, 0
    while (duration_seconds is None or last < duration_seconds) and (max_arrivals is None or count < max_arrivals):
        gaps = rng.gamma(shape, 1 / (shape * arrivals.rate), _DRAWN_AT_ONCE)
        parts.append(last + gaps.cumsum())
        last, count = float(parts[-1][-1]), count + _DRAWN_AT_ONCE
    return _bounded(np.concatenate(parts) if parts else np.empty(0), duration_seconds, max_arrivals)


def _bounded(times: Floats, duration_seconds: float | None, max_arrivals: int | None) -> Floats:
    if duration_seconds is not None:
        times = times[times < duration_seconds]
    return times if max_arrivals is None else times[:max_arrivals]


def read_trace(path: Path, speed: float) -> list[TraceRow]:
    """The rows of a trace file by time, the first at 0. Raises ValueError naming the file and the line."""
    rows = []
    for number, line in enumerate(read_bytes(path, TEXT_BYTES).split(b"\n"), start=1):
        if line.strip():
            rows.append(_row(line, f"{path}, line {number}"))
    if not rows:
        raise ValueError(f'{path}: empty file, expected one object per line, such as {{"seconds": 0.5}}')
    rows.sort(key=lambda row: row.seconds)
    first = rows[0].seconds
    return [row._replace(seconds=(row.seconds - first) / speed) for row in rows]


def _row(line: bytes, where: str) -> TraceRow:
    data = parse_object(line, where, '{"seconds": 0.5, "prompt_tokens": 120, "new_tokens": 30}')
    seconds = data.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _MAX_SECONDS:
        expected = f"seconds from 0 to below {_MAX_SECONDS:,.0f}"
        raise ValueError(f"{where}: `seconds`: expected {expected}, got {brief(seconds)}")
    lengths = (_length(data, name, where) for name in ("prompt_tokens", "new_tokens"))
    return TraceRow(float(seconds), *lengths)


def _length(data: dict[str, Any], name: str, where: str) -> int | None:
    value = data.get(name)
    if value is not None and (type(value) is not int or not 0 < value <= MAX_TOKENS):
        raise ValueError(f"{where}: `{name}`: expected a number of tokens up to {MAX_TOKENS:,}, got {brief(value)}")
    return value
