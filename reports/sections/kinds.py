"""The parts of a report that one kind of workload alone has, and the table that says which kind has which.

    {"kind_parts": kind_parts(study, album)}      # kinds.md.j2 prints them

Everything that all kinds share (units, latency, columns) is read from their descriptors instead.
"""

from collections.abc import Callable

from configs.workloads import script, train
from reports.document.album import Album
from reports.document.structure import Section
from reports.reading.load import StudyResult
from reports.sections.own_programs import program_parts
from reports.sections.training import training_parts

PARTS: dict[str, Callable[[StudyResult, Album], list[Section]]] = {
    train.DESCRIPTOR.kind: training_parts,
    script.DESCRIPTOR.kind: program_parts,
}
"""Kind of workload -> its own parts; a kind that needs none has no entry."""


def kind_parts(study: StudyResult, album: Album) -> list[Section]:
    """The parts of the kinds that the study has cells of, in the order of the table."""
    kinds = {result.cell.workload.kind for result in study.cells.values()}
    return [part for kind, parts in PARTS.items() if kind in kinds for part in parts(study, album)]
