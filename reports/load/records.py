"""Load runs out of the samples of a record of the workload `serve`.

for run in runs_of(record, samples, where): ...   # one, or those of a search
"""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import isnan

import numpy as np

from configs.common.arrays import Floats
from configs.common.printable import printable
from configs.load.job import Endpoint
from configs.load.samples import CHUNK_COLUMN, LAG_COLUMN, REQUEST_COLUMNS, SAMPLE_COLUMNS, LoadFacts
from configs.records.rates import Column
from configs.records.record import Record
from configs.records.samples import DamagedSamplesError
from configs.workloads.serve import RUN_COLUMNS, ServeWorkload
from reports.load.samples import LoadRun, in_order

_NOWHERE = Endpoint(url="http://127.0.0.1", model="model")
"""A record's job is made from its cell alone; where requests went is among the record's figures."""


def runs_of(record: Record, samples: Mapping[str, Column], where: str) -> Iterator[LoadRun]:
    """Yield the runs of a record, in order, each with copies of its samples.

    Raises DamagedSamplesError, naming `where`, for columns that do not fit.
    """
    columns = {name: _column(samples, name, where) for name in (*SAMPLE_COLUMNS, *RUN_COLUMNS)}
    requests = _bounds(columns["run_requests"], len(columns["outcome"]), where)
    lags = _bounds(columns["run_lag_samples"], len(columns[LAG_COLUMN]), where)
    counts = columns["chunks"]
    if np.isnan(counts).any():
        raise DamagedSamplesError(f"{where}: a request without a number of chunks")
    chunks = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    for number, ((first, end), (first_lag, end_lag)) in enumerate(zip(requests, lags, strict=True)):
        own = {name: columns[name][first:end] for name in REQUEST_COLUMNS}
        arrived = columns[CHUNK_COLUMN][chunks[first] : chunks[end]]
        facts = _facts(record, columns, number, end - first)
        yield in_order(facts, own, arrived, columns[LAG_COLUMN][first_lag:end_lag], where)


def _facts(record: Record, columns: Mapping[str, Floats], number: int, requests: int) -> LoadFacts:
    work = record.cell.workload
    assert isinstance(work, ServeWorkload)
    asked = float(columns["run_rate"][number])
    rate = None if work.find is None or isnan(asked) else asked
    # A cap ends a search with the run that reached it: those before were whole.
    capped = record.figures.get("capped") if number == len(columns["run_rate"]) - 1 else None
    share = record.figures.get("generator_cpu_share")
    return LoadFacts(
        job=work.requests(_NOWHERE, None, None, None, None, 0, rate),
        started_at=record.started_at or "",
        issuing_seconds=max(0.0, float(columns["run_issuing_seconds"][number])),
        wall_seconds=max(0.0, float(columns["run_wall_seconds"][number])),
        cpu_share=float(share) if isinstance(share, int | float) else 0.0,
        requests=requests,
        connections=0,
        capped=capped if isinstance(capped, str) else None,
        errors=_errors(record) if len(columns["run_rate"]) == 1 else {},
    )


def _errors(record: Record) -> dict[str, int]:
    """Messages of failed requests; empty where there are none or they cannot be read."""
    text = record.figures.get("errors")
    try:
        told = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    known = told.items() if isinstance(told, dict) else ()
    return {printable(message): count for message, count in known if type(count) is int and count >= 0}


def _column(samples: Mapping[str, Column], name: str, where: str) -> Floats:
    key = f"0/{name}"
    if key not in samples:
        raise DamagedSamplesError(f"{where}: no column {name}")
    return np.asarray(samples[key], dtype=np.float64)


def _bounds(counts: Floats, total: int, where: str) -> list[tuple[int, int]]:
    """First and end of each run's rows. Raises DamagedSamplesError where they do not add up."""
    if not len(counts) or np.isnan(counts).any() or (counts < 0).any() or int(counts.sum()) != total:
        raise DamagedSamplesError(f"{where}: {total:,} rows do not belong to the runs that are there")
    ends = np.cumsum(counts).astype(np.int64).tolist()
    return list(pairwise([0, *ends]))
