"""Learn the error of predictions from measured rows with Gaussian processes.

    correction = Correction.learn(features, log_errors, groups)     # log_errors: log(measured / predicted)
    factor, sigma = correction.at(feature)                          # predicted * factor is what to expect

Rows with similar features have similar errors; far from all rows the factor is 1 and sigma is that of an uncorrected
prediction. Features are in units in which rows one apart still resemble each other (log2 of a size, 0 or 1 of a choice
times how much it matters). Simple kriging with a squared-exponential kernel and a nugget: Rasmussen and Williams,
"Gaussian Processes for Machine Learning", 2006, algorithm 2.1 and section 5.4.2 (leaving out).

An outlier, more than three sigma from its neighbours' prediction, counts less: its noise is widened until the residual
is three sigma, after Huber's weights.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.common.arrays import Floats
from configs.common.system.blas import one_blas_thread

_REACHES = (1.0, 2.0, 4.0)  # in units of the features
_SIGNALS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
_NOISES = (0.01, 0.02, 0.04, 0.08)
_HUBER = 3.0
_NINE_OF_TEN = 1.645  # standard deviations of a normal
_ROUNDS = 3


@dataclass(frozen=True)
class Correction:
    """features: (rows, n) of the training rows. signal, noise: standard deviations of log errors; reach: kernel length
    scale. widening: factor on sigma, so that 9 of 10 left-out rows lie within 1.645 sigma; at least 1. `rows` is 0 if
    nothing was learned: every factor is then 1.
    """

    features: Floats
    weights: Floats
    inverse: Floats
    signal: float
    noise: float
    reach: float
    widening: float = 1.0

    @property
    def rows(self) -> int:
        """Number of rows learned from."""
        return len(self.features)

    @classmethod
    def none(cls, sigma: float = 0.1) -> "Correction":
        """Return the correction before any measurement: factor 1, and the usual prediction error."""
        empty = np.zeros((0, 0))
        return cls(empty, np.zeros(0), empty, sigma, 0.0, 1.0)

    @classmethod
    @one_blas_thread()
    def learn(
        cls, features: Floats, log_errors: Floats, groups: Sequence[Hashable] | None = None, *, sigma: float = 0.1
    ) -> "Correction":
        """Fit (rows, n) features to log(measured / predicted).

        groups: rows that are correlated beyond their features (one model, one record). Reach, signal and noise are
        chosen from a small grid by leave-one-group-out likelihood. None: each row is a group. With fewer than three
        groups nothing is chosen: signal is `sigma`, noise 0.02, reach 2.
        Raises ValueError if shapes do not match or a figure is not finite.
        """
        features, log_errors = np.asarray(features, dtype=np.float64), np.asarray(log_errors, dtype=np.float64)
        if features.ndim != 2 or log_errors.shape != (len(features),):
            raise ValueError(
                f"features: an array of (rows, n) is needed and log_errors of (rows,), "
                f"not {features.shape} and {log_errors.shape}"
            )
        if not (np.isfinite(features).all() and np.isfinite(log_errors).all()):
            raise ValueError("features and log_errors: each figure must be finite; leave rows without a figure out")
        if not len(features):
            return cls.none(sigma)
        members = _members(groups if groups is not None else range(len(features)))
        if len(members) < 3:
            return cls._fitted(features, log_errors, sigma, 0.02, 2.0)
        distances = _squared_distances(features, features)
        choices = [(signal, noise, reach) for signal in _SIGNALS for noise in _NOISES for reach in _REACHES]
        left_out = [_left_out(distances, log_errors, members, *choice) for choice in choices]
        best = int(np.argmax([_likelihood(*each) for each in left_out]))
        residuals, sigmas = left_out[best]
        widening = max(1.0, float(np.percentile(np.abs(residuals / sigmas), 90)) / _NINE_OF_TEN)
        return cls._fitted(features, log_errors, *choices[best], widening)

    @classmethod
    def _fitted(
        cls, features: Floats, log_errors: Floats, signal: float, noise: float, reach: float, widening: float = 1.0
    ) -> "Correction":
        kernel = signal**2 * np.exp(-0.5 * _squared_distances(features, features) / reach**2)
        inverse = _inverse(kernel, _row_noise(kernel, log_errors, noise))
        return cls(features, inverse @ log_errors, inverse, signal, noise, reach, widening)

    def at(self, features: Sequence[float] | Floats) -> tuple[float, float]:
        """Return the factor at one point, and the standard deviation of the remaining log error (noise included)."""
        if not self.rows:
            return 1.0, self.signal
        point = np.asarray(features, dtype=np.float64).reshape(1, -1)
        near = self.signal**2 * np.exp(-0.5 * _squared_distances(point, self.features)[0] / self.reach**2)
        variance = max(0.0, self.signal**2 - float(near @ self.inverse @ near)) + self.noise**2
        return float(np.exp(near @ self.weights)), float(np.sqrt(variance)) * self.widening


def _squared_distances(left: Floats, right: Floats) -> Floats:
    return np.asarray(((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2))


def _members(groups: Iterable[Hashable]) -> list[Floats]:
    """Return the indices of each group's rows, in order of appearance."""
    found: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return [np.array(indices) for indices in found.values()]


def _inverse(kernel: Floats, variance: Floats) -> Floats:
    return np.asarray(np.linalg.inv(kernel + np.diag(variance)), dtype=np.float64)


def _row_noise(kernel: Floats, log_errors: Floats, noise: float) -> Floats:
    """Return each row's noise variance, widened if the other rows contradict it."""
    variance = np.full(len(log_errors), noise**2)
    for _ in range(_ROUNDS):
        inverse = _inverse(kernel, variance)
        left_out = (inverse @ log_errors) / np.diag(inverse)  # residual of each row under the others
        expected = np.sqrt(1 / np.diag(inverse) - variance + noise**2)
        widened = (left_out / _HUBER) ** 2 - expected**2 + noise**2
        variance = np.where(np.abs(left_out) > _HUBER * expected, widened, noise**2)
    return variance


def _left_out(
    distances: Floats, log_errors: Floats, members: list[Floats], signal: float, noise: float, reach: float
) -> tuple[Floats, Floats]:
    """Return residuals of each group's rows given all other groups, and their standard deviations."""
    kernel = signal**2 * np.exp(-0.5 * distances / reach**2)
    variance = _row_noise(kernel, log_errors, noise)
    inverse = _inverse(kernel, variance)
    weighted = inverse @ log_errors
    residuals, sigmas = np.zeros(len(log_errors)), np.zeros(len(log_errors))
    for rows in members:
        covariance = np.linalg.inv(inverse[np.ix_(rows, rows)])
        residuals[rows] = covariance @ weighted[rows]
        # A row's own noise is not widened here, because this row is the one predicted.
        sigmas[rows] = np.sqrt(np.maximum(np.diag(covariance) - variance[rows], 0.0) + noise**2)
    return residuals, sigmas


def _likelihood(residuals: Floats, sigmas: Floats) -> float:
    """Return the sum of log densities; Student's t with 4 degrees of freedom, so that no single row dominates."""
    return float(np.sum(-2.5 * np.log1p((residuals / sigmas) ** 2 / 4) - np.log(sigmas)))
