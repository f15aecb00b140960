"""The cells of a study for the page: a row each, and for each repeat its record and quantiles of its samples.

    data = cells_data(study)            # report_page(document, data)

Quantiles are numbers of 12 bits on a logarithmic scale between the cell's smallest and largest sample, two characters
each (base64url digits). A page has room for MAX_QUANTILES of them: many repeats have fewer than 64 each.
"""

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from configs.common.printable import printable, shortened
from configs.records.record import record_name
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import MAX_SAMPLES, Floats32, Reading
from reports.tables import others_share
from reports.text import estimate_cell, mebibytes, percent

MAX_QUANTILES = 320_000
"""On one page, of all repeats together."""
MIN_QUANTILES = 3
FIRST_ROWS = 100
"""Drawn without the script."""
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_LEVELS = 4095
_REPEAT, _ATTEMPT = 700007, 800008
"""Stand-ins, by which the script learns how a record is named."""


@dataclass(frozen=True)
class CellsData:
    """Columns of the table of cells, its first rows, and all of it for the script."""

    columns: tuple[str, ...]
    first_rows: tuple[tuple[str, ...], ...]
    data: dict[str, Any]


def cells_data(study: StudyResult) -> CellsData:
    """All cells in the order of the plan."""
    units = {result.unit for result in study.cells.values()}
    unit = units.pop() if len(units) == 1 else "work a second"
    latencies = {result.latency.unit for result in study.cells.values() if result.latency is not None}
    latency = latencies.pop() if len(latencies) == 1 else "latency, ms"
    columns = ("model", "cell", "state", "repeats", f"{unit}, median", latency, "peak memory, MiB", "CPU of others")
    repeats = max(1, sum(len(result.measurements) for result in study.cells.values()))
    quantiles = max(MIN_QUANTILES, min(MAX_SAMPLES, MAX_QUANTILES // repeats))
    found = [_cell(result, quantiles) for result in study.cells.values()]
    first = tuple(tuple(cell["row"]) for cell in islice(found, FIRST_ROWS))
    record = record_name("timed", _REPEAT, _ATTEMPT)
    parts = record.replace(str(_REPEAT), "{repeat}").replace(str(_ATTEMPT), "{attempt}")
    return CellsData(columns, first, {"unit": unit, "record": parts, "cells": found})


def _cell(result: CellResult, quantiles: int) -> dict[str, Any]:
    latency = result.latency
    felt = None if latency is None else result.estimate(latency.figure)
    row = [
        printable(result.model),
        printable(result.name),
        result.status.replace("_", " "),
        f"{len(result.completed)} of {result.planned}",
        estimate_cell(result.estimate("throughput")),
        estimate_cell(felt, 1000),
        mebibytes(result.peak_bytes),
        percent(others_share(result), 2),
    ]
    kept = [one.sample_seconds for one in result.completed.values() if one.sample_seconds is not None]
    ends = _ends(kept)
    cell: dict[str, Any] = {"key": result.key, "row": row}
    if ends is not None:
        cell["range"] = [float(f"{end:.5g}") for end in ends]
        cell["samples"] = f"latency of a {_waited_for(result)}"
    cell["repeats"] = [
        _repeat(repeat, reading, ends, quantiles) for repeat, reading in sorted(result.measurements.items())
    ]
    failures = [reading.record.failure for reading in result.measurements.values()]
    why = next((failure.message for failure in failures if failure is not None), None)
    return cell | ({"why": shortened(why, 300)} if why else {})


def _waited_for(result: CellResult) -> str:
    """What each sample is the time of: a whole request of generation, whose column has the time of a token."""
    latency = result.kind.latency
    if latency is not None and latency.waited_for in result.pooled:
        return latency.waited_for
    return next(iter(result.pooled), "pass")


def _ends(samples: list[Floats32]) -> tuple[float, float] | None:
    """The smallest and largest sample above 0."""
    if not samples:
        return None
    low, high = min(float(each[0]) for each in samples), max(float(each[-1]) for each in samples)
    return (max(low, high * 1e-9), high) if high > 0 else None


def _repeat(repeat: int, reading: Reading, ends: tuple[float, float] | None, quantiles: int) -> list[Any]:
    """Repeat, state ("" where completed), throughput, per cent of CPU of others, quantiles, attempt."""
    rates = reading.rates
    rate = None if rates is None else rates.throughput
    samples = reading.sample_seconds
    told = "" if samples is None or ends is None else encoded(samples, ends, quantiles)
    status = "" if reading.completed else reading.record.status.value.replace("_", " ")
    share = reading.figure("others_cpu_share")
    return [
        repeat,
        status,
        None if rate is None else float(f"{rate:.4g}"),
        None if share is None else round(100 * share, 1),
        told,
        reading.record.attempt,
    ]


def encoded(samples: Floats32, ends: tuple[float, float], quantiles: int) -> str:
    """Quantiles of sorted samples, two characters each."""
    places = np.linspace(0, len(samples) - 1, min(len(samples), quantiles)).round().astype(int)
    low, high = math.log(ends[0]), math.log(ends[1])
    if high <= low:
        levels = np.zeros(len(places), dtype=int)
    else:
        shares = (np.log(np.maximum(samples[places], ends[0])) - low) / (high - low)
        levels = (shares.clip(0, 1) * _LEVELS).round().astype(int)
    return "".join(_DIGITS[level // 64] + _DIGITS[level % 64] for level in levels.tolist())
