"""When a cell has enough repeats: the schedule, what ends a cell, and that its intervals keep their coverage."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.spec.measuring import Measuring
from reports.numbers.statistics import estimate
from reports.numbers.stopping import confidence, is_narrow, next_look, reason, schedule

STUDIES = 500
SHARP = [100.0 + 0.01 * number for number in range(60)]
"""Half the interval is 0.03 % of the median or less."""


def rules(target: float | None, least: int = 10, most: int = 60) -> Measuring:
    return Measuring(repeats=least, target_interval=target, max_repeats=most)


def repeats_spent(values: list[float], measuring: Measuring) -> int:
    """Measures as a study does: to the next look, and asks again."""
    count = 0
    while (look := next_look(values[:count], measuring)) is not None:
        assert look > count
        count = look
    return count


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (6, 60, [(6, 8), (9, 12), (14, 19), (21, 28), (32, 43), (48, 60), (60, 60)]),
        (10, 60, [(10, 14), (15, 20), (23, 31), (35, 47), (53, 60), (60, 60)]),
        (20, 60, [(20, 27), (30, 40), (45, 60), (60, 60)]),
        (3, 10, [(6, 8), (9, 10), (10, 10)]),
        (10, 10, [(10, 10)]),
        (70, 60, [(70, 70)]),
        (3, 4, [(4, 4)]),
    ],
)
def test_the_looks_are_few(least: int, most: int, expected: list[tuple[int, int]]) -> None:
    assert list(schedule(rules(0.01, least, most))) == expected


@given(st.integers(1, 200), st.integers(1, 500))
def test_looks_grow_to_the_most(least: int, most: int) -> None:
    looks = list(schedule(rules(0.01, least, most)))
    assert looks[-1] == (max(least, most),) * 2
    assert all(look < later for (look, _), (later, _) in pairwise(looks))
    assert all(look <= confirmed <= looks[-1][0] for look, confirmed in looks)
    assert all(confirmed <= later for (_, confirmed), (later, _) in pairwise(looks[:-1]))


def test_without_a_target_the_repeats_are_all() -> None:
    fixed = rules(None)
    assert next_look([], fixed) == next_look([1.0] * 9, fixed) == 10
    assert next_look([1.0, 9.0] * 5, fixed) is None
    assert reason([1.0] * 10, fixed) is None
    assert confidence(fixed) == 0.95
    assert next_look([1.0] * 3, rules(None, least=3)) is None


def test_a_target_met_at_once_is_confirmed() -> None:
    goal = rules(0.01)
    assert next_look([], goal) == next_look(SHARP[:9], goal) == 10
    assert next_look(SHARP[:10], goal) == next_look(SHARP[:13], goal) == 14
    assert reason(SHARP[:13], goal) is None
    assert next_look(SHARP[:14], goal) is None
    assert reason(SHARP[:14], goal) == "target reached"


def test_a_target_that_is_lost_again_is_not_reached() -> None:
    lucky = [*SHARP[:10], *[500.0] * 5]
    goal = rules(0.01)
    assert next_look(lucky[:10], goal) == 14
    assert next_look(lucky[:14], goal) == 15  # the next look of the schedule
    assert next_look(lucky, goal) == 23
    assert reason(lucky, goal) is None


def test_a_target_that_is_never_met_ends_at_the_most() -> None:
    wild = [float(10 ** (number % 5)) for number in range(60)]
    goal = rules(0.01, least=20)
    assert [next_look(wild[:count], goal) for count in (0, 20, 30, 45)] == [20, 30, 45, 60]
    assert next_look(wild, goal) is None and reason(wild, goal) == "most repeats"
    assert next_look([*wild, 1.0], goal) is None


def test_a_target_met_at_the_most_is_reached() -> None:
    values = [float(10 ** (number % 5)) for number in range(20)] + [50.0] * 40
    goal = rules(0.01, least=20)
    assert next_look(values, goal) is None and reason(values, goal) == "target reached"


def test_fewer_than_six_repeats_cannot_meet_a_target() -> None:
    goal = rules(0.5, least=3)
    assert next_look(SHARP[:3], goal) == 6
    few = rules(0.5, least=3, most=4)
    assert next_look(SHARP[:4], few) is None and reason(SHARP[:4], few) == "most repeats"
    assert confidence(few) == 0.95


def test_the_target_is_half_the_width_over_the_median() -> None:
    values = [90.0, 92.0, 100.0, 100.0, 108.0, 110.0]
    found = estimate(values)
    assert found is not None and found.interval is not None
    share = (found.interval[1] - found.interval[0]) / 2 / found.median
    assert is_narrow(found, share) and not is_narrow(found, share * 0.999)
    assert not is_narrow(None, 0.5) and not is_narrow(estimate(values[:5]), 0.99)
    assert not is_narrow(estimate([-1.0, 0, 0, 0, 0, 1.0]), 0.5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([6, 10, 20]), st.floats(1e-3, 1e3))
def test_a_unit_and_the_number_of_questions_change_nothing(seed: int, least: int, factor: float) -> None:
    values = [float(value) for value in np.random.default_rng(seed).lognormal(0, 0.02, 60)]
    goal = rules(0.012, least)
    spent = repeats_spent(values, goal)
    assert repeats_spent([value * factor for value in values], goal) == spent
    for count in range(61):
        asked = next_look(values[:count], goal)
        assert asked is None if count >= spent else asked is not None and count < asked <= spent
    assert reason(values[:spent], goal) in ("target reached", "most repeats")


@pytest.mark.parametrize("least", [6, 10, 20])
def test_intervals_keep_their_coverage_and_naive_ones_do_not(least: int) -> None:
    """A target that is met now and then, and late: where looking does the most harm."""
    studies = np.exp(0.02 * np.random.default_rng([20261121, least]).standard_normal((STUDIES, 60)))
    for target in (0.012, 0.008):
        goal = rules(target, least)
        held = 0
        for values in studies.tolist():
            found = estimate(values[: repeats_spent(values, goal)], confidence(goal))
            assert found is not None and found.interval is not None
            held += found.interval[0] <= 1 <= found.interval[1]
        assert 0.925 <= held / STUDIES <= 0.975


def test_looking_after_every_repeat_loses_the_coverage() -> None:
    studies = np.exp(0.02 * np.random.default_rng([20261121, 6]).standard_normal((STUDIES, 60)))
    held = 0
    for values in studies.tolist():
        count = next((n for n in range(6, 60) if is_narrow(estimate(values[:n]), 0.009)), 60)
        found = estimate(values[:count])
        assert found is not None and found.interval is not None
        held += found.interval[0] <= 1 <= found.interval[1]
    assert held / STUDIES < 0.925
