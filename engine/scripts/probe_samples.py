"""Samples that the probe left: counted while the script runs, read when it has ended.

    count = steps_so_far(folder, rank)
    series = series_of_probe(folder, rank)

The layout is that of `rankwise_probe.recording`; a test holds the two together. Of several processes with one rank the
one with the most steps counts.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from configs.common.files.reading import open_regular, read_bytes
from engine.scripts.series import StepSeries

MAGIC = b"RWPROBE1"
HEADER, ROWS, COLUMNS, MARKS = 65536, 8192, 13, 8
PAGE = ROWS * 8 * COLUMNS
MAX_BYTES = HEADER + 512 * PAGE
UNKNOWN = 0x7FF8_5257_5052_4F42
"""Bits of a NaN that stands for "not told", as opposed to a loss that is NaN."""


def steps_so_far(folder: Path, rank: int) -> int:
    """Steps that a rank has ended, and its GPU too."""
    return max((whole for _, _, whole in _files(folder, rank)), default=0)


def steps_called(folder: Path, rank: int) -> int:
    """Steps that a rank has ended; its GPU may still work at the last ones."""
    return max((count for _, count, _ in _files(folder, rank)), default=0)


def ended_in_order(folder: Path, rank: int) -> bool:
    """Whether a rank's interpreter came to its end, so that only the teardown of libraries was left."""
    found = max(_files(folder, rank), key=lambda item: item[1], default=None)
    if found is None:
        return False
    with suppress(OSError, ValueError), open_regular(found[0], MAX_BYTES) as file:
        return file.read(18)[17:] == b"\x01"
    return False


def series_of_probe(folder: Path, rank: int) -> StepSeries:
    """All steps of a rank that its GPU has ended too; none where it left nothing. Raises OSError and ValueError."""
    found = max(_files(folder, rank), key=lambda item: item[1], default=None)
    if found is None:
        return StepSeries()
    path, _, count = found
    data = read_bytes(path, MAX_BYTES)
    pages = [
        np.frombuffer(data, "<f8", ROWS * COLUMNS, HEADER + PAGE * page).reshape(COLUMNS, ROWS)
        for page in range(min(-(-count // ROWS), (len(data) - HEADER) // PAGE))
    ]
    if not pages:
        return StepSeries()
    rows = np.concatenate(pages, axis=1)[:, :count]
    series = _series(rows)
    series.device_clock = data[16] == 1
    names = json.loads(data[64:HEADER].rstrip(b" \0") or b"[]")
    for place, name in enumerate(names[:MARKS] if isinstance(names, list) else []):
        for value in rows[5 + place][np.isfinite(rows[5 + place])]:
            series.mark(f"mark_{_slug(str(name))}", float(value))
    return series


def series_of_all(folder: Path, rank: int) -> StepSeries:
    """Steps of a rank, with those of the ranks that its program started itself, as a shell script with torchrun does.

    Seconds are those of the slowest, units those of all together. Raises OSError and ValueError.
    """
    series = series_of_probe(folder, rank)
    names = {path.name.split(".")[0] for path in folder.glob("rank_*.samples")} - {f"rank_{rank}"}
    others = [series_of_probe(folder, int(name[5:])) for name in sorted(names) if name[5:].isdecimal()]
    ranks = [series, *(other for other in others if len(other))]
    if len(ranks) == 1 or not len(series):
        return series
    count = min(map(len, ranks))
    return StepSeries(
        [_together(told, max) for told in zip(*(each.seconds[:count] for each in ranks), strict=True)],
        [_together(told, sum) for told in zip(*(each.units[:count] for each in ranks), strict=True)],
        series.losses[:count],
        series.marks,
        series.figures,
        series.device_clock,
    )


def _together(told: Iterable[float | None], combine: Callable[[list[float]], float]) -> float | None:
    """One value of all ranks; None where one of them is not known."""
    values = list(told)
    known = [value for value in values if value is not None]
    return combine(known) if len(known) == len(values) else None


def _series(rows: np.ndarray) -> StepSeries:
    """Seconds of a step: on a device from the end of the step before to its own, else as the rank saw it."""
    begin, end, tokens, losses, device = rows[:5]
    known = losses.view(np.uint64) != UNKNOWN
    seconds: list[float | None] = [float(value) if np.isfinite(value) else None for value in end - begin]
    called = np.concatenate([[False], np.isclose(begin[1:], end[:-1], rtol=0, atol=1e-9)])
    for place, (before, now) in enumerate(pairwise(device), start=1):
        # Of a `with` block the time between blocks is not the step's.
        if called[place] and np.isfinite(before) and np.isfinite(now):
            seconds[place] = max(0.0, float(now - before))
    series = StepSeries()
    for place, value in enumerate(seconds):
        units = float(tokens[place]) if np.isfinite(tokens[place]) else None
        series.add(value, units, float(losses[place]) if known[place] else None)
    return series


def _files(folder: Path, rank: int) -> Iterator[tuple[Path, int, int]]:
    """Yield the files of a rank, with its steps, and those that its GPU has ended too."""
    for path in folder.glob(f"rank_{rank}.*.samples"):
        with suppress(OSError, ValueError, struct.error), open_regular(path, MAX_BYTES) as file:
            head = file.read(32)
            if head[:8] == MAGIC:
                count, whole = (int(struct.unpack_from("<Q", head, place)[0]) for place in (8, 24))
                yield path, count, whole if head[18] == 1 else count


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())[:50]
