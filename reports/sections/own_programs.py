"""The report's part on programs of the user's: what they were measured by, and whether their losses agree.

parts = program_parts(study, album)          # listed in reports.sections.kinds
"""

from reports.document.album import Album
from reports.document.methods import QUESTIONS
from reports.document.structure import Section
from reports.experiments.own_programs import agreement_sentence, agreement_table, same_losses, steps_table
from reports.reading.load import StudyResult

MEASURED = (
    "Steps of the first repeat, without warm-up. A step takes as long as its slowest rank. Loss curves are compared "
    "between cells that do equal work in a step and differ in how they compute it."
)


def program_parts(study: StudyResult, album: Album) -> list[Section]:
    """One part with what was measured, and a section for each set of loss curves."""
    table = steps_table(study)
    if table is None:
        return []
    found = same_losses(study)
    sections = tuple(
        Section(
            "Loss curves" + (f": {each.reference.result.title}" if len(found) > 1 else ""),
            agreement_sentence(each),
            agreement_table(each),
        )
        for each in found
    )
    return [Section("Your own program", MEASURED, table, question=QUESTIONS["own programs"], more=sections)]
