"""Steady state on series whose nature is known: how often it is found, missed, and imagined. Seeds are fixed."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from configs.common.arrays import Floats
from reports.numbers.steady import LARGEST_CUT, LEAST_PASSES, Steady, steady
from reports.reading.load import load_run
from reports.render import render_report
from reports.steady_text import steady_lines, steady_rule, unsteady_table
from tests.support.run_folders.report_runs import experiment, generate, generated, plan_of, write_plan, write_record

SERIES = 400
Make = Callable[[np.random.Generator, int], Floats]


def found_in(make: Make, count: int) -> list[Steady]:
    rng = np.random.default_rng(7)
    return [steady(make(rng, count)) for _ in range(SERIES)]


def none_rate(results: list[Steady]) -> float:
    return sum(result.found is False for result in results) / len(results)


def white(rng: np.random.Generator, count: int) -> Floats:
    return 1 + 0.03 * rng.standard_normal(count)


def correlated(rng: np.random.Generator, count: int) -> Floats:
    """First-order autoregressive, coefficient 0.5."""
    noise = rng.standard_normal(count)
    for index in range(1, count):
        noise[index] = 0.5 * noise[index - 1] + noise[index] * 0.75**0.5
    return 1 + 0.03 * noise


@pytest.mark.parametrize("count", [LEAST_PASSES, 64, 512])
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (white, 0.03),
        (lambda rng, count: rng.lognormal(0, 0.3, count), 0.03),
        (lambda rng, count: 1 + 0.03 * np.abs(rng.standard_t(2, count)), 0.03),
        (lambda rng, count: 1 + 0.03 * rng.pareto(1.5, count), 0.03),
        (lambda rng, count: np.round(1 + 0.03 * rng.standard_normal(count), 2), 0.03),
        (correlated, 0.10),
        (lambda rng, count: 1 + 0.05 * np.sin(np.arange(count) / 2.5) + 0.01 * rng.standard_normal(count), 0.03),
    ],
    ids=["white", "lognormal", "heavy-tailed", "pareto", "few-values", "correlated", "periodic"],
)
def test_what_is_steady_is_rarely_called_unsteady(make: Make, most: float, count: int) -> None:
    results = found_in(make, count)
    assert none_rate(results) <= most
    cut = np.mean([result.first / count for result in results if result.found])
    assert cut < 0.15  # of the shortest; of 512 white passes it is two


def test_white_noise_loses_next_to_nothing() -> None:
    results = found_in(white, 512)
    assert np.median([result.first for result in results]) == 0
    assert np.mean([result.first for result in results]) < 5


def test_a_start_up_is_cut_where_it_ends() -> None:
    """Half as slow again at first, with a time constant of 25 of 512 passes: 1 % is left after 98."""
    results = found_in(lambda rng, count: (1 + 0.5 * np.exp(-np.arange(count) / 25)) * white(rng, count), 512)
    assert none_rate(results) < 0.06
    cuts = [result.first for result in results if result.found]
    assert 50 < np.median(cuts) < 110
    assert all(result.first + result.count == 512 for result in results if result.found)


def test_one_slow_first_pass_is_cut_and_one_late_slow_pass_cuts_nothing() -> None:
    first = found_in(lambda rng, count: np.where(np.arange(count) < 1, 3, 1) * white(rng, count), 100)
    assert np.mean([result.first >= 1 for result in first]) > 0.99
    late = found_in(lambda rng, count: np.where(np.arange(count) == 45, 30, 1) * white(rng, count), 100)
    assert np.median([result.first for result in late]) == 0 and none_rate(late) < 0.03


def test_an_early_change_of_level_is_cut_and_a_late_one_is_no_steady_state() -> None:
    early = found_in(lambda rng, count: np.where(np.arange(count) < 0.3 * count, 1.1, 1) * white(rng, count), 512)
    assert none_rate(early) < 0.03
    assert abs(np.median([result.first for result in early if result.found]) - 154) <= 3
    late = found_in(lambda rng, count: np.where(np.arange(count) < 0.7 * count, 1.1, 1) * white(rng, count), 512)
    assert none_rate(late) > 0.99
    assert late[0].reason.startswith("the level changes by -") and "at about pass 35" in late[0].reason
    short = found_in(lambda rng, count: np.where(np.arange(count) < 0.7 * count, 1.1, 1) * white(rng, count), 64)
    assert none_rate(short) > 0.95


def test_drift_is_found_unless_it_is_too_small_to_matter() -> None:
    strong = found_in(lambda rng, count: np.linspace(1, 1.1, count) * white(rng, count), 512)
    assert none_rate(strong) > 0.98
    assert sum("drifts by +" in result.reason for result in strong) > 0.5 * SERIES
    short = found_in(lambda rng, count: np.linspace(1, 1.2, count) * white(rng, count), 64)
    assert none_rate(short) > 0.9
    small = found_in(lambda rng, count: np.linspace(1, 1.005, count) + 0.0001 * white(rng, count), 512)
    assert none_rate(small) == 0


def test_times_of_which_most_are_nothing_are_judged_all_the_same() -> None:
    """A program that writes whole seconds: a step takes none of them, or one."""
    late = steady(np.array([0.0] * 12 + [1.0] * 9))
    assert late.found is False and late.reason == "the level changes by +233.3 % at about pass 13"
    assert steady(np.array(([0.0] * 3 + [1.0]) * 10)).found and steady(np.zeros(40)).found


def test_what_cannot_be_told_is_none() -> None:
    assert steady(np.ones(LEAST_PASSES - 1)) == Steady(None, 0, 19, "19 passes, at least 20 are needed to tell")
    assert steady(np.array([])).found is None
    assert steady(np.ones(LEAST_PASSES)) == Steady(True, 0, 20, "from the first pass")
    assert steady(np.array([np.nan] * 30)) == Steady(False, 0, 30, "a time is no number")


@given(arrays(np.float64, st.integers(0, 200), elements=st.floats(1e-6, 1e6)))
def test_any_series_gives_a_window_within_it(series: Floats) -> None:
    result = steady(series)
    assert result.count > 0 or len(series) == 0
    assert 0 <= result.first <= LARGEST_CUT * len(series) and result.first + result.count == len(series)
    assert (result.first == 0) or result.found
    assert result == steady(series)


def test_rates_are_of_the_steady_part_and_the_report_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    """30 passes of 2 s, then 70 of 1 s, 40 tokens each; another cell slows down for good after 70."""
    good, bad = generate(), generate(batch_size=8)
    points = [(good, {"workload.batch_size": 4}, "4"), (bad, {"workload.batch_size": 8}, "8")]
    run = write_plan(
        tmp_path_factory.mktemp("steady") / "run", plan_of([good, bad], [experiment("b", "sweep", points)], repeats=1)
    )
    for cell, walls in ((good, [2.0] * 30 + [1.0] * 70), (bad, [1.0] * 70 + [2.0] * 30)):
        samples = generated(cell, 1.0)
        for name in ("ttft_seconds", "request_seconds", "batch_sequences"):
            samples[f"0/{name}"] = (samples[f"0/{name}"] * 50)[: 100 * (8 // cell.workload.batch_size)]
        samples["0/pass_seconds"] = walls
        write_record(run, cell, samples=samples)
    study = load_run(run)
    steady_measurement, other = (study.cells[cell.key].measurements[0] for cell in (good, bad))
    assert steady_measurement.steady is not None and steady_measurement.steady.first == 30
    assert steady_measurement.rates is not None and steady_measurement.rates.tokens_per_second == pytest.approx(40.0)
    assert steady_measurement.rates.passes == 70
    assert other.steady is not None and other.steady.found is False
    assert other.rates is not None and other.rates.passes == 100
    first, second, third, rule = steady_lines(study)
    assert "MSER" in rule and "Mann-Kendall" in rule
    assert "found in 1 of 2 measurements of at least 20 passes." in first
    assert "In 1 measurement the first passes were cut as start-up: 30 %" in second
    assert third.startswith("None was found in 1 measurement of 1 cell") and "the level changes by +" in third
    table = unsteady_table(study)
    assert table is not None and table.rows[0][2] == "1 of 1"
    assert "White 1997" in steady_rule()
    render_report(run)


def test_too_few_passes_are_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    cell = generate()
    run = write_plan(tmp_path_factory.mktemp("steady") / "run", plan_of([cell], [], repeats=2))
    assert steady_lines(load_run(run)) == []
    write_record(run, cell, samples=generated(cell, 1.0))
    study = load_run(run)
    (line,) = steady_lines(study)
    assert line.startswith("Steady state was not tested: no measurement has 20 passes.")
    assert unsteady_table(study) is None


def test_a_single_short_measurement_is_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It was `1 shorter ones cannot be judged`."""
    cell = generate()
    run = write_plan(tmp_path_factory.mktemp("steady") / "run", plan_of([cell], [], repeats=2))
    write_record(run, cell, samples=generated(cell, 1.0))
    samples = generated(cell, 1.0)
    for name in ("ttft_seconds", "request_seconds", "batch_sequences"):
        samples[f"0/{name}"] = (samples[f"0/{name}"] * 50)[: 100 * (8 // cell.workload.batch_size)]
    samples["0/pass_seconds"] = [1.0] * 100
    write_record(run, cell, repeat=1, samples=samples)
    assert steady_lines(load_run(run))[0].endswith("of at least 20 passes; 1 shorter one cannot be judged.")
