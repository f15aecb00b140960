"""Scaling laws: known answers, published answers, refusals, intervals, and what the data cannot tell."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.laws import Case, coverage
from reports.laws.file import read_points
from reports.laws.fit import ResidualKind
from reports.laws.laws import LawKind, MeasuredPoint, ScalingLaws, fit_laws, scaled, serial_fraction
from reports.laws.text import changed_text, fit_text, law_lines, more_than_linear, runs_chance
from reports.numbers.statistics import Ratio

DATA = Path(__file__).parents[2] / "data"


def laws_of(
    throughputs: dict[int, float], kind: LawKind = "strong", residuals: ResidualKind = "relative"
) -> ScalingLaws:
    return fit_laws([MeasuredPoint(n, {0: value}) for n, value in throughputs.items()], kind, residuals=residuals)


def usl(ranks: list[int], level: float, sigma: float, kappa: float) -> dict[int, float]:
    return {n: level * n / (1 + sigma * (n - 1) + kappa * n * (n - 1)) for n in ranks}


def published(name: str, residuals: ResidualKind = "relative", first: int | None = None) -> ScalingLaws:
    data = read_points(DATA / f"{name}.csv")
    return fit_laws(data.points[:first], data.kind, data.paired, residuals=residuals)


@settings(max_examples=40, deadline=None)
@given(
    level=st.floats(1e-3, 1e6),
    sigma=st.floats(1e-4, 0.9),
    kappa=st.floats(1e-6, 0.1),
    unit=st.integers(1, 4),
)
def test_exact_points_give_the_law_back(level: float, sigma: float, kappa: float, unit: int) -> None:
    """Also where the smallest point has several ranks: the law is then in units of them."""
    exact = usl([1, 2, 4, 8, 16, 32], level, sigma, kappa)
    fit = laws_of({unit * n: value for n, value in exact.items()}).fits["usl"]
    assert fit.parameters == pytest.approx({"lambda": level, "sigma": sigma, "kappa": kappa}, rel=1e-4, abs=1e-7)
    assert fit.peak_ranks == pytest.approx(unit * ((1 - sigma) / kappa) ** 0.5, rel=1e-3)
    assert max(map(abs, fit.residuals.values())) < 1e-6


def test_amdahl_and_gustafson_with_known_fractions() -> None:
    strong = laws_of({n: 50 / (0.1 + 0.9 / n) for n in (1, 2, 4, 8)})
    assert strong.fits["amdahl"].parameters == pytest.approx({"lambda": 50, "serial_fraction": 0.1})
    assert strong.support.law == "amdahl"
    assert [point.value for point in strong.karp_flatt] == pytest.approx([0.1, 0.1, 0.1])
    weak = laws_of({n: 50 * (n - 0.1 * (n - 1)) for n in (1, 2, 4, 8)}, "weak")
    assert weak.fits["gustafson"].parameters == pytest.approx({"lambda": 50, "serial_fraction": 0.1})
    assert weak.support.law == "gustafson"
    assert [point.efficiency.value for point in weak.points if point.efficiency] == pytest.approx(
        [1, 0.95, 0.925, 0.9125]
    )


@pytest.mark.parametrize(
    ("name", "first", "level", "sigma", "kappa"),
    [
        # R package usl 3.0.3, tests/confint.Rout.save: the first six points.
        ("raytracer", 6, 20.85605, 0.02444, 0.00163),
        # R package usl 3.0.3, README.md and tests/summary.Rout.save.
        ("specsdm91", None, 89.9952, 0.0277285, 0.0001044),
        # B. Schwartz, Practical Scalability Analysis with the USL, as kept in usl4j's ModelTest.java.
        ("cisco", None, 995.6486, 0.02671591, 7.690945e-4),
    ],
)
def test_published_parameters_with_the_residuals_of_their_tools(
    name: str, first: int | None, level: float, sigma: float, kappa: float
) -> None:
    """Least squares of throughputs themselves, as those tools do it: the same parameters to the digits they print."""
    fit = published(name, "absolute", first).fits["usl"]
    assert fit.parameters == pytest.approx({"lambda": level, "sigma": sigma, "kappa": kappa}, rel=3e-3)
    relative = published(name, first=first).fits["usl"]
    assert relative.parameters["lambda"] == pytest.approx(level, rel=0.25)


def test_published_standard_errors_and_peaks() -> None:
    """R package usl 3.0.3, README.md and tests/peak-scalability.Rout.save; the book's peak, from usl4j."""
    specsdm = published("specsdm91", "absolute").fits["usl"]
    errors = np.sqrt(np.diag(specsdm.covariance)) * [specsdm.parameters["lambda"], 1, 1]
    assert errors == pytest.approx([14.2134894, 0.0091217, 1.988e-5], rel=3e-4)
    assert specsdm.freedom == 4 and specsdm.peak_ranks == pytest.approx(96.51956, rel=1e-4)
    raytracer = published("raytracer", "absolute", 6).fits["usl"]
    assert raytracer.parameters["sigma"] - 2.0150 * raytracer.covariance[1, 1] ** 0.5 == pytest.approx(
        0.00754, abs=1e-5
    )
    cisco = published("cisco", "absolute").fits["usl"]
    assert cisco.peak_ranks is not None and int(cisco.peak_ranks) == 35
    assert float(cisco.throughput(np.array([35.0]))[0]) == pytest.approx(12341, rel=2e-4)


