"""Fit the engines' constants to measured latencies: least squares of logarithms, with priors by level.

    fitted = fit_deviations(points, seconds)               # FittedDeviations: deviations by name, and their covariance
    logs, variance = predicted(fitted, points)  # of other points; unmeasured deviations count with their priors' spread

The loss is robust (pseudo-Huber): published rows are single runs, and some are odd. The covariance is Laplace's: the
inverse of the curvature at the optimum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from configs.common.arrays import Floats
from configs.common.system.blas import one_blas_thread
from engine.planner.engines.levels import LevelBasis, names
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.schedule import WORKSPACE_SIGMA, cache_tokens, kept_by_batch
from engine.planner.engines.work import PhaseWork, seconds

_NOISE, _QUEUED_NOISE = (
    0.05,
    0.12,
)  # standard deviation of a row's logarithm about the model; of one whose cache is full
_STEP = 1e-3
NORMAL_WIDTH = 1.645
"""Standard deviations either way that hold 90 % of a normal."""
_NEW_PLATFORM = 0.5
"""Of a platform without any row: kernels of another library, a factor of 1.6. Assumption: the engines' first years on
ROCm were slower than its data sheets by a factor of two to three."""
_NEW_ENGINE = 0.3


@dataclass(frozen=True)
class FittedDeviations:
    """Deviations in standard deviations of their priors. rows: measured ones of each (engine, platform)."""

    order: tuple[str, ...]
    deviations: Floats
    covariance: Floats
    rows: Mapping[tuple[str, str], int]


def fit_deviations(
    points: Sequence[BatchPoint], measured: Floats, start: "FittedDeviations | None" = None
) -> FittedDeviations:
    """Return the most likely deviations. start: of a fit with most of these rows, to begin from."""
    order = names(points)
    work, basis, logs = PhaseWork.of(points), LevelBasis(points, order), np.log(measured)
    noise = np.where(work.queues > 0, _QUEUED_NOISE, _NOISE)

    def residuals(deviations: Floats) -> Floats:
        errors = (np.log(seconds(work, basis.constants(deviations))) - logs) / noise
        robust = np.sign(errors) * 2 * np.sqrt(np.sqrt(1 + errors**2 / 4) - 1)
        return np.concatenate([robust, deviations])

    known = dict(zip(start.order, start.deviations, strict=True)) if start else {}
    first = np.array([known.get(name, 0.0) for name in order])
    with one_blas_thread():
        found = least_squares(residuals, first, diff_step=[_STEP], ftol=1e-3, xtol=1e-3, max_nfev=12)
    rows: dict[tuple[str, str], int] = {}
    for point in points:
        kind = (point.engine, point.machine.accelerator.kind)
        rows[kind] = rows.get(kind, 0) + 1
    slopes = np.asarray(found.jac, dtype=np.float64)
    return FittedDeviations(tuple(order), found.x, np.asarray(np.linalg.inv(slopes.T @ slopes), dtype=np.float64), rows)


def unfitted() -> FittedDeviations:
    """Return what is known before any row."""
    return FittedDeviations((), np.zeros(0), np.zeros((0, 0)), {})


def predicted(
    fitted: FittedDeviations, points: Sequence[BatchPoint], work: PhaseWork | None = None
) -> tuple[Floats, Floats]:
    """Return logarithms of seconds and their variances from what is uncertain of the constants."""
    if not points:
        return np.zeros(0), np.zeros(0)
    logs, slopes, covariance = sensitivities(fitted, points, work)
    variance = ((slopes @ covariance) * slopes).sum(axis=1)
    strange = np.array([_strangeness(fitted, point) for point in points])
    return logs, variance + strange


def predicted_logs(fitted: FittedDeviations, points: Sequence[BatchPoint], work: PhaseWork) -> Floats:
    """Return logarithms of seconds alone, for a small part of what the variances take."""
    _, deviations, basis = _levels(fitted, points)
    return np.asarray(np.log(seconds(work, basis.constants(deviations))))


def _levels(fitted: FittedDeviations, points: Sequence[BatchPoint]) -> tuple[list[str], Floats, LevelBasis]:
    """Return the fitted deviations, then those of which no row was measured; their values; constants by them."""
    order = list(dict.fromkeys([*fitted.order, *names(points)]))
    deviations = np.concatenate([fitted.deviations, np.zeros(len(order) - len(fitted.order))])
    return order, deviations, LevelBasis(points, order)


def room_shifts(fitted: FittedDeviations, points: Sequence[BatchPoint]) -> tuple[Floats, Floats]:
    """Return by how much logarithms fall and rise as the engine's workspace goes from one end of its 90 % to the other.

    The two differ: a batch that just fits takes no less time with more room, and twice as long where it has to queue.
    """
    less, more = np.zeros(len(points)), np.zeros(len(points))
    far = NORMAL_WIDTH * WORKSPACE_SIGMA
    near = [at for at, point in enumerate(points) if kept_by_batch(point) > cache_tokens(point, far)]
    if not near:
        return less, more
    some = [points[at] for at in near]
    _, deviations, basis = _levels(fitted, some)
    constants = basis.constants(deviations)
    low, middle, high = (np.log(seconds(PhaseWork.of(some, workspace), constants)) for workspace in (-far, 0.0, far))
    less[near], more[near] = np.maximum(middle - low, 0.0), np.maximum(high - middle, 0.0)
    return less, more


def sensitivities(
    fitted: FittedDeviations, points: Sequence[BatchPoint], work: PhaseWork | None = None
) -> tuple[Floats, Floats, Floats]:
    """Return logarithms of seconds, their slopes by each deviation, and the deviations' covariance."""
    work = work or PhaseWork.of(points)
    order, deviations, basis = _levels(fitted, points)
    logs = np.log(seconds(work, basis.constants(deviations)))
    slopes = np.zeros((len(points), len(order)))
    for index in basis.moving:  # those of other engines and devices, which are most, have slope 0
        moved = deviations.copy()
        moved[index] += _STEP
        slopes[:, index] = (np.log(seconds(work, basis.constants(moved))) - logs) / _STEP
    covariance = np.eye(len(order))  # of deviations that no row has: their priors
    covariance[: len(fitted.order), : len(fitted.order)] = fitted.covariance
    return logs, slopes, covariance


def most_informative(
    fitted: FittedDeviations, answer: BatchPoint, candidates: Sequence[BatchPoint]
) -> tuple[BatchPoint, float]:
    """Return the candidate whose measurement would narrow the answer most, and the share of its variance that stays."""
    _, slopes, covariance = sensitivities(fitted, [answer, *candidates])
    across = slopes[1:] @ covariance @ slopes[0]
    own = ((slopes[1:] @ covariance) * slopes[1:]).sum(axis=1) + _NOISE**2
    gains, before = across**2 / own, float(slopes[0] @ covariance @ slopes[0]) + _NOISE**2
    best = int(gains.argmax())
    return candidates[best], 1 - float(gains[best]) / before


def _strangeness(fitted: FittedDeviations, point: BatchPoint) -> float:
    """Return the variance of an engine or a platform of which no row was measured."""
    kind = point.machine.accelerator.kind
    known = {engine for engine, _ in fitted.rows}
    found = 0.0 if point.engine in known else _NEW_ENGINE**2
    return found + (0.0 if any(other == kind for _, other in fitted.rows) else _NEW_PLATFORM**2)
