"""Forecast step time and efficiency on more ranks than were measured, from measured compute and the interconnect.

    found = forecast(points, "weak", traffic, measured=machine, over=machine, to=4096)
    found.points[-1].efficiency, found.points[-1].efficiency_interval, found.half, found.check

The model of a step is

    s + c w(n) (1 + k f(n)) (1 + q J(n)) + a A(n) + b B(n)

with n ranks; w(n) the work of a rank relative to the fewest ranks measured (1 in weak scaling). Terms:

- c compute of a rank, s the part that more ranks do not shorten (strong scaling only);
- k slowdown by neighbours in a node (memory, caches, clock); f(n) grows to 1 with the node full, then stays;
- q scatter of a rank's time; J(n) the mean of the largest of n normal values (G. Blom, 1958), so that q J(n) is the
  time added by the slowest of n ranks. Used only if records contain waiting times, and fitted to them;
- A(n), B(n) latency and transfer of the traffic over the stated links by the alpha-beta model
  (`timing.collectives`), a and b the real multiple of them (software, contention, overlap with compute).

c is free. The others have a broad prior in logarithms (PRIORS), without which two or three world sizes could not
separate them; more world sizes outweigh it. Each world size deviates from any such law by OFF_THE_LAW, or more if the
fit shows it. Intervals are 95 % prediction intervals of a measurement: the fit is repeated with noise drawn for
measurements, world sizes and priors (a parametric bootstrap; "randomize-then-optimize", Bardsley et al., SIAM J. Sci.
Comput. 36, 2014). Over links that were not measured, a and b get additional uncertainty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import pi, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np

from configs.common.arrays import Floats
from configs.hardware.hardware import Machine
from engine.planner.forecasting.traffic import Traffic, joined_alike, latency_and_transfer

Interval = tuple[float, float]
ScalingKind = Literal["strong", "weak"]
MOST_RANKS = 4096
HALF = 0.5
LEAST_FOR_A_CHECK = 3

PRIORS: Mapping[str, tuple[float, float]] = {
    "fixed": (0.01, 1.5),
    "neighbours": (0.05, 1.5),
    "scatter": (0.01, 1.5),
    "latency": (1.0, 0.7),
    "transfer": (1.0, 0.7),
}
"""Median, and standard deviation of the logarithm (0.7: a factor of 2; 1.5: of 4.5): of `fixed` as a share of compute,
of `neighbours` and `scatter` as shares, of `latency` and `transfer` as multiples of the links' nominal values.
"""

OFF_THE_LAW = 0.023
"""Relative standard deviation of a world size from any smooth law. Assuming an unchanged rate per GPU misses the next
doubling of published weak-scaling rows (MosaicML llm-foundry, MPT on 8 to 256 GPUs) by 2.2 % in the
median: 3.3 % as the standard deviation of a difference of two world sizes, 2.3 % of each.
"""

WAITING_SCATTER = 0.3
"""Standard deviation, in logarithms, of one world size's waiting time from normal scatter."""

DRAWS = 500
ROUNDS = 40
COVERAGE = (2.5, 97.5)


@dataclass(frozen=True)
class WorldSize:
    """Measurements on one number of ranks: seconds of a step, and of a rank's wait, by measurement."""

    ranks: int
    seconds: tuple[float, ...]
    waiting_seconds: float | None = None


@dataclass(frozen=True)
class ForecastPoint:
    """Forecast of one world size. The interval is of one measurement; efficiency is relative to the fewest ranks."""

    ranks: int
    seconds: float
    seconds_interval: Interval
    efficiency: float
    efficiency_interval: Interval
    communication_share: float


@dataclass(frozen=True)
class Half:
    """Ranks at which efficiency falls below one half; None: not up to the largest forecast."""

    ranks: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ForecastCheck:
    """The largest world size, predicted from the smaller ones alone."""

    ranks: int
    predicted_seconds: float
    interval: Interval
    measured_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def inside(self) -> bool:
        """Whether the measurement lies in the interval."""
        return self.interval[0] <= self.measured_seconds <= self.interval[1]


@dataclass(frozen=True)
class Forecast:
    """`points` are powers of 2 from the fewest measured ranks to `to`; `terms`: median and interval by name."""

    kind: ScalingKind
    measured: tuple[WorldSize, ...]
    over: Machine | None
    points: tuple[ForecastPoint, ...]
    half: Half
    check: ForecastCheck | None
    terms: Mapping[str, tuple[float, Interval]]