def test_gustafson_1988() -> None:
    """Speed-ups on 1,024 processors; the article gives serial shares of 0.4 to 0.8 % for the three."""
    shares = [(1024 - speedup) / 1023 for speedup in (1021, 1020, 1016)]
    assert shares == pytest.approx([0.0029, 0.0039, 0.0078], abs=1e-4)
    for share in shares[1:]:
        weak = laws_of({n: n - share * (n - 1) for n in (1, 64, 256, 1024)}, "weak").fits["gustafson"]
        assert weak.parameters["serial_fraction"] == pytest.approx(share)
        assert fit_text(weak, "").endswith(". All points lie on it.")


def test_tensor_parallel_decode_of_gpt_fast() -> None:
    seven, seventy = published("gpt_fast_7b"), published("gpt_fast_70b")
    assert [point.value for point in seven.karp_flatt] == pytest.approx([0.243, 0.217, 0.222], abs=5e-4)
    assert seven.fits["amdahl"].parameters["serial_fraction"] == pytest.approx(0.219, abs=5e-4)
    assert seven.support.law == "amdahl" and "too few points to try" in seven.support.reason
    assert seventy.unit_ranks == 2 and [point.ranks for point in seventy.karp_flatt] == [4, 8]
    assert law_lines(seventy, "tokens/s")[-1] == "One unit of these laws is 2 ranks, the fewest that were measured."


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """A share of the simulation in docs/explanation/scaling-laws.md: 100 studies leave a standard error of 2.2 %."""
    truth = {"lambda": 100.0, "sigma": 0.05, "kappa": 0.001}
    noisy = coverage(Case("usl", truth, (1, 2, 4, 8, 16, 32), 5, block=0.03, point=0.01), 100)
    assert all(0.88 <= share <= 1 for share in noisy.values()), noisy
    amdahl = Case("amdahl", {"lambda": 100.0, "serial_fraction": 0.1}, (1, 2, 4, 8), 1)
    assert all(0.88 <= share <= 1 for share in coverage(amdahl, 100).values())


def test_refusals_say_why() -> None:
    three = laws_of(usl([1, 2, 4], 10, 0.1, 0.0))
    assert set(three.fits) == {"linear", "amdahl"} and set(three.refused) == {"gustafson", "usl"}
    assert three.refused["usl"] == "it fits 3 parameters and needs 5 or more numbers of ranks, not 3"
    assert three.refused["gustafson"].startswith("it is for work that grows")
    two = laws_of({1: 10.0, 2: 15.0})
    assert set(two.refused) == {"gustafson", "usl", "amdahl"} and len(two.karp_flatt) == 1
    assert two.support.law is None
    alone = laws_of({4: 10.0})
    assert set(alone.refused) == {"gustafson", "usl", "amdahl", "karp_flatt"} and alone.drawn is None
    weak = laws_of({1: 10.0, 2: 19.0, 4: 37.0}, "weak")
    assert set(weak.refused) == {"amdahl", "karp_flatt", "usl"} and set(weak.fits) == {"linear", "gustafson"}
    assert laws_of({}).refused["usl"] == "no point has a throughput"
    twice = fit_laws([MeasuredPoint(2, {0: 1.0}), MeasuredPoint(2, {0: 1.0})], "strong")
    assert twice.refused["amdahl"] == "several points have the same number of ranks"


