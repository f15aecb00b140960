"""The size of a study, computed before any cell is made.

size_problems(study.experiments, models=1, targets=1, repeats=10)
"""

import math
from collections.abc import Mapping

from configs.spec.experiments import Experiment

MAX_POINTS = 10_000
MAX_MEASUREMENTS = 100_000
"""Of one study; reports were tried up to this size (docs/measurements/report.md)."""
_REMEDY = "Sweep fewer values, or split the study into several"


def size_problems(experiments: Mapping[str, Experiment], models: int, targets: int, repeats: int) -> list[str]:
    """Return a problem for each bound that a study exceeds, with the computed count.

    models: number of models of the study. repeats: measurements of each cell.
    """
    problems = []
    total = 0
    for name, experiment in experiments.items():
        factors = [*experiment.num_values, *(count for count in (_models(experiment, models), targets) if count > 1)]
        points = math.prod(factors)
        total += points
        if points > MAX_POINTS:
            product = f" ({' x '.join(f'{factor:,}' for factor in factors)})" if len(factors) > 1 else ""
            problems.append(
                f"experiments.{name}: {points:,} points{product}, expected at most {MAX_POINTS:,}. {_REMEDY}"
            )
    if not problems and total > MAX_POINTS:
        problems.append(f"experiments: {total:,} points, expected at most {MAX_POINTS:,}. {_REMEDY}")
    if not problems and total * repeats > MAX_MEASUREMENTS:
        points_text = f"{total:,} point{'' if total == 1 else 's'}"
        problems.append(
            f"measuring.repeats: {points_text} x {repeats:,} repeats are {total * repeats:,} measurements, "
            f"expected at most {MAX_MEASUREMENTS:,}. Use at most {max(1, MAX_MEASUREMENTS // total):,} repeats"
        )
    return problems


def _models(experiment: Experiment, models: int) -> int:
    return len(experiment.models) if experiment.models is not None else models
