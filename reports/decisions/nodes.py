"""Comparison of nodes: latency, throughput and memory by node and batch size, and a summary of each node.

    tables = latency_table([NodeCell("gpu-a", result), ...])
    table = node_table(cells)

A node is a target of one study, or one of several runs that are joined. What else tells cells apart (model,
workload, precision, layout) makes a table of its own, so that a row compares like with like. A cell
without a figure shows how it ended.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.common.base import canonical_json
from configs.common.files.reading import MIB
from configs.common.printable import plural_noun, shortened
from configs.spec.cell import Cell
from configs.workloads import STUDIED, descriptor_of
from configs.workloads.descriptor import Descriptor
from reports.reading.load import MISSING, CellResult, StudyResult
from reports.tables import cpu_use
from reports.text import UNKNOWN, Table, escaped, estimate_cell, number, percent

MOST_TABLES = 12
"""So many tables of one figure are printed; cells.csv has a line for every cell."""


@dataclass(frozen=True)
class NodeCell:
    """One cell as measured on one node."""

    node: str
    result: CellResult


@dataclass(frozen=True)
class NodeTable:
    """Cells that differ in node and batch size only."""

    title: str
    table: Table


def node_cells(study: StudyResult) -> list[NodeCell]:
    """The cells of one study, by target. Cells that keep answers are no measurements of speed."""
    return [NodeCell(result.cell.target, result) for result in study.cells.values() if result.compared]


def batch_of(cell: Cell) -> int:
    """The size of its batch, in what its kind counts (`Descriptor.batch`): of a rank, or of a step over all ranks."""
    field = descriptor_of(cell.workload).batch
    assert field is not None, f"{cell.workload.kind} is not compared"
    return int(getattr(cell.workload, field) or 1)  # of a script that names none: one step


BATCH_FIELDS = {field for known in STUDIED.values() for field in known.batch_fields}
"""What may differ between cells of one series over batch sizes."""


def without_batch(cell: Cell, *others: str) -> str:
    """One text for cells that differ in the batch size (and the other fields named) only."""
    rest = cell.model_dump(mode="json", exclude={"workload": BATCH_FIELDS, **dict.fromkeys(others, True)})
    return canonical_json(rest)


def work_key(cell: Cell) -> str:
    """One text for cells that do the same work, in whatever batches, layout and precision."""
    return canonical_json(cell.workload.model_dump(mode="json", exclude=BATCH_FIELDS | {"label"}))


def work_title(cell: Cell) -> str:
    """`generate, prompt tokens 32, new tokens 8`: what the work is, without the batch."""
    hidden = BATCH_FIELDS | {"kind", "answers", "label"}
    told = cell.workload.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
    return ", ".join(
        [cell.workload.kind, *(f"{name.replace('_', ' ')} {shortened(str(value), 12)}" for name, value in told.items())]
    )


def longest(members: Sequence[CellResult]) -> tuple[list[CellResult], list[CellResult]]:
    """Of cells that differ only in how much work a pass holds the one with the most, and the others: no choice."""
    groups: dict[str, list[CellResult]] = {}
    for result in members:
        groups.setdefault(_without_amount(result.cell), []).append(result)
    kept = {max(group, key=lambda result: _amount(result.cell)).key for group in groups.values()}
    return [one for one in members if one.key in kept], [one for one in members if one.key not in kept]


def _without_amount(cell: Cell) -> str:
    """One text for cells that differ in the amount of work alone, where that is another field than the batch."""
    known = descriptor_of(cell.workload)
    field = known.grows if known.grows != known.batch else None
    return canonical_json(cell.model_dump(mode="json", exclude={"workload": {field}} if field else None))


def _amount(cell: Cell) -> int:
    field = descriptor_of(cell.workload).grows
    return int(getattr(cell.workload, field) or 0) if field else 0


def node_latency_table(cells: Sequence[NodeCell]) -> list[NodeTable]:
    """Milliseconds a token, a step, a request or a pass: a table for each model, workload, precision and layout."""
    return _tables(cells, _latency, "latency")


def throughput_table(cells: Sequence[NodeCell]) -> list[NodeTable]:
    """Tokens, embeddings or items a second, the same way."""
    return _tables(cells, lambda result: estimate_cell(result.estimate("throughput")), "throughput")


def node_memory_table(cells: Sequence[NodeCell]) -> list[NodeTable]:
    """MiB at the peak, over all ranks, the same way."""
    return _tables(
        cells, lambda result: number(None if result.peak_bytes is None else result.peak_bytes / MIB), "peak memory"
    )


def _latency(result: CellResult) -> str:
    latency = result.kind.latency
    return UNKNOWN if latency is None else estimate_cell(result.estimate(latency.figure), 1000)


def _unit(figure: str, kind: Descriptor) -> str:
    """The unit of a table's figure, for cells of one kind."""
    if figure == "latency":
        return f"{kind.latency.unit if kind.latency else 'ms'}, median (interval)"
    return f"{plural_noun(kind.unit)}/s, median (interval)" if figure == "throughput" else "MiB, all ranks"


