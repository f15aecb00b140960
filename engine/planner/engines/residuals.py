"""What the constants leave unexplained, learned from the nearest measured rows of the same engine and device.

    learned = ResidualProcess.learn(places, log_errors)              # log(measured / predicted)
    corrections, variances = learned.at(others)

A Gaussian process with two parts of equal size: what all models on an engine and a device share at a batch, a length
and a number of ranks, and what is the model's own (Rasmussen and Williams, 2006, algorithm 2.1). Their size is that of
the rows of the engine on the device, by maximum likelihood with a prior (section 5.4.1): vLLM's rows on an H100 lie
within 0.04 of what the constants say, those on an MI300X within 0.11, and one size for both makes the intervals of one
too wide and of the other too narrow. Outliers count less: the noise of a row beyond three standard deviations of its
leave-one-out prediction (section 5.4.2) is widened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import minimize_scalar

from configs.common.arrays import Floats
from configs.common.system.blas import one_blas_thread
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.work import PhaseWork

SIGNAL = 0.08  # median of the prior of each part's standard deviation; chosen among seven by leaving out pairs and rows
_SIGNAL_SPREAD, _MOST_SPREADS = 0.7, 2.5
"""Standard deviation of the prior's logarithm, a factor of two; no estimate lies further than so many of them."""
_NOISE, _QUEUED_NOISE = 0.025, 0.08
_HUBER, _ROUNDS = 3.0, 3


@dataclass(frozen=True)
class RowPlace:
    """Where a row stands: the words that must agree, and numbers in units of the kernel's length."""

    engine: str
    device: str
    model: str
    numbers: tuple[float, ...]
    queues: bool


def places_of_points(points: Sequence[BatchPoint], work: PhaseWork) -> list[RowPlace]:
    """Return the place of each point."""
    found = []
    for at, point in enumerate(points):
        queues = bool(work.queues[at])
        pressure = float(np.log2(max(work.pressure[at], 1.0)))
        numbers = (
            0.5 * float(np.log2(point.batch)), 0.5 * float(np.log2(point.prompt_tokens)),
            0.5 * float(np.log2(point.new_tokens)), float(np.log2(point.tp)), 1.5 * queues, 0.5 * pressure,
        )  # fmt: skip
        device, model = point.machine.accelerator.name, point.architecture.name
        found.append(RowPlace(point.engine, device, model, numbers, queues))
    return found


@dataclass(frozen=True)
class ResidualProcess:
    """places: of the rows; weights, inverse: of the process; signals: standard deviations by engine and device."""

    places: tuple[RowPlace, ...]
    errors: Floats
    weights: Floats
    inverse: Floats
    signals: Mapping[tuple[str, str], float]

    @classmethod
    def none(cls) -> "ResidualProcess":
        """Return the correction before any row."""
        return cls((), np.zeros(0), np.zeros(0), np.zeros((0, 0)), {})

    @classmethod
    @one_blas_thread()
    def learn(cls, rows: Sequence[RowPlace], log_errors: Floats) -> "ResidualProcess":
        """Return the process of rows and their log(measured / predicted)."""
        if not rows:
            return cls.none()
        noise = _noise(rows)
        widened, signals = noise, _signals(rows, log_errors, noise)
        for _ in range(_ROUNDS):
            inverse = np.linalg.inv(_kernel(rows, rows, signals) + np.diag(widened))
            weights = inverse @ log_errors
            far = np.abs(weights) / np.sqrt(np.diag(inverse)) / _HUBER
            if far.max() <= 1:
                break
            widened = widened + (np.maximum(1.0, far) ** 2 - 1) * noise
            signals = _signals(rows, log_errors, widened)
        return cls(
            tuple(rows),
            log_errors,
            np.asarray(weights, dtype=np.float64),
            np.asarray(inverse, dtype=np.float64),
            signals,
        )

    def at(self, points: Sequence[RowPlace]) -> tuple[Floats, Floats]:
        """Return corrections of the logarithm, and variances with the rows' own scatter."""
        noise = _noise(points)
        whole = 2 * np.array([self.signals.get((point.engine, point.device), SIGNAL) for point in points]) ** 2
        if not self.places or not points:
            return np.zeros(len(points)), noise + whole
        across = _kernel(points, self.places, self.signals)
        explained = ((across @ self.inverse) * across).sum(axis=1)
        return across @ self.weights, noise + np.maximum(whole - explained, 0.0)


def _noise(rows: Sequence[RowPlace]) -> Floats:
    """Return variances of single rows."""
    return np.array([_QUEUED_NOISE if row.queues else _NOISE for row in rows]) ** 2


def _signals(rows: Sequence[RowPlace], log_errors: Floats, noise: Floats) -> dict[tuple[str, str], float]:
    """Return the most likely standard deviation of the process for each engine and device."""
    groups: dict[tuple[str, str], list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault((row.engine, row.device), []).append(at)
    found = {}
    for key, inside in groups.items():
        some = [rows[at] for at in inside]
        shape, errors, own = _kernel(some, some, {key: 1.0}), log_errors[inside], noise[inside]

        def unlikely(spreads: float, shape: Floats = shape, errors: Floats = errors, own: Floats = own) -> float:
            """Minus the logarithm of the likelihood and the prior."""
            factor = np.linalg.cholesky((SIGNAL * exp(_SIGNAL_SPREAD * spreads)) ** 2 * shape + np.diag(own))
            whitened = solve_triangular(factor, errors, lower=True)
            return float(whitened @ whitened / 2 + np.log(np.diag(factor)).sum() + spreads**2 / 2)

        best = minimize_scalar(
            unlikely, bounds=(-_MOST_SPREADS, _MOST_SPREADS), method="bounded", options={"xatol": 0.05}
        )
        found[key] = SIGNAL * exp(_SIGNAL_SPREAD * float(best.x))
    return found


def _kernel(rows: Sequence[RowPlace], columns: Sequence[RowPlace], signals: Mapping[tuple[str, str], float]) -> Floats:
    left, right = (np.array([place.numbers for place in side]) for side in (rows, columns))
    apart = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=-1)

    def same(words: tuple[list[str], list[str]]) -> Floats:
        return np.asarray(np.array(words[0])[:, None] == np.array(words[1])[None, :], dtype=np.float64)

    device = same(([f"{p.engine} {p.device}" for p in rows], [f"{p.engine} {p.device}" for p in columns]))
    model = same(([place.model for place in rows], [place.model for place in columns]))
    size = np.array([signals.get((place.engine, place.device), SIGNAL) for place in rows])[:, None] ** 2
    found: Floats = size * device * np.exp(-apart / 2) * (1 + model)
    return found
