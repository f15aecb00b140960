"""Least squares for one scaling law: parameters, profile intervals, residuals, and the band around its curve.

    fit = fit_law("usl", ranks, throughputs)
    fit.parameters, fit.intervals, fit.residuals, fit.throughput(np.array([64.0]))

Laws are in units: m = ranks / fewest measured ranks. `reports.laws.laws` chooses which laws to fit and says
what the formulas are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from configs.common.arrays import Floats
from reports.numbers.statistics import CONFIDENCE

OpenInterval = tuple[float | None, float | None]
"""Lower and upper end; None where the data set no bound on that side."""

ResidualKind = Literal["relative", "absolute"]
"""What is made small: log(law / measured), or law - measured as most other tools do."""

EXACT = 1e-9
"""Relative scatter below which points count as lying on the law: what rounding of the arithmetic leaves."""


_EDGE = 1e-6
"""A peak at one unit, which rounding of a fit may put below it."""


class Shared(NamedTuple):
    """What all points of a block share: its part in the variance of log lambda, and the number of blocks."""

    variance: float = 0.0
    blocks: int = 1


@dataclass(frozen=True)
class Shape:
    """The speed-up S(m) of a law: names and upper bounds of its parameters (all 0 or more), log S and its gradient."""

    parameters: tuple[str, ...]
    most: tuple[float, ...]
    log_speedup: Callable[[Floats, Floats], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Fit:
    """One law fitted. `parameters` has `lambda`, the throughput of one unit, and those of the law.

    `residuals` are measured / fitted - 1 by ranks; `at_bound` names parameters that stand at the end of
    what the law allows, so that the law would like to go further.
    """

    law: str
    unit_ranks: int
    parameters: Mapping[str, float]
    intervals: Mapping[str, OpenInterval]
    at_bound: tuple[str, ...]
    residuals: Mapping[int, float]
    squares: float
    freedom: int
    covariance: Floats
    shared: Shared
    peak_ranks: float | None = None
    """Where the USL's throughput is greatest; None where kappa is 0, or throughput falls from the first unit on."""

    def throughput(self, ranks: Floats) -> Floats:
        """The law at so many ranks."""
        return np.exp(self._log(ranks)[0])

    def band(self, ranks: Floats, relative: bool = False) -> tuple[Floats, Floats]:
        """95 % interval of the law's throughput at each number of ranks, one at a time (delta method, of logs).

        `relative`: without what all points of a block share, for figures that are relative to one of them.
        """
        value, gradient = self._log(ranks)
        variance = np.einsum("ij,jk,ik->i", gradient, self.covariance, gradient).clip(0)
        half = student(self.freedom) * np.sqrt(variance)
        if not relative and self.shared.variance:
            half = np.hypot(half, student(self.shared.blocks - 1) * np.sqrt(self.shared.variance))
        return np.exp(value - half), np.exp(value + half)

    @property
    def falls(self) -> bool:
        """Whether throughput of the USL falls from the first unit on; by more than rounding, as it may also be flat."""
        return self.law == "usl" and self.parameters["sigma"] + self.parameters["kappa"] > 1 + _EDGE

    @property
    def scatter(self) -> float:
        """Standard deviation of the points about the law, relative."""
        return sqrt(self.squares / self.freedom)

    def _log(self, ranks: Floats) -> tuple[Floats, Floats]:
        shape = SHAPES[self.law]
        units = np.asarray(ranks, dtype=np.float64) / self.unit_ranks
        values = np.array([self.parameters[name] for name in shape.parameters])
        grown, gradient = shape.log_speedup(units, values)
        return log(self.parameters["lambda"]) + grown, np.column_stack([np.ones_like(units), gradient])


def _linear(units: Floats, values: Floats) -> tuple[Floats, Floats]:
    return np.log(units), np.empty((len(units), 0))


def _amdahl(units: Floats, values: Floats) -> tuple[Floats, Floats]:
    slowed = 1 + values[0] * (units - 1)
    return np.log(units / slowed), (-(units - 1) / slowed)[:, None]


def _gustafson(units: Floats, values: Floats) -> tuple[Floats, Floats]:
    speedup = units - values[0] * (units - 1)
    return np.log(speedup), (-(units - 1) / speedup)[:, None]


def _usl(units: Floats, values: Floats) -> tuple[Floats, Floats]:
    grown = np.column_stack([units - 1, units * (units - 1)])
    slowed = 1 + grown @ values
    return np.log(units / slowed), -grown / slowed[:, None]