def _tables(cells: Sequence[NodeCell], written: Callable[[CellResult], str], figure: str) -> list[NodeTable]:
    """Rows are nodes, columns batch sizes. Of cells that differ in something else yet, the first on a node is shown."""
    groups: dict[tuple[str, ...], list[NodeCell]] = {}
    for item in cells:
        groups.setdefault(_group(item.result), []).append(item)
    tables = []
    for (model, _, *rest), members in groups.items():
        grid: dict[tuple[str, int], str] = {}
        for item in members:
            grid.setdefault((item.node, batch_of(item.result.cell)), _or_state(item.result, written))
        if all(text == UNKNOWN for text in grid.values()):
            continue
        nodes = list(dict.fromkeys(node for node, _ in grid))
        batches = sorted({batch for _, batch in grid})
        rows = tuple((escaped(node), *(grid.get((node, batch), UNKNOWN) for batch in batches)) for node in nodes)
        columns = ("node", *(f"batch {batch:,}" for batch in batches))
        unit = _unit(figure, members[0].result.kind)
        tables.append(NodeTable(f"{', '.join([model, *rest])}: {unit}", Table(columns, rows)))
    return tables[:MOST_TABLES]


def _or_state(result: CellResult, written: Callable[[CellResult], str]) -> str:
    """The figure; for a cell that was tried and has none, how it ended."""
    if result.completed:
        return written(result)
    return "not measured" if result.status == MISSING else result.status.replace("_", " ")


def _group(result: CellResult) -> tuple[str, ...]:
    """Model, kind of workload, and the rest of what a row must have in common."""
    cell = result.cell
    mode = "" if cell.engine_mode == "eager" else f" {cell.engine_mode}"
    engine: list[str] = [f"{cell.engine}{mode}"] if cell.engine != "rankwise" else []
    engine += [f"{cell.page_cache} cache"] if cell.page_cache else []
    engine += ["+".join(cell.compression)] if cell.compression else []
    return (result.model, cell.workload.kind, cell.place, cell.dtype, *engine, work_title(cell))


def node_table(cells: Sequence[NodeCell]) -> Table | None:
    """How each node did over all its cells: average throughput, success, failures, CPU use; None without cells.

    The average is of cells of one kind of workload whose figures are of one unit: a token that is learnt is not one
    that is generated. A node that measured the larger cells looks faster: compare nodes that measured the same.
    """
    if not cells:
        return None
    rows = []
    kinds = dict.fromkeys((item.result.unit, item.result.cell.workload.kind) for item in cells)
    shared = Counter(unit for unit, _ in kinds)
    for node, unit, kind in dict.fromkeys(_unit_of(item) for item in cells):
        results = [item.result for item in cells if _unit_of(item) == (node, unit, kind)]
        medians = [value.median for result in results if (value := result.estimate("throughput")) is not None]
        planned, completed = sum(map(_planned, results)), sum(len(result.completed) for result in results)
        shares = [share for result in results if (share := cpu_use(result)) is not None]
        rows.append(
            (
                escaped(node),
                f"{unit} ({kind})" if shared[unit] > 1 else unit,
                f"{sum(bool(result.completed) for result in results):,} of {len(results):,}",
                number(sum(medians) / len(medians) if medians else None),
                percent(completed / planned if planned else None),
                f"{completed:,} of {planned:,}",
                _failures(results),
                percent(sum(shares) / len(shares) if shares else None),
            )
        )
    columns = (
        "node",
        "unit",
        "cells measured",
        "average throughput",
        "success rate",
        "repeats completed",
        "failures",
        "own cores in use, average",
    )
    return Table(columns, tuple(rows), text_columns=2)


def _planned(result: CellResult) -> int:
    """Planned repeats but those that another device has, whose row they are not of."""
    return len(result.measurements) + len(result.missing)


def _unit_of(item: NodeCell) -> tuple[str, str, str]:
    return item.node, item.result.unit, item.result.cell.workload.kind


def _failures(results: Sequence[CellResult]) -> str:
    """`out of memory 3, timeout 1`; repeats without a record are `missing`."""
    counts: dict[str, int] = {}
    for result in results:
        for measurement in result.measurements.values():
            if not measurement.completed:
                name = measurement.record.status.value.replace("_", " ")
                counts[name] = counts.get(name, 0) + 1
        if result.missing:
            counts[MISSING] = counts.get(MISSING, 0) + len(result.missing)
    return ", ".join(f"{name} {found:,}" for name, found in counts.items()) or "none"


def nodes_sentence(cells: Sequence[NodeCell]) -> str:
    """Where node tables stop, and what a row compares."""
    groups = len({_group(item.result) for item in cells})
    text = (
        "Rows are nodes, columns batch sizes; a cell without a figure shows how it ended. Where cells of one place "
        "differ in something else, as in the number of prompts or a variable of the environment, the first of the plan "
        "is shown."
    )
    if groups > MOST_TABLES:
        text += f" The first {MOST_TABLES} of {groups} combinations are shown; `cells.csv` has a line for every cell."
    return text
