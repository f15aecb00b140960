"""Machine-readable exports: one CSV line per cell, one Parquet row per record.

Values are whole, not rounded. Units are in the names of the columns. An empty field is unknown.
"""

import io
import json
from collections.abc import Iterable
from typing import Any

from configs.common.printable import csv_text
from configs.records.rates import LATENCY_COLUMNS
from configs.records.record import Figure
from configs.workloads import descriptor_of
from configs.workloads.descriptor import Descriptor
from configs.workloads.train import TRAINING_PARTS
from reports.decisions.cost import cell_cost, price_of
from reports.experiments.load.columns import RESULTS, SERVED, STEADY, served_values
from reports.experiments.load.experiment import load_point
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading, is_number
from reports.tables import cpu_use, others_share
from reports.training.cells import exposed_shares, utilization_estimate

RATES = (
    "tokens_per_second",
    "latency_seconds",
    "time_per_output_token_seconds",
    "ttft_seconds",
    "step_seconds",
    "prompts_per_second",
    "embeddings_per_second",
    "items_per_second",
)
_USD = ("usd_per_million_tokens", "usd_per_million_embeddings")
PARTS = ("prefill_seconds", "decode_seconds", *TRAINING_PARTS, "busy_seconds", "other_seconds", "waiting_seconds")
_UTILIZATION = {"model_flops_utilization": "MFU", "hardware_flops_utilization": "HFU"}
_EXPOSED = "exposed_communication_share"


def cells_csv(study: StudyResult) -> str:
    """One line for each cell of the plan, in the plan's order.

    The columns are those that the study's kinds of workload can fill, the same whatever failed, and any other with a
    value.
    """
    import pandas as pd

    named = [(point.cell, one.name) for one in study.plan.experiments for point in one.points]
    experiments = pd.DataFrame(named, columns=["cell", "name"]).drop_duplicates().groupby("cell")["name"].agg("; ".join)
    lines = [_cell_line(study, key, experiments.get(key, "")) for key in study.cells]
    kinds = {result.cell.workload.kind: descriptor_of(result.cell.workload) for result in study.cells.values()}
    used = _columns_of(list(kinds.values())) | {
        name for line in lines for name, value in line.items() if value is not None
    }
    every = _cell_columns(list(kinds.values()))
    assert {name for line in lines for name in line} <= set(every), "a figure without a column"
    lines = [{name: csv_text(value) for name, value in line.items()} for line in lines]
    frame = pd.DataFrame(lines, dtype=object).reindex(columns=[name for name in every if name in used])
    return str(frame.to_csv(index=False, lineterminator="\n"))


_CELL = ("key", "experiments", "model", "name", "status", "repeats_planned", "repeats_completed")
_STATE = (
    "measurements_steady",
    "measurements_not_steady",
    "measurements_too_short_to_tell",
    "peak_memory_bytes_all_ranks",
    "peak_memory_bytes_largest_rank",
    "cpu_share_of_own_cores",
    "others_cpu_share_max",
    "repeats_failed",
    "repeats_missing",
    "model_identity",
    "random_weights",
    "layout",
    "ranks",
    "strategy",
    "dtype",
    "engine",
    "compression",
    "target",
    "nodes",
    "cores_per_rank",
    "env",
    "usd_per_hour",
)


def _cell_columns(kinds: list[Descriptor]) -> list[str]:
    """What a person looks for first, then the other figures, then what the cell is."""
    columns = [*_CELL, *_estimates((*RATES, *_USD)), *_tails(LATENCY_COLUMNS), *_UTILIZATION, _EXPOSED]
    columns += [RESULTS, STEADY, *_estimates(SERVED), *_STATE]
    return [*columns, *_workload_fields(kinds), "records"]


def _columns_of(kinds: list[Descriptor]) -> set[str]:
    """The columns that cells of these kinds can fill."""
    rates: set[str] = set()
    latencies: set[str] = set()
    for kind in kinds:
        rates |= {kind.throughput, *(time.figure for time in kind.times)}
        rates |= {kind.latency.figure, "latency_seconds"} if kind.latency is not None else set()
        rates |= {"prompts_per_second"} if kind.takes_prompts else set()
        rates |= {f"usd_per_million_{kind.unit}s"} & set(_USD)
        latencies |= {name for name, column in LATENCY_COLUMNS.items() if column in kind.columns}
    others = {*_UTILIZATION, _EXPOSED} if any(kind.trains for kind in kinds) else set()
    if any(kind.starts_server for kind in kinds):
        others |= {RESULTS, STEADY, *_estimates(SERVED)}
    return {*_CELL, *_estimates(rates), *_tails(latencies), *others, *_STATE, *_workload_fields(kinds), "records"}


