"""Medians, ratios, drift, noise and percentiles, each against a computation of another kind or a known answer."""

import warnings
from fractions import Fraction
from itertools import combinations, permutations, product
from math import comb, exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from reports.numbers.drift import RepeatNoise, drift, noise
from reports.numbers.inversion import EXACT_CANDIDATES, concordance, differences, inverted, p_value, rank_sum, slopes
from reports.numbers.statistics import (
    LEAST_REPEATS,
    Estimate,
    Percentile,
    corrected,
    estimate,
    median_interval,
    median_intervals,
    min_repeats,
    order_weights,
    pair_ratios,
    paired_ratio,
    unpaired_ratio,
)

figures = st.integers(min_value=1, max_value=10**8).map(lambda cents: cents / 100)  # apart enough for logs to differ
STUDIES = 600


def seeded(name: int) -> np.random.Generator:
    return np.random.default_rng([20261121, name])


# Median


def hettmansperger_sheather(values: list[float], confidence: Fraction) -> tuple[float, float]:
    """The paper's formula in exact fractions, from the binomial's definition."""
    count, ordered = len(values), sorted(values)

    def coverage(depth: int) -> Fraction:
        return sum(Fraction(comb(count, k), 2**count) for k in range(depth, count - depth + 1)) + Fraction(0)

    depth = max(k for k in range(1, count // 2) if coverage(k) >= confidence)
    inside = (coverage(depth) - confidence) / (coverage(depth) - coverage(depth + 1))
    share = (count - depth) * inside / (depth + (count - 2 * depth) * inside)
    low = (1 - share) * Fraction(ordered[depth - 1]) + share * Fraction(ordered[depth])
    high = (1 - share) * Fraction(ordered[count - depth]) + share * Fraction(ordered[count - depth - 1])
    return float(low), float(high)


@given(st.lists(figures, min_size=6, max_size=40), st.sampled_from(["0.95", "0.96", "0.9"]))
def test_the_interval_is_hettmansperger_and_sheathers(values: list[float], confidence: str) -> None:
    found = median_interval(values, float(confidence))
    assert found == pytest.approx(hettmansperger_sheather(values, Fraction(confidence)))


def test_a_known_interval() -> None:
    # Depths 2 and 3 of ten cover 97.85 and 89.06 %; the share inwards is 8 * 0.32444 / (2 + 6 * 0.32444) = 0.65766.
    assert order_weights(10, 0.95) == pytest.approx((2, 0.65766), abs=1e-5)
    assert median_interval(range(1, 11)) == pytest.approx((2.65766, 8.34234), abs=1e-5)


@given(st.lists(figures, min_size=6, max_size=40))
def test_the_interval_holds_the_median_and_is_in_the_range(values: list[float]) -> None:
    found = estimate(values)
    assert found is not None and found.interval is not None
    assert found.low <= found.interval[0] <= found.median <= found.interval[1] <= found.high


@given(st.lists(figures, min_size=6, max_size=20), st.floats(min_value=0.001, max_value=1000))
def test_another_unit_changes_nothing_else(values: list[float], factor: float) -> None:
    one, other = estimate(values), estimate([value * factor for value in values])
    assert one is not None and other is not None and other.interval is not None
    assert other.interval == pytest.approx(one.scaled(factor).interval)


@given(st.lists(figures, min_size=8, max_size=30))
def test_more_confidence_is_a_wider_interval(values: list[float]) -> None:
    narrow, wide = median_interval(values, 0.9), median_interval(values, 0.99)
    assert narrow is not None and wide is not None
    assert wide[0] <= narrow[0] and narrow[1] <= wide[1]


@pytest.mark.parametrize("count", range(LEAST_REPEATS))
def test_below_six_values_there_is_no_interval(count: int) -> None:
    assert median_interval([1.0] * count) is None
    assert order_weights(count, 0.5) is None


def test_six_values_hold_no_more_than_their_range_does() -> None:
    assert median_interval([1.0, 2, 3, 4, 5, 6], 0.968) is not None
    assert median_interval([1.0, 2, 3, 4, 5, 6], 0.97) is None  # 1 - 2 / 2^6 = 0.96875


def test_estimates_of_few_equal_and_unknown_values() -> None:
    assert estimate([]) is None
    assert estimate([None, None]) is None
    assert estimate([3.0, None, 1.0]) == Estimate(2.0, 1.0, 3.0, 2)
    assert estimate([7.0] * 6) == Estimate(7.0, 7.0, 7.0, 6, (7.0, 7.0))
    assert estimate([0.0] * 9) == Estimate(0.0, 0.0, 0.0, 9, (0.0, 0.0))


@given(st.lists(figures, min_size=1, max_size=40))
def test_an_estimate_has_the_bits_of_numpys_median_and_of_many_intervals(values: list[float]) -> None:
    found = estimate(values)
    assert found is not None and found.median == float(np.median(values))
    assert found.interval == median_interval(values)


def test_many_values_are_as_quick_as_few() -> None:
    found = median_interval(range(4001))
    assert found == pytest.approx((2000 - 1.96 * 4000**0.5 / 2, 2000 + 1.96 * 4000**0.5 / 2), abs=1.5)


def test_intervals_of_many_samples_are_those_of_each() -> None:
    samples = seeded(1).lognormal(size=(50, 13))
    low, high = median_intervals(samples) or (None, None)
    assert [(a, b) for a, b in zip(low, high, strict=True)] == [median_interval(row) for row in samples]


# Ratios


def test_a_paired_ratio_is_of_the_pairs() -> None:
    first = {0: 110.0, 1: 220.0, 2: 330.0, 4: 1.0, 5: 0.0}
    second = {0: 100.0, 1: 200.0, 2: 300.0, 3: 7.0, 4: 0.0, 5: 3.0}
    assert pair_ratios(first, second) == pytest.approx({0: 1.1, 1: 1.1, 2: 1.1})
    found = paired_ratio(first, second)
    assert found is not None and found.interval is None and found.differs is None
    assert (found.value, found.count) == (pytest.approx(1.1), 3)
    assert found.bounds == pytest.approx((1.1, 1.1))
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


def test_of_two_pairs_a_ratio_and_its_inverse_are_not_both_above_1() -> None:
    """`tp=2 does 1.01 times as much`, and elsewhere `1 rank 1.06 times better`: of 0.75 and 1.27."""
    one, other = {0: 75.0, 1: 127.0}, {0: 100.0, 1: 100.0}
    there, back = paired_ratio(one, other), paired_ratio(other, one)
    assert there is not None and back is not None
    assert there.value == pytest.approx(0.9760, abs=1e-4) and back.value == pytest.approx(1 / there.value)
    same = paired_ratio({0: 11.0, 1: 11.0}, {0: 10.0, 1: 10.0})
    assert same is not None and same.value == 1.1, "to the bit"


def test_what_a_block_does_to_both_cells_cancels() -> None:
    blocks = seeded(2).lognormal(size=10)
    first, second = dict(enumerate(1.1 * blocks)), dict(enumerate(blocks))
    found = paired_ratio(first, second)
    assert found is not None and found.interval == pytest.approx((1.1, 1.1)) and found.differs
    apart = unpaired_ratio(list(first.values()), list(second.values()))
    assert apart is not None and apart.differs is False


@given(st.lists(st.tuples(figures, figures), min_size=6, max_size=20))
def test_a_ratio_turned_round_is_its_inverse(pairs: list[tuple[float, float]]) -> None:
    one, other = dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))
    for there, back in (
        (paired_ratio(one, other), paired_ratio(other, one)),
        (
            unpaired_ratio(list(one.values()), list(other.values())),
            unpaired_ratio(list(other.values()), list(one.values())),
        ),
    ):
        assert there is not None and back is not None and there.interval is not None and back.interval is not None
        assert back.value == pytest.approx(1 / there.value)
        assert back.interval == pytest.approx((1 / there.interval[1], 1 / there.interval[0]))
        assert there.interval[0] * (1 - 1e-9) <= there.value <= there.interval[1] * (1 + 1e-9)
        assert there.low * (1 - 1e-9) <= there.interval[0] and there.interval[1] <= there.high * (1 + 1e-9)