def forecast(
    points: Sequence[WorldSize],
    kind: ScalingKind,
    traffic: Traffic,
    measured: Machine | None,
    over: Machine | None = None,
    to: int = MOST_RANKS,
    seed: int = 0,
    draws: int = DRAWS,
) -> Forecast:
    """Fit the measured world sizes and extrapolate to `to` ranks.

    measured: the machine of the measurements; may be None without traffic. over: the machine whose interconnect is
    forecast, with the measured ranks' compute; None: all ranks joined as the measured ones are.
    Raises ValueError for fewer than two world sizes, for no more ranks than measured, and for unknown links.
    """
    known = sorted((point for point in points if point.seconds), key=lambda point: point.ranks)
    if len(known) < 2:
        raise ValueError(f"points: a forecast needs two world sizes that were measured, not {len(known)}")
    if to <= known[-1].ranks:
        raise ValueError(f"to: {to} ranks are no more than the {known[-1].ranks} that were measured")
    fitted = _Fit(known, kind, traffic, measured, seed, draws)
    grid = sorted({known[0].ranks, to, *(1 << bit for bit in range(to.bit_length()) if 1 << bit > known[0].ranks)})
    check = _check(known, kind, traffic, measured, seed, draws) if len(known) >= LEAST_FOR_A_CHECK else None
    found = tuple(fitted.point(ranks, over) for ranks in grid)
    return Forecast(kind, tuple(known), over, found, fitted.half(known[0].ranks, to, over), check, fitted.terms)


def _check(
    known: Sequence[WorldSize], kind: ScalingKind, traffic: Traffic, measured: Machine | None, seed: int, draws: int
) -> ForecastCheck:
    last = known[-1]
    point = _Fit(known[:-1], kind, traffic, measured, seed, draws).point(last.ranks, None)
    return ForecastCheck(last.ranks, point.seconds, point.seconds_interval, float(np.median(last.seconds)))