def _workload_fields(kinds: list[Descriptor]) -> list[str]:
    return list(dict.fromkeys(f"workload_{field}" for kind in kinds for field in kind.model.model_fields))


def _estimates(names: Iterable[str]) -> list[str]:
    return [f"{name}_{what}" for name in names for what in _WHAT]


def _tails(names: Iterable[str]) -> list[str]:
    return [f"{name}_{what}" for name in names for what in _PERCENTILES]


def _cell_line(study: StudyResult, key: str, experiments: str) -> dict[str, Any]:
    result = study.cells[key]
    cell, peaks = result.cell, result.peak_by_rank()
    line: dict[str, Any] = {
        "key": key,
        "experiments": experiments,
        "name": result.name,
        "model": result.model,
        "model_identity": cell.model,
        "random_weights": cell.model is not None and cell.model.startswith("synthetic:"),
        "layout": str(cell.layout),
        "ranks": cell.layout.ranks,
        "strategy": cell.layout.strategy,
        "dtype": cell.dtype,
        "engine": cell.engine,
        "compression": "+".join(cell.compression) or None,
        "target": cell.target,
        "nodes": cell.nodes,
        "cores_per_rank": cell.cores_per_rank,
        "env": json.dumps(cell.env, sort_keys=True) if cell.env else None,
        "status": result.status,
        "repeats_planned": result.planned,
        "repeats_completed": len(result.completed),
        "repeats_failed": len(result.measurements) - len(result.completed),
        "repeats_missing": len(result.missing),
        "peak_memory_bytes_largest_rank": int(max(peaks)) if peaks else None,
        "peak_memory_bytes_all_ranks": int(sum(peaks)) if peaks else None,
        "cpu_share_of_own_cores": cpu_use(result),
        "others_cpu_share_max": others_share(result),
        "records": f"records/{key}/",
    }
    line |= {f"workload_{field}": value for field, value in cell.workload.model_dump(mode="json").items()}
    for rate in RATES:
        line |= _estimate(rate, result.estimate(rate))
    price = price_of(study, result)
    cost = cell_cost(result, price if result.compared else None)
    line["usd_per_hour"] = price.usd_per_hour * cell.nodes if price else None
    for usd in _USD:
        line |= _estimate(usd, getattr(cost, usd))
    for kind in LATENCY_COLUMNS:
        line |= _percentiles(result, kind)
    if result.kind.starts_server and result.completed:
        line |= _served(study, result)
    if result.kind.trains:
        shares = {name: utilization_estimate(study.plan, result, kind) for name, kind in _UTILIZATION.items()}
        line |= {name: share.median for name, share in shares.items() if share is not None}
        exposed = exposed_shares(result)
        line[_EXPOSED] = None if exposed is None else exposed.median
    return line | _steady(result)


def _served(study: StudyResult, result: CellResult) -> dict[str, Any]:
    point = load_point(study, result)
    line: dict[str, Any] = {RESULTS: len(point.valid), STEADY: point.steady if point.valid else None}
    for name, value in served_values(point).items():
        line |= _estimate(name, value)
    return line | _estimate("usd_per_million_tokens", point.usd_per_million_tokens)


_WHAT = ("median", "min", "max", "low", "high")


def _estimate(name: str, value: Estimate | None) -> dict[str, float | None]:
    """`low` and `high` are the 95 % interval."""
    if value is None:
        return {}
    low, high = value.interval or (None, None)
    known = (value.median, value.low, value.high, low, high)
    return {f"{name}_{what}": figure for what, figure in zip(_WHAT, known, strict=True)}


_PERCENTILES = ("samples", "p50_seconds", "p90_seconds", "p99_seconds", "p99_low_seconds", "p99_high_seconds")


def _percentiles(result: CellResult, kind: str) -> dict[str, Any]:
    """`low` and `high` are the 95 % interval of P99."""
    found = result.percentiles(kind)
    if found is None:
        return {}
    low, high = found.p99_interval or (None, None)
    values = (found.samples, found.p50, found.p90, found.p99, low, high)
    return {f"{kind}_{what}": value for what, value in zip(_PERCENTILES, values, strict=True)}