def test_what_the_data_can_tell() -> None:
    noise = np.random.default_rng(7).normal(0, 0.01, 8)
    ranks = [1, 2, 4, 8, 16, 32, 64, 128]

    def choice(exact: dict[int, float], kind: LawKind = "strong", scale: float = 1.0) -> tuple[str | None, set[str]]:
        noisy = {n: value * np.exp(scale * rest) for (n, value), rest in zip(exact.items(), noise, strict=False)}
        found = laws_of(noisy, kind).support
        return found.law, set(found.among)

    assert choice(usl(ranks, 10, 0.05, 0.001)) == ("usl", {"usl"})
    assert choice(usl(ranks, 10, 0.05, 0.0), scale=0.5) == ("amdahl", {"amdahl"})
    assert choice(usl(ranks, 10, 0.0, 0.0)) == ("linear", {"linear"})
    assert choice({1: 10, 2: 25, 4: 30, 8: 90, 16: 110}, scale=0) == (None, {"linear", "amdahl", "usl"})
    assert choice(usl(ranks, 10, 0.0, 0.0), "weak") == ("linear", {"linear"})
    assert choice({n: 10 * n**1.1 for n in ranks[:5]}) == (None, set())
    assert choice({n: 10 * n**1.1 for n in ranks[:4]}, "weak") == (None, set())
    assert choice({n: n - 0.3 * (n - 1) for n in ranks}, "weak") == ("gustafson", {"gustafson"})
    assert choice(usl(ranks, 10, 0.05, 0.001), "weak") == ("usl", {"usl"})


def test_weak_scaling_that_falls_is_not_gustafsons() -> None:
    for falling in ({1: 100.0, 2: 80.0, 4: 60.0, 8: 40.0}, {1: 100.0, 2: 60.0, 4: 35.0}):
        found = laws_of(falling, "weak").support
        assert (found.law, found.among) == (None, ()) and found.reason.startswith("more ranks make it slower")
    flat = laws_of({1: 100.0, 2: 101.0, 4: 99.0, 8: 100.5}, "weak").support
    assert flat.law == "gustafson", "throughput that stays is Gustafson's law with a serial fraction of 1"


def test_strong_scaling_that_stays_flat_is_not_called_slower() -> None:
    flat = laws_of({1: 100.0, 2: 101.0, 4: 99.0, 8: 100.5}).support
    assert flat.law == "amdahl", "all of the work is serial"
    falling = laws_of({1: 100.0, 2: 80.0, 4: 60.0, 8: 40.0}).support
    assert (falling.law, falling.among) == (None, ()) and falling.reason.startswith("more ranks make it slower")


def test_weak_scaling_that_bends_is_not_linear() -> None:
    bent = laws_of(usl([1, 2, 4, 8, 16, 32], 100, 0.05, 0.001), "weak")
    assert not bent.fits["gustafson"].intervals["serial_fraction"][0], "which alone does not exclude linear scaling"
    assert bent.support.law == "usl"
    few = laws_of({1: 100.0, 2: 190.0, 4: 300.0, 8: 320.0, 16: 200.0}, "weak").support
    assert few.law is None and few.among == ("gustafson", "usl")
    assert few.reason == "linear is excluded, and 5 points are too few for AICc to compare these two"


