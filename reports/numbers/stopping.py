"""Stopping rule for the repeats of a cell that keeps its interval valid.

    more = next_look(values, rules)                  # repeats that the cell should have by the next look, or None
    shown = estimate(values, confidence(rules))      # an interval with 95 % coverage, although one looked

Who looks after every repeat, and stops as soon as the interval is short enough, stops where it is short by
chance: of such 95 % intervals as few as 90 % hold the median. Three things keep the coverage; together they
cost half as many repeats again (docs/measurements/statistics.md):

- few looks: the least repeats, then half as many more each time, up to the most;
- a target met at a look must still be met with a third more repeats, which did not decide when to look;
- intervals of such cells are 96 % intervals by themselves.

What ends a cell depends on its values in the order of their repeats alone, not on how often one asks, so
a study that was interrupted ends the same cells at the same counts.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Literal

from configs.spec.measuring import Measuring
from reports.numbers.statistics import CONFIDENCE, LEAST_REPEATS, Estimate, estimate

End = Literal["target reached", "most repeats"]

LOOK_GROWTH = 1.5
CONFIRMATION = 4 / 3
LOOK_CONFIDENCE = 0.96


def next_look(values: Sequence[float], rules: Measuring) -> int | None:
    """How many repeats the cell should have before one looks again; None where it is done.

    `values` are the cell's figures in the order of their repeats, those of failed repeats left out.
    """
    return _standing(values, rules)[0]


def reason(values: Sequence[float], rules: Measuring) -> End | None:
    """What ended the cell; None while it goes on, and without a target. A spent budget is the caller's to say."""
    return _standing(values, rules)[1]


def confidence(rules: Measuring) -> float:
    """With which `estimate` and the ratios are to be called for cells measured under these rules, to cover 95 %."""
    return CONFIDENCE if rules.target_interval is None or len(list(schedule(rules))) == 1 else LOOK_CONFIDENCE


def schedule(rules: Measuring) -> Iterator[tuple[int, int]]:
    """Counts of repeats at which a cell is looked at, each with the count at which a target met there is confirmed."""
    most = rules.repeats if rules.target_interval is None else max(rules.repeats, rules.max_repeats)
    count = min(most, max(rules.repeats, LEAST_REPEATS))
    while count < most:
        yield count, min(most, ceil(count * CONFIRMATION - 1e-9))
        count = min(most, int(count * LOOK_GROWTH + 0.5))
    yield most, most


def is_narrow(found: Estimate | None, target: float) -> bool:
    """Whether there is an interval, and half its width is at most that share of the median."""
    if found is None or found.interval is None:
        return False
    low, high = found.interval
    return (high - low) / 2 <= target * abs(found.median)


def _standing(values: Sequence[float], rules: Measuring) -> tuple[int | None, End | None]:
    """The count of the next look, and what ended the cell; one of them is None, or both without a target."""
    target = rules.target_interval
    for look, confirmed in schedule(rules):
        for count in (look, confirmed):
            if len(values) < count:
                return count, None
            if target is None or not is_narrow(estimate(values[:count], confidence(rules)), target):
                break
        else:
            return None, "target reached"
    return None, None if target is None else "most repeats"
