"""Fit a handful of constants with priors to a few measured rows, and predict others with an interval.

    fitted = fit_few(model, rows, measured, groups)  # FewConstants: priors, formula, and a row's scatter
    value, low, high = fitted.predict(row)

Least squares of logarithms with a robust loss and a ridge toward the priors. A prediction's standard deviation is the
row's scatter and the constants' remaining uncertainty (Laplace). It is widened so that 90 % of rows lie inside when
their group is left out; with fewer than three groups it is taken as normal.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import least_squares

from configs.common.arrays import Floats

T = TypeVar("T")
Constants = Mapping[str, float]
_NORMAL, _LEAST_GROUPS, _LEAST_ROWS, _COVERED = 1.645, 3, 6, 0.9
_STEP = 1e-3
UNFITTED_FACTOR = 1.6
"""Least width of an interval before any row, as of every prediction from a data sheet."""


@dataclass(frozen=True)
class FewConstants(Generic[T]):
    """priors: each constant's value and the standard deviation of its logarithm. scatter: of a row's logarithm."""

    priors: Mapping[str, tuple[float, float]]
    formula: Callable[[T, Constants], float]
    scatter: Callable[[T], float]

    def constants(self, deviations: Floats) -> dict[str, float]:
        """Return the constants for deviations in standard deviations of the priors."""
        pairs = zip(self.priors.items(), deviations, strict=True)
        return {name: value * exp(sigma * float(at)) for (name, (value, sigma)), at in pairs}


@dataclass(frozen=True)
class FewFit(Generic[T]):
    """Constants of a model after some rows; width: of a 90 % interval in standard deviations."""

    model: FewConstants[T]
    deviations: Floats
    covariance: Floats
    rows: int = 0
    width: float = _NORMAL

    @property
    def constants(self) -> dict[str, float]:
        """The most likely constants."""
        return self.model.constants(self.deviations)

    def sigma(self, row: T) -> float:
        """Return the standard deviation of the prediction's logarithm."""
        here = log(self.model.formula(row, self.constants))
        slopes = np.zeros(len(self.deviations))
        for at in range(len(slopes)):
            moved = self.deviations.copy()
            moved[at] += _STEP
            slopes[at] = (log(self.model.formula(row, self.model.constants(moved))) - here) / _STEP
        return float(np.sqrt(self.model.scatter(row) ** 2 + slopes @ self.covariance @ slopes))

    def predict(self, row: T) -> tuple[float, float, float]:
        """Return the prediction and its interval."""
        value = self.model.formula(row, self.constants)
        factor = exp(self.width * self.sigma(row))
        if not self.rows:
            factor = max(factor, UNFITTED_FACTOR)
        return value, value / factor, value * factor


def fit_few(
    model: FewConstants[T], rows: Sequence[T], measured: Sequence[float], groups: Sequence[Hashable] | None = None
) -> FewFit[T]:
    """Return the fit; without rows, the priors. groups: what is left out together, each row alone if not given."""
    whole = _fit(model, rows, measured)
    names = list(groups) if groups is not None else list(range(len(rows)))
    if len(set(names)) < _LEAST_GROUPS or len(rows) < _LEAST_ROWS:
        return whole
    scores = []
    for name in dict.fromkeys(names):
        kept = [at for at, other in enumerate(names) if other != name]
        left = _fit(model, [rows[at] for at in kept], [measured[at] for at in kept])
        for at, other in enumerate(names):
            if other == name:
                away = abs(log(measured[at] / model.formula(rows[at], left.constants)))
                scores.append(away / left.sigma(rows[at]))
    rank = min(len(scores), ceil(_COVERED * (len(scores) + 1)))
    return FewFit(model, whole.deviations, whole.covariance, len(rows), max(_NORMAL, sorted(scores)[rank - 1]))


def _fit(model: FewConstants[T], rows: Sequence[T], measured: Sequence[float]) -> FewFit[T]:
    count = len(model.priors)
    if not rows:
        return FewFit(model, np.zeros(count), np.eye(count))
    logs = [log(figure) for figure in measured]
    noise = [model.scatter(row) for row in rows]

    def residuals(deviations: Floats) -> Floats:
        constants = model.constants(deviations)
        errors = np.array([log(model.formula(row, constants)) for row in rows]) - logs
        scaled = errors / noise
        robust = np.sign(scaled) * 2 * np.sqrt(np.sqrt(1 + scaled**2 / 4) - 1)
        return np.concatenate([robust, deviations])

    found = least_squares(residuals, np.zeros(count), diff_step=[_STEP])
    slopes = np.asarray(found.jac, dtype=np.float64)
    return FewFit(model, found.x, np.asarray(np.linalg.inv(slopes.T @ slopes), dtype=np.float64), len(rows))