def test_five_points_of_weak_scaling_say_that_aicc_cannot_compare_them() -> None:
    steep = laws_of({1: 100.0, 2: 90.0, 4: 79.0, 8: 70.0, 16: 60.0}, "weak")
    assert steep.fits["usl"].scatter < steep.fits["gustafson"].scatter / 10
    assert steep.support.law is None and steep.support.among == ("gustafson", "usl")
    noise = (1.003, 0.996, 1.004, 0.997, 1.001)
    plain = laws_of({n: (n - 0.3 * (n - 1)) * off for n, off in zip((1, 2, 4, 8, 16), noise, strict=True)}, "weak")
    assert plain.support.law == "gustafson"
    assert plain.support.reason == (
        "the interval of its serial fraction leaves out 0; 5 points are too few for AICc to compare it with the "
        "Universal Scalability Law"
    )


def test_a_parameter_at_its_bound_is_told() -> None:
    above = laws_of({n: 10.0 * n**1.1 for n in (1, 2, 4, 8)}).fits["amdahl"]
    assert above.at_bound == ("serial_fraction",) and above.parameters["serial_fraction"] == 0
    assert "serial fraction f 0 (0 to 0.0818), at the bound 0 of the law" in fit_text(above, "")
    slower = laws_of({1: 10.0, 2: 9.0, 4: 7.0, 8: 5.0})
    assert slower.fits["amdahl"].parameters["serial_fraction"] == 1
    assert slower.support.law is None and slower.support.reason.startswith("more ranks make it slower")
    falling = laws_of({1: 10.0, 2: 7.0, 4: 5.0, 8: 4.2, 16: 3.9}).fits["usl"]
    assert falling.parameters["sigma"] > 1 and falling.peak_ranks is None


def test_no_peak_where_kappa_is_zero() -> None:
    fit = laws_of({1: 10.0, 2: 17.0, 4: 28.0, 8: 44.0, 16: 64.0, 32: 100.0}).fits["usl"]
    assert fit.parameters["kappa"] == 0 and fit.peak_ranks is None and fit.at_bound == ("kappa",)
    low, high = fit.intervals["peak_ranks"]
    assert low is not None and low > 16 and high is None
    assert "; no peak (" in fit_text(fit, "tokens/s") and " or more)" in fit_text(fit, "tokens/s")


@pytest.mark.parametrize(("sigma", "kappa"), [(0.5, 2.0), (0.2, 0.9), (1.2, 0.0)])
def test_no_peak_lies_below_what_was_measured(sigma: float, kappa: float) -> None:
    """It was at half a rank where two ranks are slower than one; the law is of one unit and more."""
    fit = laws_of({2 * n: value for n, value in usl([1, 2, 4, 8, 16], 100, sigma, kappa).items()}).fits["usl"]
    assert fit.peak_ranks is None and fit.intervals["peak_ranks"] == (None, None)
    text = fit_text(fit, "tokens/s")
    assert "; throughput falls from 2 ranks on." in text and "peak" not in text


def test_equal_throughput_does_not_fall() -> None:
    fit = laws_of(dict.fromkeys((1, 2, 4, 8, 16), 100.0)).fits["usl"]
    assert fit.peak_ranks is None and "; no peak" in fit_text(fit, "tokens/s")


def test_the_interval_of_a_peak_begins_at_one_unit() -> None:
    values = {n: value * (1.02 if n == 2 else 0.99) for n, value in usl([1, 2, 4, 8, 16], 100, 0.5, 0.4).items()}
    low, high = laws_of(values).fits["usl"].intervals["peak_ranks"]
    assert low == 1 and high is not None and high > 1.2


