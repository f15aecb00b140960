"""What an export holds: each cell with its fields, and each of its figures by repeat, with median and bounds."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from reports.export import RATES
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult
from reports.reading.run_figures import OTHERS_SHARE
from reports.tables import others_share


@dataclass(frozen=True)
class ExportedCell:
    """A cell. `fields`: those that any cell of the study sets, flat, as JSON has them; `figures` by name and repeat, SI
    units.
    """

    key: str
    title: str
    status: str
    fields: dict[str, Any]
    figures: dict[str, dict[int, float]]
    estimates: dict[str, Estimate]
    result: CellResult


def exported_cells(study: StudyResult) -> Iterator[ExportedCell]:
    """Every cell of the plan; of one without a figure there is its status alone."""
    # Of a sweep over 1, 2 and 4 the cell that has the default would lack what tells it from the others.
    told = {name for result in study.cells.values() for name in _flat(result.cell.model_dump(exclude_defaults=True))}
    for result in study.cells.values():
        figures = {name: values for name in RATES if (values := result.values(name))}
        estimates = {name: found for name in figures if (found := result.estimate(name)) is not None}
        if result.peak_bytes is not None:
            figures["peak_memory_bytes"] = {0: result.peak_bytes}
            estimates["peak_memory_bytes"] = Estimate(result.peak_bytes, result.peak_bytes, result.peak_bytes, 1)
        fields = fields_of(result, told)
        yield ExportedCell(result.key, result.title, result.status, fields, figures, estimates, result)


def fields_of(result: CellResult, names: Collection[str]) -> dict[str, Any]:
    """`model`, `layout.tp`, `workload.batch_size`, ...: the named fields that a cell has; numbers are numbers."""
    flat = _flat(result.cell.model_dump(mode="json"))
    found = {name: value for name, value in flat.items() if name in names and value is not None}
    share = others_share(result)
    return found | {"title": result.title} | ({} if share is None else {OTHERS_SHARE: float(f"{share:.4g}")})


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in sorted(data.items()):
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