def _usl_by_peak(units: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The USL in sigma and kappa / (1 - sigma), which is 1 / (units at the peak)^2."""
    sigma, inverse = values
    logs, gradient = _usl(units, np.array([sigma, (1 - sigma) * inverse]))
    return logs, np.column_stack([gradient[:, 0] - inverse * gradient[:, 1], (1 - sigma) * gradient[:, 1]])


SHAPES = {
    "linear": Shape((), (), _linear),
    "amdahl": Shape(("serial_fraction",), (1.0,), _amdahl),
    "gustafson": Shape(("serial_fraction",), (1.0,), _gustafson),
    "usl": Shape(("sigma", "kappa"), (inf, inf), _usl),
}
_BY_PEAK = Shape(("sigma", "inverse"), (1.0, inf), _usl_by_peak)


def fit_law(
    law: str,
    ranks: Sequence[int],
    throughputs: Floats,
    shared: Shared = Shared(),  # noqa: B008  (immutable)
    residuals: ResidualKind = "relative",
) -> Fit:
    """Fit one law to a throughput above 0 for each number of ranks, in their order; the first is the unit."""
    shape = SHAPES[law]
    units = np.array(ranks) / ranks[0]
    problem = _Problem(shape, units, throughputs, residuals)
    freedom = len(units) - 1 - len(shape.parameters)
    best, squares = problem.solve()
    squares = max(squares, freedom * EXACT**2)
    covariance = problem.covariance(best, squares / freedom)
    names = ("lambda", *shape.parameters)
    values = {name: float(value) for name, value in zip(names, (exp(best[0]), *best[1:]), strict=True)}
    intervals: dict[str, OpenInterval] = {"lambda": _level_interval(best[0], covariance[0, 0], freedom, shared)}
    for index, name in enumerate(shape.parameters, 1):
        intervals[name] = problem.profile(index, best, squares, freedom)
    peak = None
    if law == "usl":
        peak, intervals["peak_ranks"] = _peak(problem, best, squares, freedom, ranks[0])
    off = throughputs / np.exp(problem.log_law(best)) - 1
    bounds = zip(shape.parameters, best[1:], shape.most, strict=True)
    at_bound = tuple(name for name, value, most in bounds if value in (0.0, most))
    by_ranks = {n: float(rest) for n, rest in zip(ranks, off, strict=True)}
    return Fit(law, ranks[0], values, intervals, at_bound, by_ranks, squares, freedom, covariance, shared, peak)


def _peak(
    problem: "_Problem", best: Floats, squares: float, freedom: int, unit: int
) -> tuple[float | None, OpenInterval]:
    """Ranks of the USL's greatest throughput, sqrt((1 - sigma) / kappa) units; None where there is none.

    Below one unit, where that is for sigma + kappa above 1, nothing is measured: throughput falls from there on.
    """
    _, sigma, kappa = best
    if sigma >= 1 or sigma + kappa > 1 + _EDGE:
        return None, (None, None)
    again = _Problem(_BY_PEAK, problem.units, problem.throughputs, problem.residuals)
    low, high = again.profile(2, np.array([best[0], sigma, kappa / (1 - sigma)]), squares, freedom)
    bounds = (max(float(unit), unit / sqrt(high)) if high else None, unit / sqrt(low) if low else None)
    return (unit * sqrt((1 - sigma) / kappa) if kappa > 0 else None), bounds


def _level_interval(level: float, variance: float, freedom: int, shared: Shared) -> OpenInterval:
    """Interval of lambda: that of the fit, and what all points of a block share (Welch and Satterthwaite)."""
    total = variance + shared.variance
    degrees = total**2 / (variance**2 / freedom + shared.variance**2 / max(1, shared.blocks - 1))
    half = student(degrees) * sqrt(total)
    return exp(level - half), exp(level + half) if half + level < 700 else None


def student(freedom: float) -> float:
    """Quantile of Student's t for a two-sided interval."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


class _Problem:
    """Least squares: parameters are log lambda and those of the shape, in that order."""

    def __init__(self, shape: Shape, units: Floats, throughputs: Floats, residuals: ResidualKind) -> None:
        self.shape, self.units, self.throughputs, self.residuals = shape, units, throughputs, residuals
        self.logs = np.log(throughputs)
        self.middle = float(throughputs.mean())
        self.least = np.array([-inf, *(0.0 for _ in shape.most)])
        self.most = np.array([inf, *shape.most])

    def log_law(self, values: Floats) -> Floats:
        """Log of the law's throughput at each point."""
        return np.asarray(values[0] + self.shape.log_speedup(self.units, values[1:])[0])

    def rest(self, values: Floats) -> Floats:
        """What is made small, at each point; absolute residuals as shares of the mean throughput."""
        logs = self.log_law(values)
        return logs - self.logs if self.residuals == "relative" else (np.exp(logs) - self.throughputs) / self.middle

    def gradient(self, values: Floats) -> Floats:
        """Of `rest`, by parameter."""
        slopes = self.shape.log_speedup(self.units, values[1:])[1]
        gradient = np.column_stack([np.ones_like(self.units), slopes])
        if self.residuals == "absolute":
            gradient *= (np.exp(self.log_law(values)) / self.middle)[:, None]
        return gradient

    def covariance(self, values: Floats, variance: float) -> Floats:
        gradient = self.gradient(values)
        # In units of their own: of thousands of ranks kappa's column is 1e8 times lambda's, which `pinv` takes for 0.
        sizes = np.maximum(np.abs(gradient).max(axis=0), 1e-300)
        gradient = gradient / sizes
        return np.asarray(variance * np.linalg.pinv(gradient.T @ gradient) / sizes / sizes[:, None])

    def solve(self, start: Floats | None = None, index: int | None = None) -> tuple[Floats, float]:
        """The best parameters and their sum of squares; parameter `index` is held where it starts."""
        from scipy.optimize import least_squares

        values = self._start() if start is None else start.copy()
        free = [position for position in range(len(values)) if position != index]

        def whole(part: Floats) -> Floats:
            values[free] = part
            return values

        def rest(part: Floats) -> Floats:
            return self.rest(whole(part))

        def gradient(part: Floats) -> Floats:
            return self.gradient(whole(part))[:, free]

        steepest = np.abs(self.gradient(values)).max(axis=0)[free]
        found: Any = least_squares(
            rest,
            np.clip(values[free], self.least[free], self.most[free]),
            gradient,
            bounds=(self.least[free], self.most[free]),
            method="dogbox",  # ends on a bound exactly where the best lies there
            x_scale=1 / np.maximum(steepest, 1e-12),
            ftol=1e-13,
            xtol=1e-13,
            gtol=1e-13,
            max_nfev=200,
        )
        return whole(found.x).copy(), float(2 * found.cost)

    def _start(self) -> Floats:
        """From the law turned round: units / throughput is linear in the parameters of all laws but Gustafson's."""
        from scipy.optimize import nnls

        m, count = self.units, len(self.shape.parameters)
        scaled_logs = self.logs - self.logs[0]
        if self.shape.log_speedup is _gustafson:
            weights = np.exp(-scaled_logs)
            (slope, level), _ = nnls(np.column_stack([m, np.ones_like(m)]) * weights[:, None], np.ones_like(m))
            share = level / (slope + level) if slope + level > 0 else 0.5
            return np.array([self.logs[0], min(share, 0.999)])
        columns = np.column_stack([np.ones_like(m), m - 1, m * (m - 1)])[:, : count + 1]
        found, _ = nnls(columns * (np.exp(scaled_logs) / m)[:, None], np.ones_like(m))
        first = max(found[0], 1e-6 * float(np.max(found)), 1e-12)
        return np.array([self.logs[0] - log(first), *np.minimum(found[1:] / first, self.most[1:])])

    def profile(self, index: int, best: Floats, squares: float, freedom: int) -> OpenInterval:
        """Values of a parameter with which the law still fits: sum of squares up to best x (1 + t^2 / freedom)."""
        limit = squares * (1 + student(freedom) ** 2 / freedom)
        error = sqrt(max(float(self.covariance(best, squares / freedom)[index, index]), 0.0))
        step = student(freedom) * error or EXACT
        return (
            self._end(index, best, squares, limit, -step, float(self.least[index])),
            self._end(index, best, squares, limit, step, float(self.most[index])),
        )

    def _end(self, index: int, best: Floats, squares: float, limit: float, step: float, bound: float) -> float | None:
        """Where the sum of squares reaches the limit on one side, the bound where it does not, None for infinity."""
        from scipy.optimize import brentq

        held = best.copy()

        def excess(value: float) -> float:
            held[index] = value
            found, rest = self.solve(held, index)
            held[:] = found
            return rest - limit

        inner, outer = float(best[index]), float(best[index])
        # Found once and kept: from another start a solution may end a last bit higher, on the limit's other side.
        known = {inner: squares - limit}
        for _ in range(60):
            outer = best[index] + step
            if (outer - bound) * step >= 0:
                outer = bound
            known[outer] = excess(outer)
            if known[outer] > 0:
                break
            if outer == bound:
                return bound
            inner, step = outer, step * 2
        else:
            return None
        if inner == outer:
            return inner

        def kept(value: float) -> float:
            return known[value] if value in known else excess(value)

        return float(brentq(kept, inner, outer, xtol=abs(outer - inner) * 1e-6, rtol=1e-9))
