"""Text on steady state: measurements with steady state, removed passes, and cells without it.

lines = steady_lines(study)         # sentences, plain text
table = unsteady_table(study)       # cells with a measurement that is not steady; None where there is none
"""

from statistics import median

from reports.numbers.steady import LARGEST_CUT, LEAST_CHANGE, LEAST_PASSES
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.tables import first_rows
from reports.text import Table, escaped, percent, plural

_NAMED = 3


def steady_lines(study: StudyResult) -> list[str]:
    """How steady the measurements were; empty where nothing was measured."""
    judged = [measurement.steady for measurement in _measurements(study) if measurement.steady is not None]
    if not judged:
        return []
    found = [item for item in judged if item.found]
    short = sum(item.found is None for item in judged)
    lines = []
    if short == len(judged):
        return [
            f"Steady state was not tested: no measurement has {LEAST_PASSES} passes. Rates are over all measured "
            "passes; raise measuring.min_passes or min_seconds to test it."
        ]
    lines.append(
        f"Steady state was looked for in the passes of each measurement and found in {len(found):,} of "
        f"{plural(len(judged) - short, 'measurement')} of at least {LEAST_PASSES} passes"
        + (f"; {plural(short, 'shorter one')} cannot be judged." if short else ".")
    )
    late = [item.first / (item.first + item.count) for item in found if item.first]
    if late:
        lines.append(
            f"In {plural(len(late), 'measurement')} the first passes were cut as start-up: {percent(median(late), 2)} "
            f"of the "
            f"passes in the median, {percent(max(late), 2)} at most. Rates and percentiles are of the rest."
        )
    unsteady = _unsteady(study)
    if unsteady:
        named = "; ".join(f"{result.title} ({_reasons(measurements)})" for result, measurements in unsteady[:_NAMED])
        more = f"; and {len(unsteady) - _NAMED:,} more" if len(unsteady) > _NAMED else ""
        lines.append(
            f"None was found in {plural(sum(len(measurements) for _, measurements in unsteady), 'measurement')} of "
            f"{plural(len(unsteady), 'cell')}, whose rates are over all passes and may be of no lasting state: "
            f"{named}{more}."
        )
    return [*lines, steady_rule()]


def unsteady_table(study: StudyResult) -> Table | None:
    """Cells with measurements in which no steady state was found, and why in the first of them."""
    rows = [
        (
            escaped(result.model),
            escaped(result.name),
            f"{len(measurements)} of {len(result.completed)}",
            escaped(_reasons(measurements)),
        )
        for result, measurements in _unsteady(study)
    ]
    if not rows:
        return None
    return first_rows(
        Table(("model", "cell", "measurements without", "the first of them"), tuple(rows), text_columns=4)
    )


def steady_rule() -> str:
    """How it is decided, in a sentence, for whoever must defend it."""
    return (
        f"A start of up to {percent(LARGEST_CUT, 2)} of the passes is cut where that makes the mean of the rest surest "
        "(MSER, White 1997); the rest is steady unless a trend (Mann-Kendall after Hamed and Rao 1998) or a change of "
        f"level (Pettitt 1979) of {percent(LEAST_CHANGE, 1)} or more is found in it at p = 0.01."
    )


def _measurements(study: StudyResult) -> list[Reading]:
    return [measurement for result in study.cells.values() for measurement in result.completed.values()]


def _unsteady(study: StudyResult) -> list[tuple[CellResult, list[Reading]]]:
    """Cells and their measurements without steady state, those with most first."""
    found = []
    for result in study.cells.values():
        measurements = [
            measurement
            for measurement in result.completed.values()
            if measurement.steady and measurement.steady.found is False
        ]
        if measurements:
            found.append((result, measurements))
    return sorted(found, key=lambda pair: -len(pair[1]))


def _reasons(measurements: list[Reading]) -> str:
    assert measurements[0].steady is not None
    return measurements[0].steady.reason