def _steady(result: CellResult) -> dict[str, int]:
    """How many completed measurements have a steady state, have none, or are too short to tell."""
    found = [measurement.steady.found for measurement in result.completed.values() if measurement.steady is not None]
    counts = (found.count(True), found.count(False), found.count(None))
    return dict(
        zip(("measurements_steady", "measurements_not_steady", "measurements_too_short_to_tell"), counts, strict=True)
    )


def records_parquet(study: StudyResult) -> bytes:
    """One row for each record of the folder, earlier attempts included: `used` tells which ones count."""
    import pyarrow
    from pyarrow import parquet

    readings = study.readings
    columns: dict[str, Any] = {
        "path": pyarrow.array([reading.path for reading in readings], pyarrow.string()),
        "used": pyarrow.array([reading.used for reading in readings], pyarrow.bool_()),
    }
    for name in ("key", "measuring_pass", "status", "job", "started_at", "finished_at", "environment"):
        columns[name] = pyarrow.array([_text(getattr(reading.record, name)) for reading in readings], pyarrow.string())
    for name in ("repeat", "attempt", "position", "schema_version"):
        columns[name] = pyarrow.array([getattr(reading.record, name) for reading in readings], pyarrow.int64())
    for name in ("message", "rank", "kind", "log"):
        kind = pyarrow.int64() if name == "rank" else pyarrow.string()
        values = [getattr(reading.record.failure, name, None) for reading in readings]
        columns[f"failure_{name}"] = pyarrow.array(values, kind)
    columns["hosts"] = pyarrow.array([reading.record.hosts for reading in readings], pyarrow.list_(pyarrow.string()))
    columns |= _accounts(readings, pyarrow)
    cells = {id(reading.record.cell): reading.record.cell for reading in readings}  # shared by a cell's records
    texts = {identity: cell.model_dump_json() for identity, cell in cells.items()}
    columns["cell"] = pyarrow.array([texts[id(reading.record.cell)] for reading in readings], pyarrow.string())
    for name in ("wall_seconds", "passes", *RATES, *PARTS):
        kind = pyarrow.int64() if name == "passes" else pyarrow.float64()
        columns[name] = pyarrow.array([getattr(reading.rates, name, None) for reading in readings], kind)
    for kind in LATENCY_COLUMNS:
        tails = [reading.p99_seconds.get(kind) for reading in readings]
        columns[f"{kind}_p99_seconds"] = pyarrow.array(tails, pyarrow.float64())
    found = [reading.steady for reading in readings]
    columns["steady"] = pyarrow.array([item.found if item else None for item in found], pyarrow.bool_())
    columns["steady_first_pass"] = pyarrow.array([item.first if item else None for item in found], pyarrow.int64())
    for name in sorted({name for reading in readings for name in reading.record.figures}):
        columns[f"figure_{name}"] = _figures(readings, name, pyarrow)
    by_rank = [_json(reading.record.rank_figures) for reading in readings]
    columns["rank_figures"] = pyarrow.array(by_rank, pyarrow.string())
    content = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), content, compression="zstd", version="2.6", store_schema=False)
    return content.getvalue()


def _accounts(readings: tuple[Reading, ...], pyarrow: Any) -> dict[str, Any]:
    """What the scheduler says of each record's job, as `scheduler_<field>`; no column where there was no scheduler."""
    accounts = [reading.record.accounting for reading in readings]
    if not any(accounts):
        return {}
    kinds = {"job_id": pyarrow.string(), "state": pyarrow.string(), "max_rss_bytes": pyarrow.int64()}
    kinds["nodes"] = pyarrow.list_(pyarrow.string())
    kinds |= dict.fromkeys(("queued_seconds", "elapsed_seconds", "cpu_seconds", "energy_joules"), pyarrow.float64())
    return {
        f"scheduler_{name}": pyarrow.array([getattr(one, name, None) for one in accounts], kind)
        for name, kind in kinds.items()
    }


def _figures(readings: tuple[Reading, ...], name: str, pyarrow: Any) -> Any:
    """A column of one figure: numbers as float64, truth values as bool, anything else as text."""
    values: list[Figure] = [reading.record.figures.get(name) for reading in readings]
    kinds = set(map(type, values)) - {type(None)}
    if kinds <= {bool}:
        return pyarrow.array(values, pyarrow.bool_())
    if kinds == {float}:
        return pyarrow.array(values, pyarrow.float64())
    if kinds <= {int, float}:
        return pyarrow.array([float(value) if is_number(value) else None for value in values], pyarrow.float64())
    return pyarrow.array([_text(value) for value in values], pyarrow.string())


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _json(data: dict[str, list[Figure]]) -> str | None:
    return json.dumps(data, sort_keys=True) if data else None
