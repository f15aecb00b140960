"""Predictions with intervals: constants, corrections from the nearest rows, and a width checked out of sample.

    calibrated = fit_engines(points, seconds)     # fits, and leaves out pairs of model and device to learn the width
    forecasts = calibrated.forecast(others)    # BatchForecast(seconds, low, high, support)

The width is conformal: the standard deviation from the fit is multiplied by the 90 % quantile of |error| / deviation
over rows whose pair of model and device was left out (Lei et al., JASA 113(523), 2018, section 5.2), of the same device
where it has enough of them. What an engine's workspace may leave of the cache is added in quadrature, to either side
what it makes there, and taken from the errors first. Rows of a device of which nothing was left in do not count for a
device that has measured rows: their deviation is that of an unknown device, and a quotient by it says nothing of a
known one's. With too few pairs to leave out it is 1.645, that of a normal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp

import numpy as np

from configs.common.arrays import Floats
from engine.planner.engines.fit import (
    NORMAL_WIDTH,
    FittedDeviations,
    fit_deviations,
    predicted,
    room_shifts,
    unfitted,
)
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.residuals import ResidualProcess, RowPlace, places_of_points
from engine.planner.engines.work import PhaseWork

_FOLDS, _LEAST_PAIRS, _LEAST_ROWS = 5, 3, 30
_COVERED = 0.9
_LEAST_WIDTH, _MOST_WIDTH, _LEAST_OF_DEVICE = 1.2, 4.0, 100


@dataclass(frozen=True)
class BatchForecast:
    """Seconds of a batch with a 90 % interval; support: the measured rows that it stands on, in words."""

    seconds: float
    low: float
    high: float
    support: str


@dataclass(frozen=True)
class CalibratedEngines:
    """A fit, its residuals, and the width of intervals in standard deviations."""

    fitted: FittedDeviations
    residuals: ResidualProcess
    width: float = NORMAL_WIDTH
    device_widths: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def none(cls) -> "CalibratedEngines":
        """Return the predictor that knows data sheets and priors alone."""
        return cls(unfitted(), ResidualProcess.none())

    def logs(self, points: Sequence[BatchPoint]) -> tuple[Floats, Floats]:
        """Return logarithms of seconds and their standard deviations, without what the cache's room adds."""
        work = PhaseWork.of(points)
        logs, variance = predicted(self.fitted, points, work)
        corrections, scatter = self.residuals.at(places_of_points(points, work))
        return logs + corrections, np.sqrt(variance + scatter)

    def forecast(self, points: Sequence[BatchPoint]) -> list[BatchForecast]:
        """Return a forecast of each point. Raises ValueError for one that does not fit."""
        if not points:
            return []
        logs, deviations = self.logs(points)
        widths = [self.device_widths.get(point.machine.accelerator.name, self.width) for point in points]
        away = np.array(widths) * deviations
        below, above = (np.hypot(away, shift) for shift in room_shifts(self.fitted, points))
        supports = self.supports(points)
        return [
            BatchForecast(exp(log), exp(log - less), exp(log + more), support)
            for log, less, more, support in zip(logs.tolist(), below.tolist(), above.tolist(), supports, strict=True)
        ]

    def supports(self, points: Sequence[BatchPoint]) -> list[str]:
        """Return a sentence for each point: how many measured rows have its engine, device and model."""
        counts: dict[tuple[str, ...], int] = {}
        for place in self.residuals.places:
            for key in ((place.engine, place.device, place.model), (place.engine, place.device), (place.engine,)):
                counts[key] = counts.get(key, 0) + 1
        return [_support(point, counts) for point in points]

    def learned_from(self, points: Sequence[BatchPoint]) -> list[bool]:
        """Return whether each point is itself one of the measured rows, so that its error says little."""
        if not points:
            return []
        known = {_identity(place) for place in self.residuals.places}
        return [_identity(place) in known for place in places_of_points(points, PhaseWork.of(points))]


def fit_engines(points: Sequence[BatchPoint], measured: Floats) -> CalibratedEngines:
    """Fit to measured seconds; without rows, return the priors."""
    if not points:
        return CalibratedEngines.none()
    whole = _calibrated(points, measured, None)
    pairs = sorted({point.pair for point in points})
    if len(pairs) < _LEAST_PAIRS or len(points) < _LEAST_ROWS:
        return whole
    scores, known = _scores(points, measured, pairs, whole.fitted)
    devices: dict[str, list[float]] = {point.machine.accelerator.name: [] for point in points}
    for point, score, is_known in zip(points, scores, known, strict=True):
        if is_known:
            devices[point.machine.accelerator.name].append(float(score))
    every = [score for found in devices.values() for score in found] or list(scores)
    own = {device: _quantile(found if len(found) >= _LEAST_OF_DEVICE else every) for device, found in devices.items()}
    return CalibratedEngines(whole.fitted, whole.residuals, _quantile(list(scores)), own)


def _identity(place: RowPlace) -> tuple[object, ...]:
    return (place.engine, place.device, place.model, *(round(number, 3) for number in place.numbers))


def _calibrated(points: Sequence[BatchPoint], measured: Floats, start: FittedDeviations | None) -> CalibratedEngines:
    fitted = fit_deviations(points, measured, start)
    work = PhaseWork.of(points)
    logs, _ = predicted(fitted, points, work)
    return CalibratedEngines(fitted, ResidualProcess.learn(places_of_points(points, work), np.log(measured) - logs))


def _scores(
    points: Sequence[BatchPoint], measured: Floats, pairs: Sequence[tuple[str, str]], start: FittedDeviations
) -> tuple[Floats, list[bool]]:
    """Return |error| / deviation of each row, pairs left out in a few folds, and whether other rows of its device were
    left in then.
    """
    fold_of = {pair: index % _FOLDS for index, pair in enumerate(pairs)}
    folds = np.array([fold_of[point.pair] for point in points])
    scores, known = np.zeros(len(points)), [False] * len(points)
    for fold in range(min(_FOLDS, len(pairs))):
        kept, left = np.flatnonzero(folds != fold).tolist(), np.flatnonzero(folds == fold).tolist()
        calibrated = _calibrated([points[at] for at in kept], measured[kept], start)
        logs, deviations = calibrated.logs([points[at] for at in left])
        less, more = room_shifts(calibrated.fitted, [points[at] for at in left])
        away = np.log(measured[left]) - logs
        unexplained = np.maximum(away**2 - np.where(away > 0, more, less) ** 2, 0.0)
        scores[left] = np.sqrt(unexplained) / deviations
        seen = {points[at].machine.accelerator.name for at in kept}
        for at in left:
            known[at] = points[at].machine.accelerator.name in seen
    return scores, known


def _quantile(scores: Sequence[float]) -> float:
    rank = min(len(scores), ceil(_COVERED * (len(scores) + 1)))
    return min(_MOST_WIDTH, max(_LEAST_WIDTH, sorted(scores)[rank - 1]))


def _support(point: BatchPoint, counts: dict[tuple[str, ...], int]) -> str:
    engine, device, model = point.engine, point.machine.accelerator.name, point.architecture.name
    own, same, others = (counts.get(key, 0) for key in ((engine, device, model), (engine, device), (engine,)))
    if own:
        return f"{own} measured points of {model} on {device} with {engine}"
    if same:
        return f"{same} measured points of {device} with {engine}, none of {model}"
    if others:
        return f"{others} measured points of {engine} on other devices, none of {device}"
    return f"data sheets and priors alone: no measured point of {engine}"