def test_blocks_that_are_slow_as_a_whole_widen_lambda_only() -> None:
    exact, random = usl([1, 2, 4, 8, 16], 100, 0.05, 0.001), np.random.default_rng(5)
    slow = np.exp(random.normal(0, 0.1, 10))
    rest = np.exp(random.normal(0, 0.01, (5, 10)))

    def fitted(blocks: np.ndarray[tuple[int], np.dtype[np.float64]]) -> ScalingLaws:
        points = [
            MeasuredPoint(n, dict(enumerate((value * noise * blocks).tolist())))
            for (n, value), noise in zip(exact.items(), rest, strict=True)
        ]
        return fit_laws(points, "strong")

    def width(laws: ScalingLaws, name: str) -> float:
        low, high = laws.fits["usl"].intervals[name]
        assert low is not None and high is not None
        return high - low

    even, uneven = fitted(np.ones(10)), fitted(slow)
    assert width(uneven, "lambda") > 3 * width(even, "lambda")
    assert width(uneven, "sigma") < 2 * width(even, "sigma")
    # Pairs take out what a block shares, so the speed-ups are as exact as without it.
    last = [laws.points[-1].speedup for laws in (even, uneven)]
    assert last[0] is not None and last[1] is not None and last[0].value == pytest.approx(last[1].value, rel=1e-9)
    at = np.array([16.0])
    whole, relative = uneven.fits["usl"].band(at), uneven.fits["usl"].band(at, relative=True)
    assert whole[1] - whole[0] > 2 * (relative[1] - relative[0])


def test_serial_fraction_and_its_interval_turn_round_with_the_speedup() -> None:
    assert serial_fraction(1 / (0.2 + 0.8 / 4), 4) == pytest.approx(0.2)
    assert serial_fraction(4.5, 4) < 0 and serial_fraction(0.5, 4) > 1
    points = [MeasuredPoint(n, {r: s * (1 + 0.001 * (r * n % 7)) for r in range(8)}) for n, s in ((1, 1.0), (4, 2.5))]
    (fraction,) = fit_laws(points, "strong").karp_flatt
    assert fraction.interval is not None and fraction.interval[0] < fraction.value < fraction.interval[1]


def test_more_than_linear_is_decided_by_the_interval() -> None:
    clear, noise = Ratio(1.2, 1.1, 1.3, 8, (1.15, 1.25)), Ratio(1.02, 0.9, 1.1, 8, (0.95, 1.08))
    (text,) = more_than_linear([(2, Ratio(0.9, 0.9, 0.9, 1, None)), (8, clear)], "strong")
    assert text.startswith("The speed-up is more than linear at 8 (120 % of it, interval 115 to 125) ranks: the likely")
    assert "caches" in text
    assert more_than_linear([(8, noise)], "strong")[0].endswith("which may be noise.")
    (text,) = more_than_linear([(2, Ratio(1.1, 1.1, 1.1, 1, None)), (4, Ratio(1.2, 1.1, 1.3, 3, None))], "weak")
    assert "without an interval" in text and "look at clock speed" in text and "range 110 to 130" in text
    assert more_than_linear([(1, scaled(clear, 0.5))], "strong") == []


def test_residuals_in_runs() -> None:
    assert runs_chance([1, 1, 1, 1, -1, -1, -1, -1]) == pytest.approx(2 / 70)
    assert runs_chance([1, -1] * 4) == pytest.approx(1)
    assert runs_chance([1, 1, 1]) == 1
    assert runs_chance([-1, 1, 1, 1]) == pytest.approx(0.5)
    assert "its intervals are too short" in fit_text(published("cisco").fits["usl"], "")


def test_rounding_and_noise_are_no_speedup_beyond_linear() -> None:
    """2.1 / 0.7 is above 3 by a last bit only; and of ten repeats half are above linear, half below."""
    exact = fit_laws([MeasuredPoint(1, {0: 0.7}), MeasuredPoint(3, {0: 2.1})], "strong")
    assert 2.1 / 0.7 > 3 and [point.value for point in exact.karp_flatt] == [0.0]
    assert "Below 0" not in " ".join(law_lines(exact, "tokens/s"))
    off = [-0.02, 0.021, -0.01, 0.012, -0.005, 0.006, -0.015, 0.018, 0.001, -0.001]
    values = {block: 400 * (1.001 + share) for block, share in enumerate(off)}
    noisy = fit_laws([MeasuredPoint(1, dict.fromkeys(values, 100.0)), MeasuredPoint(4, values)], "strong")
    assert noisy.karp_flatt[0].value < 0
    told = " ".join(law_lines(noisy, "tokens/s"))
    assert "its interval reaches 0, so it may be noise" in told and "more than linear" not in told


