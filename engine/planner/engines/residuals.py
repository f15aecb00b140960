"""What the constants leave unexplained, learned from the nearest measured rows of the same engine and device.

    learned = ResidualProcess.learn(points, work, log_errors)        # log(measured / predicted)
    corrections, deviations = learned.at(points, work)

A Gaussian process with two parts of equal size: what all models on an engine and a device share at a batch, a length
and a number of ranks, and what is the model's own (Rasmussen and Williams, 2006, algorithm 2.1). Outliers count less:
the noise of a row beyond three standard deviations of its leave-one-out prediction (their section 5.4.2) is widened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.common.arrays import Floats
from engine.planner.engines.point import BatchPoint
from engine.planner.engines.work import PhaseWork

SIGNAL = 0.08  # standard deviation of each part; chosen among seven by leaving out pairs and rows
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
    """places: of the rows; weights, inverse: of the process."""

    places: tuple[RowPlace, ...]
    errors: Floats
    weights: Floats
    inverse: Floats

    @classmethod
    def none(cls) -> "ResidualProcess":
        """Return the correction before any row."""
        return cls((), np.zeros(0), np.zeros(0), np.zeros((0, 0)))

    @classmethod
    def learn(cls, rows: Sequence[RowPlace], log_errors: Floats) -> "ResidualProcess":
        """Return the process of rows and their log(measured / predicted)."""
        if not rows:
            return cls.none()
        noise = np.array([_QUEUED_NOISE if row.queues else _NOISE for row in rows]) ** 2
        covariance = _kernel(rows, rows)
        widened = noise.copy()
        for _ in range(_ROUNDS):
            inverse = np.linalg.inv(covariance + np.diag(widened))
            weights = inverse @ log_errors
            far = np.abs(weights) / np.sqrt(np.diag(inverse)) / _HUBER
            if far.max() <= 1:
                break
            widened = widened + (np.maximum(1.0, far) ** 2 - 1) * noise
        return cls(
            tuple(rows), log_errors, np.asarray(weights, dtype=np.float64), np.asarray(inverse, dtype=np.float64)
        )

    def at(self, points: Sequence[RowPlace]) -> tuple[Floats, Floats]:
        """Return corrections of the logarithm, and variances with the rows' own scatter."""
        noise = np.array([_QUEUED_NOISE if point.queues else _NOISE for point in points]) ** 2
        whole = 2 * SIGNAL**2
        if not self.places or not points:
            return np.zeros(len(points)), noise + whole
        across = _kernel(points, self.places)
        explained = ((across @ self.inverse) * across).sum(axis=1)
        return across @ self.weights, noise + np.maximum(whole - explained, 0.0)


def _kernel(rows: Sequence[RowPlace], columns: Sequence[RowPlace]) -> Floats:
    left, right = (np.array([place.numbers for place in side]) for side in (rows, columns))
    apart = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=-1)

    def same(words: tuple[list[str], list[str]]) -> Floats:
        return np.asarray(np.array(words[0])[:, None] == np.array(words[1])[None, :], dtype=np.float64)

    device = same(([f"{p.engine} {p.device}" for p in rows], [f"{p.engine} {p.device}" for p in columns]))
    model = same(([place.model for place in rows], [place.model for place in columns]))
    found: Floats = SIGNAL**2 * device * np.exp(-apart / 2) * (1 + model)
    return found