def test_an_unpaired_ratio_is_hodges_and_lehmanns() -> None:
    first, second = [10.0, 12.0, 15.0], [9.0, 11.0]
    found = unpaired_ratio(first, second)
    assert found is not None and found.interval is None and found.count == 2
    assert log(found.value) == pytest.approx(np.median([log(a / b) for a, b in product(first, second)]))
    assert (found.low, found.high) == pytest.approx((10 / 11, 15 / 9))
    assert unpaired_ratio([], [1.0]) is None and unpaired_ratio([1.0], [0.0]) is None


@given(st.lists(figures, min_size=6, max_size=12, unique=True), st.lists(figures, min_size=6, max_size=12, unique=True))
@settings(max_examples=50)
def test_an_exact_interval_leaves_1_out_where_mann_whitney_rejects(first: list[float], second: list[float]) -> None:
    if set(first) & set(second):
        return
    logs = differences(np.log(first), np.log(second))
    null = rank_sum(len(first), len(second))
    p = stats.mannwhitneyu(first, second, method="exact").pvalue
    assert p_value(logs, null) == pytest.approx(p)
    found = inverted(logs, null, 0.95, interpolated=False)
    assert found is not None and (not found[0] <= 0 <= found[1]) == (p <= 0.05)
    between = inverted(logs, null, 0.95)
    assert between is not None and found[0] <= between[0] <= between[1] <= found[1]