def test_the_meaning_of_the_karp_flatt_series() -> None:
    def said(throughputs: dict[int, float]) -> str:
        return next(line for line in law_lines(laws_of(throughputs), "") if line.startswith("Karp-Flatt"))

    assert "It rises with the ranks: overhead" in said(usl([1, 2, 4, 8, 16], 10, 0.05, 0.001))
    assert "It is flat: a part that does not run in parallel" in said(usl([1, 2, 4, 8, 16], 10, 0.05, 0.0))
    assert "Below 0 it is no serial fraction" in said({1: 10, 2: 22, 4: 48})
    assert "rises, without intervals" in said(usl([1, 2, 4], 10, 0.05, 0.01))
    assert "0.0520 at 2, 0.0560 at 6, 0.0590 at 9" in said(usl(list(range(1, 10)), 10, 0.05, 0.001))
    rising = [
        MeasuredPoint(n, {r: v * (1 + 1e-4 * (r * n % 5)) for r in range(9)}) for n, v in ((1, 1), (2, 1.9), (4, 3))
    ]
    assert "It rises with the ranks" in law_lines(fit_laws(rising, "strong"), "")[1]


def test_a_serial_fraction_that_surely_falls_is_not_called_flat() -> None:
    """Of five points or more, which allow the Universal Scalability Law, only its kappa was looked at."""
    falling = [
        MeasuredPoint(n, {r: 100 * n**0.9 * (1 + 1e-4 * (r * n % 5)) for r in range(9)}) for n in (1, 2, 4, 8, 16)
    ]
    told = next(line for line in law_lines(fit_laws(falling, "strong"), "") if line.startswith("Karp-Flatt"))
    assert "It falls: a slow baseline" in told and "cannot be told" not in told and "It is flat" not in told


def test_points_where_more_changed() -> None:
    assert changed_text([(1, ()), (2, ())]) is None
    text = changed_text([(2, ("nodes 2 instead of 1", "dtype bfloat16 instead of float32"))])
    assert text is not None and text.startswith("Not only the ranks changed: 2 ranks (nodes 2 instead of 1 and dtype")


def test_serial_fractions_that_are_equal_neither_rise_nor_fall() -> None:
    flat = [MeasuredPoint(ranks, {0: 100.0 * ranks, 1: 100.0 * ranks}) for ranks in (1, 2, 4)]
    told = next(line for line in law_lines(fit_laws(flat, "strong"), "tokens/s") if line.startswith("Karp-Flatt"))
    assert told.endswith("0 at 2, 0 at 4. No part is seen that does not run in parallel.")
    serial = [MeasuredPoint(ranks, {0: 100.0 / (0.2 + 0.8 / ranks)}) for ranks in (1, 2, 4)]
    told = next(line for line in law_lines(fit_laws(serial, "strong"), "tokens/s") if line.startswith("Karp-Flatt"))
    assert told.endswith("0.200 at 2, 0.200 at 4. It is flat: a serial part, as far as so few repeats tell.")


def test_a_serial_fraction_above_1_is_explained() -> None:
    """Two nodes that do a hundredth of one had `serial fraction by ranks 199 at 2.` and no word more."""
    points = [MeasuredPoint(1, {0: 100.0, 1: 100.0}), MeasuredPoint(2, {0: 1.0, 1: 1.0})]
    told = next(line for line in law_lines(fit_laws(points, "strong"), "") if line.startswith("Karp-Flatt"))
    assert told.endswith("199 at 2. Above 1 it is no serial fraction: 2 ranks do less than 1 rank.")
    assert "Above 1" not in " ".join(law_lines(laws_of(usl([1, 2, 4, 8, 16], 10, 0.05, 0.001)), ""))


def test_linear_scaling_is_not_said_to_have_a_serial_part() -> None:
    found = laws_of({1: 10.0, 2: 20.1, 4: 39.9, 8: 80.3, 16: 159.8})
    [told] = [line for line in law_lines(found, "") if line.startswith("Karp-Flatt")]
    assert found.support.law == "linear" and "a part that does not run in parallel" not in told
    assert told.endswith("It does not rise: no overhead is seen that grows with the ranks.")
