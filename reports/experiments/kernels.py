"""Whether the points of an experiment computed with different kernels: their ratio is of the kernels as well.

lines = different_kernels(study)        # "strong: tiny: attention of prompts is flash_attention at ..., math at ..."
told = without_kernels(study)           # "3 of 12 measurements (linear.c: no C compiler: cc: ...)"
"""

from collections import Counter

from reports.provenance import KERNEL_FACTS
from reports.reading.load import CellResult, StudyResult
from reports.text import joined, plural

_NAMED = {"True": "CUDA graphs", "False": "no CUDA graphs"}
_MOST_POINTS = 2
"""Named for each kernel; the records have all."""


def different_kernels(study: StudyResult) -> list[str]:
    """One line for each experiment of speed and each fact of its records in which measured points differ."""
    lines = []
    for experiment in study.plan.experiments:
        if experiment.kind == "correctness":
            continue
        points = {result.key: result for result in study.points(experiment) if result.cell.engine == "rankwise"}
        for fact, words in KERNEL_FACTS.items():
            groups: dict[str, list[str]] = {}
            for result in points.values():
                for value in sorted(_values(study, result, fact)):
                    groups.setdefault(_NAMED.get(value, value), []).append(result.name)
            if len(groups) > 1:
                told = joined([f"{value} at {_points(names)}" for value, names in groups.items()])
                lines.append(f"{study.title(experiment)}: {words}: {told}")
    return lines


def without_kernels(study: StudyResult) -> str | None:
    """Say how many measurements of a CPU had no compiled kernels, and the commonest reason; None: all had."""
    readings = [reading for result in study.cells.values() for reading in result.completed.values()]
    known = [study.environments.get(reading.record.environment or "") or {} for reading in readings]
    whys = Counter(str(why) for one in known if (why := one.get("cpu_kernels_why_not")))
    if not whys:
        return None
    return f"{whys.total()} of {plural(len(readings), 'measurement')} ({whys.most_common(1)[0][0]})"


def _values(study: StudyResult, result: CellResult, fact: str) -> set[str]:
    known = [study.environments.get(reading.record.environment or "") for reading in result.completed.values()]
    return {str(value) for one in known if one is not None and (value := one.get(fact)) is not None}


def _points(names: list[str]) -> str:
    shown = names[:_MOST_POINTS]
    more = len(names) - len(shown)
    return joined([*shown, plural(more, "other point")] if more else shown)