class _Fit:
    """The law fitted to the points: best values, and one fit for each noise draw."""

    def __init__(
        self,
        known: Sequence[WorldSize],
        kind: ScalingKind,
        traffic: Traffic,
        measured: Machine | None,
        seed: int,
        count: int,
    ) -> None:
        self.kind, self.traffic, self.measured, self.count = kind, traffic, measured, count
        self.base = known[0].ranks
        self.ranks = [point.ranks for point in known]
        self.node = max(self.ranks) if measured is None else measured.accelerators
        self.random = np.random.default_rng(seed)
        self.waits = [
            (index, point.waiting_seconds)
            for index, point in enumerate(known)
            if point.ranks > 1 and point.waiting_seconds
        ]
        sends = any(traffic(ranks) for ranks in self.ranks)
        self.names = ["compute"]
        self.names += ["fixed"] if kind == "strong" else []
        self.names += ["neighbours"] if self.base < self.node and max(self.ranks) > self.base else []
        self.names += ["scatter"] if self.waits else []
        self.names += ["latency", "transfer"] if sends else []
        self.shapes = self._shapes(self.ranks, None)
        self.observed = np.log([float(np.median(point.seconds)) for point in known])
        self.noise = self._noise(known)
        self._solve()

    def _noise(self, known: Sequence[WorldSize]) -> Floats:
        """Return the standard deviation of each point's logarithm: of its median, and off the law."""
        logs = [np.log(point.seconds) for point in known]
        freedom = sum(len(values) - 1 for values in logs)
        pooled = sum(float(((values - values.mean()) ** 2).sum()) for values in logs) / freedom if freedom else 0.0
        return np.array([sqrt(pi / 2 * pooled / len(values) + OFF_THE_LAW**2) for values in logs])

    def _shapes(self, ranks: Sequence[int], over: Machine | None) -> Floats:
        """Return rows w, f, J, A, B: the multipliers of the terms, by ranks."""
        count = np.array(ranks, dtype=np.float64)
        work = self.base / count if self.kind == "strong" else np.ones_like(count)
        full = (np.minimum(count, self.node) - 1) / max(1, self.node - 1)
        expected = [NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) for number in ranks]
        largest = np.where(count > 1, expected, 0.0)
        sent = np.array([self._sent(number, over) for number in ranks])
        return np.vstack([work, full, largest, sent.T])

    def _sent(self, ranks: int, over: Machine | None) -> tuple[float, float]:
        """Return seconds of latency and of transfer in a step."""
        transfers = self.traffic(ranks) if ranks > 1 else ()
        if not transfers:
            return 0.0, 0.0
        machine = over
        if machine is None:
            if self.measured is None:
                raise ValueError("measured: the ranks send each other data, and no link between them is known")
            machine = self.measured if self.measured.between else joined_alike(self.measured, ranks)
        parts = [latency_and_transfer(transfer, machine) for transfer in transfers]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    def _model(self, theta: Floats, shapes: Floats) -> tuple[Floats, dict[str, Floats]]:
        """Return seconds (draws x points) and the derivative by the logarithm of each term of `names`."""
        value = {name: np.exp(theta[:, place])[:, None] for place, name in enumerate(self.names)}
        zero = np.zeros((len(theta), 1))
        work, full, largest, latency, transfer = shapes
        crowded = 1 + value.get("neighbours", zero) * full
        spread = 1 + value.get("scatter", zero) * largest
        alone = value["compute"] * work
        fixed = value["compute"] * value.get("fixed", zero)
        sent = {"latency": value.get("latency", zero) * latency, "transfer": value.get("transfer", zero) * transfer}
        seconds = fixed + alone * crowded * spread + sent["latency"] + sent["transfer"]
        slopes = {
            "compute": fixed + alone * crowded * spread,
            "fixed": fixed + np.zeros_like(alone),
            "neighbours": alone * (crowded - 1) * spread,
            "scatter": alone * crowded * (spread - 1),
            **sent,
        }
        return seconds, slopes

    def _solve(self) -> None:
        """Fit the best values (row 0) and those of each draw; noise grows if the residuals exceed it."""
        centres, spreads = self._priors()
        wait = np.log([seconds for _, seconds in self.waits])
        best = self._minimum(self.observed[None], centres[None], wait[None], spreads)
        residual = self._residuals(best, self.observed[None], centres[None], wait[None], spreads)[0]
        freedom = len(self.observed) + len(wait) - 1  # priors and terms cancel; compute alone has no prior
        self.noise = self.noise * max(1.0, sqrt(float((residual**2).sum()) / max(1, freedom)))
        normal = self.random.standard_normal
        observed = self.observed + self.noise * normal((self.count, len(self.observed)))
        drawn = centres + np.where(np.isfinite(spreads), spreads, 0.0) * normal((self.count, len(centres)))
        waited = wait + WAITING_SCATTER * normal((self.count, len(wait)))
        self.best = best
        self.draws = self._minimum(observed, drawn, waited, spreads)
        self.other_links = normal((self.count, 2)) * PRIORS["latency"][1]
        self.off = np.exp(self.noise.mean() * normal((self.count, 1)))

    def _priors(self) -> tuple[Floats, Floats]:
        centres = [self.observed[0] if name == "compute" else np.log(PRIORS[name][0]) for name in self.names]
        spreads = [np.inf if name == "compute" else PRIORS[name][1] for name in self.names]
        return np.array(centres), np.array(spreads)

    def _residuals(self, theta: Floats, observed: Floats, centres: Floats, waited: Floats, spreads: Floats) -> Floats:
        seconds, slopes = self._model(theta, self.shapes)
        places = [index for index, _ in self.waits]
        waiting = np.log(slopes["scatter"][:, places]) if places else np.empty((len(theta), 0))
        return np.hstack(
            [
                (np.log(seconds) - observed) / self.noise,
                (theta - centres) / spreads,
                (waiting - waited) / WAITING_SCATTER,
            ]
        )

    def _jacobian(self, theta: Floats, spreads: Floats) -> Floats:
        """Return draws x residuals x parameters; analytic for the waiting time."""
        seconds, slopes = self._model(theta, self.shapes)
        points = np.stack([slopes[name] / seconds for name in self.names], axis=2) / self.noise[None, :, None]
        priors = np.broadcast_to(np.diag(1 / spreads), (len(theta), len(spreads), len(spreads)))
        waiting = np.zeros((len(theta), len(self.waits), len(self.names)))
        for row, (index, _) in enumerate(self.waits):
            for place, name in enumerate(self.names):
                if name in ("compute", "scatter"):
                    waiting[:, row, place] = 1.0
                elif name == "neighbours":
                    crowded = np.exp(theta[:, place]) * self.shapes[1, index]
                    waiting[:, row, place] = crowded / (1 + crowded)
        return np.concatenate([points, priors, waiting / WAITING_SCATTER], axis=1)

    def _minimum(self, observed: Floats, centres: Floats, waited: Floats, spreads: Floats) -> Floats:
        """Solve least squares of all draws at once (Levenberg-Marquardt, damping for each draw separately)."""
        theta = centres.copy()
        damping = np.full(len(theta), 1e-3)
        residual = self._residuals(theta, observed, centres, waited, spreads)
        for _ in range(ROUNDS):
            slope = self._jacobian(theta, spreads)
            normal = np.einsum("dri,drj->dij", slope, slope)
            gradient = np.einsum("dri,dr->di", slope, residual)
            damped = normal + damping[:, None, None] * np.eye(theta.shape[1])
            step = np.linalg.solve(damped, gradient[..., None])[..., 0]
            tried = theta - np.clip(step, -2.0, 2.0)
            moved = self._residuals(tried, observed, centres, waited, spreads)
            better = (moved**2).sum(axis=1) <= (residual**2).sum(axis=1)
            theta = np.where(better[:, None], tried, theta)
            residual = np.where(better[:, None], moved, residual)
            damping = np.clip(np.where(better, damping / 5, damping * 5), 1e-9, 1e9)
            if float(np.abs(step[better]).max(initial=0.0)) < 1e-7 and better.all():
                break
        return theta

    def _seconds(self, ranks: Sequence[int], over: Machine | None) -> tuple[Floats, Floats, Floats]:
        """Return seconds at the best values and of each draw, and the share of communication at the best values."""
        shapes = self._shapes(ranks, over)
        best, slopes = self._model(self.best, shapes)
        draws = self.draws
        if over is not None and over != self.measured and "latency" in self.names:
            draws = draws.copy()
            draws[:, self.names.index("latency") :] += self.other_links
        return best[0], self._model(draws, shapes)[0], ((slopes["latency"] + slopes["transfer"]) / best)[0]

    def _grown(self, ranks: Sequence[int]) -> Floats:
        """Return the divisor that turns baseline over seconds into an efficiency."""
        return np.array(ranks) / self.base if self.kind == "strong" else np.ones(len(ranks))

    def point(self, ranks: int, over: Machine | None) -> ForecastPoint:
        """Return one world size with its intervals."""
        best, draws, share = self._seconds([self.base, ranks], over)
        there = draws[:, 1:] * self.off
        grown = float(self._grown([ranks])[0])
        efficiency = draws[:, :1] / (grown * there) if ranks > self.base else np.ones((1, 1))
        return ForecastPoint(
            ranks,
            float(best[1]),
            _interval(there),
            float(best[0] / (grown * best[1])),
            _interval(efficiency),
            float(share[1]),
        )

    def half(self, first: int, to: int, over: Machine | None) -> Half:
        """Return where efficiency falls below one half, interpolated in logarithms on a fine grid of world sizes."""
        grid = sorted({round(value) for value in np.geomspace(first, to, 97)})
        best, draws, _ = self._seconds(grid, over)
        grown = self._grown(grid)
        middle = _first_below(best[None], grown, grid)
        each = _first_below(draws, grown, grid)
        low, high = np.percentile(each, COVERAGE, method="nearest")
        return Half(*(None if np.isinf(value) else float(value) for value in (middle[0], low, high)))

    @cached_property
    def terms(self) -> dict[str, tuple[float, Interval]]:
        """Value and interval of each fitted term; `compute` in seconds, `fixed` as a share of it."""
        best, draws = np.exp(self.best[0]), np.exp(self.draws)
        return {name: (float(best[place]), _interval(draws[:, place])) for place, name in enumerate(self.names)}


def _first_below(seconds: Floats, grown: Floats, grid: Sequence[int]) -> Floats:
    """Return, for each row, the ranks at which efficiency falls below one half; infinite if it never does."""
    efficiency = seconds[:, :1] / (grown * seconds)
    below = efficiency < HALF
    place = below.argmax(axis=1)
    found = np.full(len(seconds), np.inf)
    logs = np.log(grid)
    for row in np.flatnonzero(below.any(axis=1)):
        at = place[row]
        before, after = efficiency[row, at - 1], efficiency[row, at]
        share = (before - HALF) / (before - after)
        found[row] = np.exp(logs[at - 1] + share * (logs[at] - logs[at - 1]))
    return found


def _interval(values: Floats) -> Interval:
    low, high = np.percentile(values, COVERAGE)
    return float(low), float(high)
