"""Text on scaling laws: parameters with intervals, their interpretation, and deviating points.

law_lines(found, "tokens/s")        # one line for each law, then which one the data support
more_than_linear([(8, efficiency)], "strong")
"""

from collections.abc import Sequence
from itertools import pairwise
from math import comb

from reports.laws.fit import EXACT, Fit, OpenInterval
from reports.laws.laws import ASKED, TITLES, LawKind, ScalingLaws
from reports.numbers.statistics import CONFIDENCE, LEAST_REPEATS, ROUNDING, Ratio, min_repeats
from reports.text import joined, number, percent, plural

SURPRISE = 0.01
"""Chance of so few runs of residuals below which the points are said not to scatter independently."""

MOST_FRACTIONS = 6

SYMBOLS = {"serial_fraction": "serial fraction f"}
CAUSES = {
    "strong": "the likely cause is capacity: a rank's share of the work is smaller, so more of it stays in caches "
    "or in memory; look there before believing it",
    "weak": "a rank's work is the same, so caches do not explain it; look at clock speed, at what ran beside the "
    "baseline, and at the measuring itself",
}
"""Kind of scaling -> what makes a speed-up more than linear."""


def law_lines(laws: ScalingLaws, unit: str, every: bool = True) -> list[str]:
    """One line for each law, Karp-Flatt, and which law the data support; without `every`, no laws of the other kind."""
    lines = [f"{TITLES[name]}: {fit_text(fit, unit)}" for name, fit in laws.fits.items() if name != "linear"]
    if laws.karp_flatt:
        lines.append(f"{TITLES['karp_flatt']}: {_trend(laws)}")
    refused = {name: why for name, why in laws.refused.items() if every or name in ASKED[laws.kind]}
    lines += [f"{TITLES[name]}: not fitted; {why}." for name, why in refused.items()]
    if len(laws.fits) > 1:
        lines.append(support_text(laws))
    if laws.unit_ranks > 1 and (laws.fits or laws.karp_flatt):
        lines.append(f"One unit of these laws is {laws.unit_ranks} ranks, the fewest that were measured.")
    return lines


def support_text(laws: ScalingLaws) -> str:
    """Which law the data support, and why."""
    found = laws.support
    if found.law is not None:
        return f"The data support {_in_sentence(found.law)}: {found.reason}."
    if not found.among:
        return f"The data support none of these laws: {found.reason}."
    return f"The data cannot tell between {joined(_in_sentence(name) for name in found.among)}: {found.reason}."


def fit_text(fit: Fit, unit: str) -> str:
    """Parameters with their 95 % intervals, what follows from them, and how far the points lie off the law."""
    parts = []
    for name, value in fit.parameters.items():
        bound = f", at the bound {number(value)} of the law" if name in fit.at_bound else ""
        suffix = f" {unit}" if name == "lambda" and unit else ""
        parts.append(f"{SYMBOLS.get(name, name)} {number(value)}{suffix}{_interval(fit.intervals[name])}{bound}")
    text = ", ".join(parts)
    serial = fit.parameters.get("serial_fraction", 0.0)
    if fit.law == "amdahl" and serial > 0:
        low, high = (1 / end if end else None for end in fit.intervals["serial_fraction"][::-1])
        text += f"; at most {number(1 / serial)} times one unit{_interval((low, high))}"
    if fit.law == "usl":
        peak = fit.peak_ranks
        none = f"; throughput falls from {plural(fit.unit_ranks, 'rank')} on" if fit.falls else "; no peak"
        text += none if peak is None else f"; peak at {number(peak)} ranks"
        text += _interval(fit.intervals["peak_ranks"])
        text += ", beyond what was measured" if peak is not None and peak > max(fit.residuals) else ""
    worst = max(fit.residuals, key=lambda ranks: abs(fit.residuals[ranks]))
    if fit.scatter < 2 * EXACT:  # which stands for none
        return f"{text}. All points lie on it."
    text += f". Points scatter {percent(fit.scatter, 2)} about it"
    text += f", at most {percent(fit.residuals[worst], 2)} ({plural(worst, 'rank')})."
    if runs_chance(list(fit.residuals.values())) < SURPRISE:
        text += " They lie above and below it in runs: the law misses something, and its intervals are too short."
    return text


def runs_chance(residuals: Sequence[float]) -> float:
    """Chance of as few or fewer runs of one sign among points that scatter independently.

    A. Wald and J. Wolfowitz, Ann. Math. Statist. 11 (1940) 147-162.
    """
    signs = [rest > 0 for rest in residuals]
    above, below = sum(signs), len(signs) - sum(signs)
    if not above or not below:
        return 1.0
    runs = 1 + sum(one != two for one, two in pairwise(signs))
    ways = 0
    for count in range(2, runs + 1):
        half, odd = divmod(count, 2)
        first, second = comb(above - 1, half - 1), comb(below - 1, half - 1)
        ways += comb(above - 1, half) * second + first * comb(below - 1, half) if odd else 2 * first * second
    return ways / comb(len(signs), above)


def residuals_text(fit: Fit) -> str:
    """Measured over fitted, less 1, by ranks."""
    return ", ".join(f"{ranks}: {100 * rest:+.1f} %" for ranks, rest in fit.residuals.items())


