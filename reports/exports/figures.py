"""What an export holds: each cell with its fields, and each of its figures by repeat, with median and bounds."""

from collections.abc import Iterator
from dataclasses import dataclass

from configs.common.base import canonical_json
from reports.export import RATES
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult
from reports.reading.run_figures import OTHERS_SHARE
from reports.tables import others_share


@dataclass(frozen=True)
class ExportedCell:
    """A cell: `fields` are those that differ from the defaults, flat; `figures` by name and repeat, SI units."""

    key: str
    title: str
    status: str
    fields: dict[str, str]
    figures: dict[str, dict[int, float]]
    estimates: dict[str, Estimate]
    result: CellResult


def exported_cells(study: StudyResult) -> Iterator[ExportedCell]:
    """Every cell of the plan; of one without a figure there is its status alone."""
    for result in study.cells.values():
        figures = {name: values for name in RATES if (values := result.values(name))}
        estimates = {name: found for name in figures if (found := result.estimate(name)) is not None}
        if result.peak_bytes is not None:
            figures["peak_memory_bytes"] = {0: result.peak_bytes}
            estimates["peak_memory_bytes"] = Estimate(result.peak_bytes, result.peak_bytes, result.peak_bytes, 1)
        yield ExportedCell(result.key, result.title, result.status, fields_of(result), figures, estimates, result)


def fields_of(result: CellResult) -> dict[str, str]:
    """`model`, `layout.tp`, `workload.batch_size`, ...: the fields of a cell that are set, as text."""
    flat: dict[str, str] = {}

    def add(data: dict[str, object], prefix: str) -> None:
        for name, value in sorted(data.items()):
            if isinstance(value, dict):
                add(value, f"{prefix}{name}.")
            elif value is not None:
                flat[prefix + name] = value if isinstance(value, str) else canonical_json(value)

    add(result.cell.model_dump(mode="json", exclude_defaults=True), "")
    share = others_share(result)
    return flat | {"title": result.title} | ({} if share is None else {OTHERS_SHARE: f"{share:.4g}"})
