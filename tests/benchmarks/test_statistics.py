"""The benchmark of the statistics: its noise is what it says, its arithmetic for many studies the shipped one's."""

import json
from math import comb
from pathlib import Path

import numpy as np
import pytest

from benchmarks.statistics.bench import KINDS, Section, main, naive, shipped, stopping
from benchmarks.statistics.parts import (
    ECHO,
    EVEN_MODES,
    NOISE,
    Kind,
    held,
    mixture_median,
    signed_rank_interval,
    simulated,
    stopped_at,
    two_cells,
    upper_bound,
)
from configs.spec.measuring import Measuring
from reports.numbers.statistics import estimate, median_interval
from reports.numbers.stopping import is_narrow, next_look

SEED = 20261121


@pytest.mark.parametrize("kind", [*KINDS, EVEN_MODES, ECHO], ids=lambda kind: kind.name)
def test_noise_has_median_0_and_deviation_1(kind: Kind) -> None:
    values = kind.draw(np.random.default_rng(SEED), (400_000, 2))
    assert np.mean(values < 0) == pytest.approx(0.5, abs=0.002)
    if "heavy" in kind.name:
        assert np.quantile(values, [0.25, 0.75]) == pytest.approx([-0.6745, 0.6745], abs=0.01)
    else:
        assert values.std() == pytest.approx(1, abs=0.05 if "lognormal" in kind.name else 0.005)


def test_an_echo_keeps_half_of_the_last_repeat() -> None:
    values = ECHO.draw(np.random.default_rng(SEED), (100_000, 3))
    assert np.corrcoef(values.T)[0, 1:] == pytest.approx([0.5, 0.25], abs=0.01)


def test_the_median_under_a_drift_is_that_of_the_mixture() -> None:
    rng = np.random.default_rng(SEED)
    centres = np.array([[0.0, 0.0, 3.0], [-1.0, 0.0, 1.0]])
    many = rng.standard_normal((400_000, 3))
    expected = [np.median(row + many) for row in centres]
    assert mixture_median(centres) == pytest.approx(expected, abs=0.01)
    line = simulated(KINDS[-2], rng, 4, 11)
    assert np.log(line.medians(11)) == pytest.approx(np.zeros(4), abs=1e-12)
    assert np.log(line.medians(6)) / NOISE == pytest.approx([-0.25] * 4)
    assert simulated(KINDS[0], rng, 4, 11).medians(6) == pytest.approx(np.ones(4))


def test_two_cells_share_the_machines_path() -> None:
    one, other = two_cells(KINDS[-1], np.random.default_rng(SEED), 5_000, 40, slower=2.0)
    apart = np.log(one[:, -1]) / NOISE - np.log(2 * other[:, -1]) / NOISE
    assert apart.std() == pytest.approx(2**0.5, rel=0.05)  # a path of its own each would add as much again


@pytest.mark.parametrize("least", [6, 10, 20])
@pytest.mark.parametrize("target", [0.9, 0.02, 0.012, 0.008, 1e-9])
def test_many_studies_stop_where_each_of_them_does(least: int, target: float) -> None:
    figures = simulated(KINDS[1], np.random.default_rng([SEED, least]), 60, 60).figures
    rule = shipped(least, target)
    measuring = Measuring(repeats=least, target_interval=target, max_repeats=60)
    expected = []
    for values in figures.tolist():
        count = 0
        while (look := next_look(values[:count], measuring)) is not None:
            count = look
        expected.append(count)
    assert stopped_at(figures, rule.looks, rule.confidence, target).tolist() == expected


def test_the_naive_rule_looks_after_every_repeat() -> None:
    figures = simulated(KINDS[0], np.random.default_rng(SEED), 40, 60).figures
    rule = naive(6, 0.012)
    expected = [
        next((n for n in range(6, 60) if is_narrow(estimate(values[:n]), 0.012)), 60) for values in figures.tolist()
    ]
    assert stopped_at(figures, rule.looks, rule.confidence, 0.012).tolist() == expected


def test_held_is_counted_with_the_shipped_interval() -> None:
    studies = simulated(KINDS[-1], np.random.default_rng(SEED), 50, 20)
    counts = np.random.default_rng(1).integers(6, 21, 50)
    expected = []
    for study, count in enumerate(counts):
        found = median_interval(studies.figures[study, :count])
        assert found is not None
        expected.append(found[0] <= studies.medians(int(count))[study] <= found[1])
    assert held(studies, counts, 0.95).tolist() == expected


@pytest.mark.parametrize(("events", "trials"), [(0, 10), (3, 20), (100, 2000), (19, 20)])
def test_the_upper_bound_is_clopper_and_pearsons(events: int, trials: int) -> None:
    bound = upper_bound(events, trials)
    so_few = sum(comb(trials, k) * bound**k * (1 - bound) ** (trials - k) for k in range(events + 1))
    assert so_few == pytest.approx(0.05, abs=1e-6)
    assert upper_bound(5, 5) == 1.0


def test_the_signed_rank_interval_is_the_textbooks() -> None:
    # For ten pairs the test rejects at 8 or less (two-sided 4.9 %): the ninth average from either end.
    values = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    averages = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    assert signed_rank_interval(values, 0.95) == (averages[8], averages[-9])
    assert signed_rank_interval(values[:5], 0.95) is None


def test_a_missed_bar_is_marked_and_named() -> None:
    section = Section("title", ("a", "b"))
    assert section.judge(True, "fine") == "" and not section.missed
    assert section.judge(False, "normal, 6: 90.0 %") == " (!)"
    assert section.missed == ["title: normal, 6: 90.0 %"]
    section.rows.append(("1", "2"))
    assert section.text().splitlines() == ["## title", "", "| a | b |", "| --- | --- |", "| 1 | 2 |"]


def test_ours_costs_repeats_and_keeps_the_coverage_that_the_naive_rule_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.statistics.bench.KINDS", KINDS[:1])
    ours, contrast = stopping(np.random.default_rng(SEED), 1_000)
    late = [row for row in range(18) if ours.figures[row]["target"] == "after 30" and ours.figures[row]["least"] == 6]
    for row in late:
        assert float(ours.figures[row]["coverage"]) > float(contrast.figures[row]["coverage"]) + 0.01
        assert float(ours.figures[row]["repeats"]) > float(contrast.figures[row]["repeats"])


def test_the_bench_prints_tables_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.statistics.bench.KINDS", KINDS[:1])
    monkeypatch.setattr(
        "benchmarks.statistics.bench.run", lambda studies, seed: [*stopping(np.random.default_rng(seed), studies)]
    )
    status = main(["--studies", "50", "--seed", "3", "--json", str(tmp_path / "figures.json")])
    printed = capsys.readouterr().out
    assert "| normal | 10 |" in printed and "50 studies, seed 3" in printed
    assert status == (1 if "Bars missed" in printed else 0)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["Coverage with sequential stopping, % (mean repeats)"]) == 18