def more_than_linear(
    points: Sequence[tuple[int, Ratio | None]], kind: LawKind, paired: bool = True, confidence: float = CONFIDENCE
) -> list[str]:
    """Sentences about the points (ranks, efficiency) above linear; their intervals decide what is said.

    paired, confidence: how the ratios were made, so how many repeats an interval takes.
    """
    above = [(ranks, ratio) for ranks, ratio in points if ratio is not None and ratio.value > 1 + ROUNDING]
    shown = [(ranks, ratio) for ranks, ratio in above if ratio.interval is not None and ratio.is_above(1)]
    bare = [(ranks, ratio) for ranks, ratio in above if ratio.interval is None]
    noise = [(ranks, ratio) for ranks, ratio in above if ratio.interval is not None and not ratio.is_above(1)]
    lines = []
    if shown:
        lines.append(f"{_above(shown)}: {CAUSES[kind]}.")
    if bare:
        compared = max(ratio.comparisons for _, ratio in bare)
        needed = min_repeats(compared, confidence) if paired else LEAST_REPEATS
        lines.append(
            f"{_above(bare)}; without an interval ({needed} or more repeats give one) that may be noise. "
            f"If it is real, {CAUSES[kind]}."
        )
    if noise:
        lines.append(f"{_above(noise)}, which may be noise.")
    return lines


def _above(points: Sequence[tuple[int, Ratio]]) -> str:
    said = []
    for ranks, ratio in points:
        low, high = ratio.bounds
        kind = "range" if ratio.interval is None else "interval"
        bounds = "" if ratio.count == 1 else f", {kind} {number(100 * low)} to {number(100 * high)}"
        said.append(f"{ranks} ({percent(ratio.value)} of it{bounds})")
    return f"The speed-up is more than linear at {joined(said)} ranks"


def changed_text(points: Sequence[tuple[int, tuple[str, ...]]]) -> str | None:
    """Points (ranks, what else changed) that are no pure scaling; None where there is none."""
    marked = [f"{plural(ranks, 'rank')} ({joined(changed)})" for ranks, changed in points if changed]
    if not marked:
        return None
    return f"Not only the ranks changed: {'; '.join(marked)}. Speed-ups and laws there hold that change too."


_SUPPORTED: dict[str | None, str] = {
    "linear": "It does not rise: no overhead is seen that grows with the ranks.",
    "amdahl": "It is flat: a part that does not run in parallel, not overhead that grows with the ranks.",
}
_UNDECIDED = "Whether it rises (overhead that grows) or is flat (a serial part) cannot be told."
"""What the series means by the law that the data support, without overhead that surely grows."""


def _trend(laws: ScalingLaws) -> str:
    """What the series of Karp and Flatt's serial fractions means."""
    series = laws.karp_flatt
    shown = series if len(series) <= MOST_FRACTIONS else (series[0], series[len(series) // 2], series[-1])
    said = ", ".join(f"{number(point.value)} at {point.ranks}" for point in shown)
    text = f"serial fraction by ranks {said}."
    if series[-1].value < 0:
        if series[-1].interval and series[-1].interval[1] >= 0:
            return f"{text} Below 0 it is no serial fraction; its interval reaches 0, so it may be noise."
        return f"{text} Below 0 it is no serial fraction: the speed-up is more than linear."
    if series[-1].value > 1 and not (series[-1].interval and series[-1].interval[0] <= 1):
        fewest = plural(laws.unit_ranks, "rank")
        text += f" Above 1 it is no serial fraction: {series[-1].ranks:,} ranks do less than {fewest}."
    if all(abs(point.value) <= ROUNDING for point in series):
        return f"{text} No part is seen that does not run in parallel."
    if len(series) < 2:
        return text
    rising = "It rises with the ranks: overhead that grows with them, such as communication"
    usl = laws.fits.get("usl")
    if usl is not None and usl.intervals["kappa"][0]:
        return f"{text} {rising} (kappa above 0)."
    first, last = series[0], series[-1]
    if first.interval and last.interval and last.interval[1] < first.interval[0]:
        return f"{text} It falls: a slow baseline, or more room in caches as the share of a rank shrinks."
    if usl is not None:
        return f"{text} {_SUPPORTED.get(laws.support.law, _UNDECIDED)}"
    if first.interval and last.interval:
        if last.interval[0] > first.interval[1]:
            return f"{text} {rising}."
        return f"{text} Its intervals overlap: flat (a serial part) within noise, or too few repeats to see it rise."
    if abs(last.value - first.value) <= ROUNDING:
        return f"{text} It is flat: a serial part, as far as so few repeats tell."
    way = "rises" if last.value > first.value else "falls"
    return f"{text} It {way}, without intervals to tell that from noise; rising means overhead, flat a serial part."


def _in_sentence(law: str) -> str:
    return {
        "linear": "linear scaling",
        "amdahl": "Amdahl's law",
        "gustafson": "Gustafson's law",
        "usl": "the Universal Scalability Law",
    }[law]


def _interval(bounds: OpenInterval) -> str:
    low, high = bounds
    if low is None and high is None:
        return ""
    if high is None:
        return f" ({number(low)} or more)"
    return f" (up to {number(high)})" if low is None else f" ({number(low)} to {number(high)})"