def test_corrected_comparisons_are_wider_or_unknown() -> None:
    rng = seeded(3)
    first, second = dict(enumerate(rng.lognormal(size=10))), dict(enumerate(rng.lognormal(size=10)))
    one, ten, hundred = (paired_ratio(first, second, comparisons) for comparisons in (1, 10, 100))
    assert one is not None and ten is not None and hundred is not None
    assert one.interval is not None and ten.interval is not None
    assert ten.interval[0] < one.interval[0] and one.interval[1] < ten.interval[1]
    assert hundred.interval is None and hundred.value == one.value and hundred.comparisons == 100


@pytest.mark.parametrize("level", [0.95, 0.96])
@pytest.mark.parametrize("comparisons", [1, 2, 3, 10, 25, 26, 100, 1000])
def test_the_least_repeats_are_just_enough(comparisons: int, level: float) -> None:
    least = min_repeats(comparisons, level)
    confidence = corrected(level, comparisons)
    assert order_weights(least, confidence) is not None
    assert least == LEAST_REPEATS or order_weights(least - 1, confidence) is None


def test_the_confidence_can_be_raised() -> None:
    values = seeded(4).lognormal(size=(2, 12))
    for ratio in (
        lambda level: paired_ratio(dict(enumerate(values[0])), dict(enumerate(values[1])), 1, level).interval,
        lambda level: unpaired_ratio(list(values[0]), list(values[1]), 1, level).interval,
    ):
        assert ratio(0.96)[0] < ratio(0.95)[0] < ratio(0.95)[1] < ratio(0.96)[1]


# Inverted tests


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 3), (4, 3), (5, 5)])
def test_the_rank_sum_is_that_of_all_orders(first: int, second: int) -> None:
    counts = [
        sum(place - index for index, place in enumerate(places))
        for places in combinations(range(first + second), first)
    ]
    expected = [np.mean([count <= k for count in counts]) for k in range(first * second + 1)]
    assert rank_sum(first, second).cumulative == pytest.approx(expected)


