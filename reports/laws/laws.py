"""Scaling laws fitted to throughput over ranks, each with intervals and residuals.

    found = fit_laws(points, "strong")          # points: MeasuredPoint(ranks, throughput by repeat)
    found.fits["usl"].parameters                # {"lambda": ..., "sigma": ..., "kappa": ...}
    found.refused                               # law -> why it was not fitted
    found.support.law                           # which law the data support; None: cannot tell

With m = ranks / ranks of the smallest point (the unit, so that m = 1 there even where it has several
ranks) and lambda the throughput of one unit, which is fitted as well, throughput is lambda x S(m):

- linear                          S = m
- Amdahl 1967                     S = 1 / (f + (1 - f) / m)
- Gustafson 1988                  S = m - f (m - 1)
- Universal Scalability Law       S = m / (1 + sigma (m - 1) + kappa m (m - 1))   (Gunther 2007)
- Karp and Flatt 1990             f of each point by itself = (1/S - 1/m) / (1 - 1/m)

Least squares of log(measured / law), because noise of throughput is relative; a point is the median of
its repeats, less what whole blocks share. Intervals are 95 % profile likelihood intervals with
Student's t, where the residuals of the points about the law are the noise: points - parameters degrees
of freedom. Repeats do not make them narrower by themselves, because they average noise, but not how far
each number of ranks lies off any simple law: docs/explanation/scaling-laws.md has what else was tried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log, nan, pi
from typing import Literal

import numpy as np

from configs.common.arrays import Floats
from reports.laws.choice import Support, support
from reports.laws.fit import SHAPES, Fit, ResidualKind, Shared, fit_law
from reports.numbers.statistics import (
    CONFIDENCE,
    ROUNDING,
    Bounds,
    Estimate,
    Ratio,
    estimate,
    paired_ratio,
    unpaired_ratio,
)

LawKind = Literal["strong", "weak"]

TITLES = {
    "linear": "linear",
    "amdahl": "Amdahl",
    "gustafson": "Gustafson",
    "usl": "Universal Scalability Law",
    "karp_flatt": "Karp-Flatt",
}
ASKED: dict[LawKind, tuple[str, ...]] = {"strong": ("amdahl", "usl", "karp_flatt"), "weak": ("gustafson", "usl")}
"""Laws for each kind of scaling: Amdahl's is for a fixed total of work, Gustafson's for work that grows."""

ROUNDS = 8
"""Of taking out blocks and points in turn; two or three change anything."""

LEAST_POINTS = {"linear": 2, "amdahl": 3, "gustafson": 3, "usl": 5}
"""Different numbers of ranks a law needs: one more than it has parameters, for the USL two."""


@dataclass(frozen=True)
class MeasuredPoint:
    """Throughput of one number of ranks by repeat, above 0, and what else differs from the baseline."""

    ranks: int
    values: Mapping[int, float]
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpeedupPoint:
    """One number of ranks against the unit; efficiency is speed-up over growth in ranks."""

    ranks: int
    throughput: Estimate
    speedup: Ratio | None
    efficiency: Ratio | None
    changed: tuple[str, ...]


@dataclass(frozen=True)
class SerialFraction:
    """Karp and Flatt's experimentally determined serial fraction at one number of ranks.

    The interval is that of the speed-up there, corrected for the number of points; None where that has none.
    """

    ranks: int
    value: float
    interval: Bounds | None


@dataclass(frozen=True)
class ScalingLaws:
    """All laws of one set of points."""

    kind: LawKind
    unit_ranks: int
    points: tuple[SpeedupPoint, ...]
    fits: Mapping[str, Fit]
    karp_flatt: tuple[SerialFraction, ...]
    refused: Mapping[str, str]

    @cached_property
    def support(self) -> Support:
        """Which law the data support."""
        return support(self.fits, self.points[-1].ranks / self.unit_ranks if self.points else 1.0)

    @property
    def drawn(self) -> Fit | None:
        """The law to draw through the points: the supported one, else the simplest that may be right."""
        wanted = [self.support.law] if self.support.law else self.support.among
        return next((self.fits[name] for name in wanted if name in self.fits), None)


def fit_laws(
    points: Sequence[MeasuredPoint],
    kind: LawKind,
    paired: bool = True,
    confidence: float = CONFIDENCE,
    residuals: ResidualKind = "relative",
) -> ScalingLaws:
    """Fit every law that these points allow; the others are refused with the reason.

    Repeats of the same number belong to one block where `paired` (`statistics.paired_ratio`). Points
    without a value are left out. `confidence` is that of the speed-ups' intervals.
    """
    known = sorted((point for point in points if point.values), key=lambda point: point.ranks)
    ranks = [point.ranks for point in known]
    if not known or len(set(ranks)) < len(ranks):
        why = "several points have the same number of ranks" if known else "no point has a throughput"
        return ScalingLaws(kind, 1, (), {}, (), dict.fromkeys(ASKED[kind], why))
    unit = known[0].ranks
    speedups = _speedups(known, paired, confidence)
    refused = dict(_refusals(kind, len(known)))
    centres, shared = centres_of(known, paired)
    fits = {
        law: fit_law(law, ranks, centres, shared, residuals)
        for law in ("linear", *ASKED[kind])
        if law in SHAPES and law not in refused and len(known) >= LEAST_POINTS[law]
    }
    fractions = () if "karp_flatt" in refused else tuple(_serial_fractions(speedups, unit))
    return ScalingLaws(kind, unit, speedups, fits, fractions, refused)


def serial_fraction(speedup: float, units: float) -> float:
    """Karp and Flatt's metric; above 1 for a slow-down, below 0 for more than linear. `units` is above 1.

    Just 0 where only rounding tells the speed-up from linear.
    A. H. Karp and H. P. Flatt, "Measuring parallel processor performance", CACM 33 (1990) 539-543.
    """
    if abs(speedup / units - 1) <= ROUNDING:
        return 0.0
    return (1 / speedup - 1 / units) / (1 - 1 / units)


def scaled(ratio: Ratio, factor: float) -> Ratio:
    """The ratio times a factor above 0."""
    interval = None if ratio.interval is None else (ratio.interval[0] * factor, ratio.interval[1] * factor)
    low, high = ratio.low * factor, ratio.high * factor
    return Ratio(ratio.value * factor, low, high, ratio.count, interval, ratio.comparisons)


def _refusals(kind: LawKind, count: int) -> list[tuple[str, str]]:
    refused = []
    if kind == "strong":
        refused.append(("gustafson", "it is for work that grows with the ranks (weak scaling); here it is fixed"))
    else:
        why = "it is for a fixed total of work (strong scaling); here the work grows with the ranks"
        refused += [("amdahl", why), ("karp_flatt", why)]
    for law in ASKED[kind]:
        if law in LEAST_POINTS and count < LEAST_POINTS[law]:
            parameters = 1 + len(SHAPES[law].parameters)
            why = f"it fits {parameters} parameters and needs {LEAST_POINTS[law]} or more numbers of ranks, not {count}"
            refused.append((law, why))
    if kind == "strong" and count < 2:
        refused.append(("karp_flatt", "it needs a point with more ranks than the first"))
    return refused


def _speedups(known: Sequence[MeasuredPoint], paired: bool, confidence: float) -> tuple[SpeedupPoint, ...]:
    base, compared = known[0], max(1, len(known) - 1)
    single = all(len(point.values) == 1 for point in known)
    found = []
    for point in known:
        if paired or single or point is base:
            ratio = paired_ratio(point.values, base.values, compared, confidence)
        else:
            ours, theirs = list(point.values.values()), list(base.values.values())
            ratio = unpaired_ratio(ours, theirs, compared, confidence)
        value = estimate(point.values.values(), confidence)
        assert value is not None
        efficiency = None if ratio is None else scaled(ratio, base.ranks / point.ranks)
        found.append(SpeedupPoint(point.ranks, value, ratio, efficiency, point.changed))
    return tuple(found)


def _serial_fractions(points: Sequence[SpeedupPoint], unit: int) -> list[SerialFraction]:
    found = []
    for point in points[1:]:
        if point.speedup is not None:
            units, interval = point.ranks / unit, point.speedup.interval
            bounds = (
                None if interval is None else (serial_fraction(interval[1], units), serial_fraction(interval[0], units))
            )
            found.append(SerialFraction(point.ranks, serial_fraction(point.speedup.value, units), bounds))
    return found


def centres_of(known: Sequence[MeasuredPoint], paired: bool) -> tuple[Floats, Shared]:
    """Throughput of each point with what its blocks share taken out, and the variance of what all blocks share.

    A slow block moves all its points alike: log value = point + block + noise. Blocks are means over their
    points and points medians over their blocks, in turn, so that one stray value moves little.
    """
    logs = [{block: log(value) for block, value in point.values.items()} for point in known]
    centres = np.array([float(np.median(list(values.values()))) for values in logs])
    blocks = sorted(set[int]().union(*logs))
    if not paired or len(known) < 2 or len(blocks) < 2:
        return np.exp(centres), Shared()
    off = np.array([[values.get(block, nan) for block in blocks] for values in logs])
    levels = np.zeros(len(blocks))
    for _ in range(ROUNDS):
        levels = np.nanmean(off - centres[:, None], axis=0)
        levels -= np.median(levels)
        centres = np.nanmedian(off - levels, axis=1)
    return np.exp(centres), _shared(off - centres[:, None], levels)


def _shared(off: Floats, levels: Floats) -> Shared:
    """Variance of the median of the blocks' levels: theirs, less what the scatter within them explains.

    A median varies up to pi / 2 as much as a mean, less for few blocks.
    """
    blocks = len(levels)
    rest = off - levels
    freedom = int(np.isfinite(rest).sum()) - sum(rest.shape) + 1
    within = float(np.nansum(rest**2)) / freedom if freedom > 0 else 0.0
    between = max(0.0, float(levels.var(ddof=1)) - within / len(off))
    return Shared(pi / 2 * between / (blocks + pi / 2 - 1), blocks)