@pytest.mark.parametrize("count", [2, 3, 5, 6])
def test_concordance_is_that_of_all_orders(count: int) -> None:
    counts = [sum(a > b for a, b in combinations(order, 2)) for order in permutations(range(count))]
    expected = [np.mean([inversions <= k for inversions in counts]) for k in range(count * (count - 1) // 2 + 1)]
    assert concordance(count).cumulative == pytest.approx(expected)


def test_many_candidates_use_the_normal_limit() -> None:
    assert 100 * 100 <= EXACT_CANDIDATES < 101 * 100
    exact, limit = rank_sum(100, 100), rank_sum(100, 101)
    assert limit.candidates == 10_100 and len(exact.cumulative) == 10_001
    for null, sizes in ((exact, (100, 100)), (limit, (100, 101))):
        deviation = (null.candidates * (sum(sizes) + 1) / 12) ** 0.5
        depth = int(np.searchsorted(null.cumulative, 0.025))
        assert depth == pytest.approx(null.candidates / 2 - 1.96 * deviation, abs=1.5)
    found = unpaired_ratio(list(np.exp(np.arange(101) / 100)), list(np.exp(np.arange(101) / 100)))
    assert found is not None and found.interval is not None and found.differs is False
    assert concordance(200).cumulative[-1] == pytest.approx(0.5, abs=1e-3)


# Drift and noise


def series(changes: list[float], cells: int = 4, spread: float = 0.01, seed: int = 5) -> list[dict[int, float]]:
    """Cells of very different speed, each with the same change from block to block."""
    rng = seeded(seed)
    return [
        {block: 10**cell * exp(change + rng.normal(0, spread)) for block, change in enumerate(changes)}
        for cell in range(cells)
    ]


def test_a_drift_is_found_with_its_size() -> None:
    found = drift(series(list(np.linspace(0, log(0.9), 12))))
    assert found is not None and found.interval is not None and found.p_value is not None
    assert found.drifts and found.change == pytest.approx(-0.1, abs=0.02)
    assert found.interval[0] < -0.1 < found.interval[1] < 0 and found.p_value < 0.001
    assert (found.blocks, found.cells) == (12, 4)


def test_no_drift_is_found_where_there_is_none() -> None:
    found = drift(series([0.0] * 12))
    assert found is not None and found.drifts is False and found.p_value is not None and found.p_value > 0.05


def test_the_test_for_drift_is_kendalls_and_sens() -> None:
    cells = series(list(np.linspace(0, 0.01, 9)), cells=1)
    found = drift(cells)
    assert found is not None and found.interval is not None
    blocks, values = np.arange(9.0), np.log(list(cells[0].values()))
    assert found.p_value == pytest.approx(stats.kendalltau(blocks, values, method="exact").pvalue)
    assert log(1 + found.change) == pytest.approx(8 * stats.theilslopes(values, blocks).slope)
    ordered = np.sort(slopes(blocks, values)) * 8
    # Kendall's table for 9 points: P(8 or fewer of 36 discordant) is 0.0223, of 9 it is 0.0376.
    assert np.log1p(found.interval) == pytest.approx((ordered[8], ordered[-9]))


def test_verdict_and_p_value_agree() -> None:
    rng = seeded(6)
    for _ in range(200):
        found = drift([dict(enumerate(np.exp(rng.normal(size=10) + np.linspace(0, 1.5, 10))))])
        assert found is not None and found.p_value is not None
        assert found.drifts == (found.p_value <= 0.05)


def test_drift_with_gaps_one_repeat_and_few_blocks() -> None:
    cells = series(list(np.linspace(0, 1, 8)), spread=0.001)
    del cells[0][3], cells[1][0], cells[2][7]
    found = drift([*cells, {4: 5.0}, {}])
    assert found is not None and found.drifts and found.cells == 4
    assert found.change == pytest.approx(exp(1) - 1, rel=0.05)
    few = drift(series([0, 1, 2, 3, 4]))
    assert few is not None and few.drifts is None and few.interval is None and few.p_value is None
    assert drift([{0: 1.0}, {5: 2.0}]) is None and drift([]) is None


def test_cells_that_needed_more_repeats_do_not_hide_a_drift() -> None:
    changes = list(np.linspace(0, 0.1, 40))
    cells = [
        dict(list(cell.items())[:count])
        for cell, count in zip(series(changes, spread=0.001), (10, 16, 20, 40), strict=True)
    ]
    found = drift(cells)
    assert found is not None and found.drifts and found.blocks == 16  # more than half of the cells have these
    assert found.change == pytest.approx(exp(0.1 * 15 / 39) - 1, rel=0.03)


def test_one_stray_cell_is_no_drift() -> None:
    cells = series([0.0] * 10, cells=5)
    cells[2] = {block: value * 2**block for block, value in cells[2].items()}
    found = drift(cells)
    assert found is not None and abs(found.change) < 0.02


def test_equal_figures_do_not_drift() -> None:
    found = drift([dict.fromkeys(range(8), 3.0)])
    assert found is not None and (found.change, found.interval, found.p_value) == (0.0, (0.0, 0.0), 1.0)
    assert found.drifts is False


def test_noise_is_that_of_repeats_that_follow_each_other() -> None:
    rng = seeded(7)
    cells = [dict(enumerate(100 * np.exp(rng.normal(0, 0.02, 50)))) for _ in range(40)]
    found = noise(cells)
    assert found is not None and found.pairs == 40 * 49
    assert found.deviation == pytest.approx(0.02 * 2**0.5, rel=0.05)
    assert found.typical == pytest.approx(0.6745 * 0.02 * 2**0.5, rel=0.05)
    known = noise([{0: 1.0, 1: 1.1, 3: 5.0}, {0: 3.0}])
    assert known is not None and known.typical == pytest.approx(0.1) and known.pairs == 1
    assert noise([{0: 1.0, 2: 2.0}]) is None and noise([]) is None


@pytest.mark.parametrize(("repeats", "comparisons"), [(6, 1), (10, 1), (10, 10), (20, 1)])
def test_the_smallest_change_is_found_in_95_percent(repeats: int, comparisons: int) -> None:
    change = RepeatNoise(0.01, 0.03, 100).smallest_change(repeats, comparisons)
    assert change is not None
    logs = seeded(8).normal(log(1 + change), 0.03, (20_000, repeats))
    ends = median_intervals(logs, corrected(0.95, comparisons))
    assert ends is not None and 0.94 < np.mean(ends[0] > 0) < 0.975


def test_too_few_repeats_promise_nothing() -> None:
    assert RepeatNoise(0.01, 0.03, 100).smallest_change(5) is None
    assert RepeatNoise(0.01, 0.03, 100).smallest_change(8, comparisons=10) is None


# Percentiles


@pytest.mark.parametrize(
    ("quantile", "samples", "marked"),
    [
        (0.99, 999, True),
        (0.99, 1_000, False),
        (0.999, 9_999, True),
        (0.999, 10_000, False),
        (0.95, 199, True),
        (0.95, 200, False),
        (0.5, 19, True),
        (0.5, 20, False),
        (0.01, 999, True),
    ],
)
def test_a_percentile_with_too_few_samples_is_marked(quantile: float, samples: int, marked: bool) -> None:
    assert Percentile(1.0, quantile, samples).marked == marked


# Simulated


def test_intervals_cover_what_they_promise_and_the_bootstraps_do_not() -> None:
    rng = seeded(9)
    samples = rng.lognormal(size=(STUDIES, 5 * 6)).reshape(-1, 6)
    low, high = median_intervals(samples) or (samples, samples)
    assert 0.935 <= np.mean((low <= 1) & (high >= 1)) <= 0.965
    medians = np.median(samples[:, rng.integers(0, 6, (400, 6))], axis=2)
    low, high = np.quantile(medians, [0.025, 0.975], axis=1)
    assert np.mean((low <= 1) & (high >= 1)) < 0.935  # the band tells them apart


def test_ratios_raise_few_false_alarms_and_miss_little() -> None:
    rng = seeded(10)
    first, second = np.exp(rng.normal(0, 0.02, (2, STUDIES, 10)))
    for slower, low, high in ((1.0, 0.03, 0.07), (1.05, 0.95, 1.0)):
        paired = [
            paired_ratio(dict(enumerate(a)), dict(enumerate(b / slower))) for a, b in zip(first, second, strict=True)
        ]
        apart = [unpaired_ratio(a, b / slower) for a, b in zip(first, second, strict=True)]
        for found in (paired, apart):
            assert low <= np.mean([ratio is not None and ratio.differs is True for ratio in found]) <= high


def test_nothing_warns_about_equal_values() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = dict.fromkeys(range(10), 2.0)
        for ratio in (paired_ratio(same, same), unpaired_ratio(list(same.values()), list(same.values()))):
            assert ratio is not None and ratio.interval == (1.0, 1.0) and ratio.differs is False
