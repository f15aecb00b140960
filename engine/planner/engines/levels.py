"""Deviations of constants by level: names, standard deviations, and which apply to a point.

basis = LevelBasis(points, order)        # a matrix for each constant: constants = exp(prior + matrix @ deviations)
names(points)                       # "memory", "memory|vllm", "memory|vllm|rocm", "memory|vllm|h100-80gb"
"""

from collections.abc import Sequence

import numpy as np

from configs.common.arrays import Floats
from engine.planner.engines.constants import PRIORS, log_prior
from engine.planner.engines.point import BatchPoint

SEP = "|"


def level_names(constant: str, point: BatchPoint) -> dict[str, float]:
    """Return the deviations that apply to a point, each with its standard deviation."""
    prior, device = PRIORS[constant], point.machine.accelerator
    found = {constant: prior.shared, SEP.join((constant, point.engine)): prior.engine}
    if device.kind == "rocm":
        found[SEP.join((constant, point.engine, "rocm"))] = prior.platform
    found[SEP.join((constant, point.engine, device.name))] = prior.device
    return {name: sigma for name, sigma in found.items() if sigma > 0}


def names(points: Sequence[BatchPoint]) -> list[str]:
    """Return all deviations that the points teach, in order."""
    found: dict[str, None] = {}
    for point in _kinds(points):
        for constant in PRIORS:
            found.update(dict.fromkeys(level_names(constant, point)))
    return sorted(found)


def _kinds(points: Sequence[BatchPoint]) -> list[BatchPoint]:
    """Return one point of each engine and device."""
    return list({(point.engine, point.machine.accelerator.name): point for point in points}.values())


class LevelBasis:
    """Constants of points as functions of the deviations in `order`, which are standard normal before any row."""

    def __init__(self, points: Sequence[BatchPoint], order: Sequence[str]) -> None:
        place = {name: index for index, name in enumerate(order)}
        kinds = _kinds(points)
        index = {(point.engine, point.machine.accelerator.name): at for at, point in enumerate(kinds)}
        self._kind = np.array([index[point.engine, point.machine.accelerator.name] for point in points], dtype=int)
        self._priors, self._matrices = {}, {}
        for constant in PRIORS:
            matrix = np.zeros((len(kinds), len(order)))
            for row, point in enumerate(kinds):
                for name, sigma in level_names(constant, point).items():
                    if name in place:
                        matrix[row, place[name]] = sigma
            self._matrices[constant] = matrix
            self._priors[constant] = np.array(
                [
                    log_prior(constant, point.engine, point.machine.accelerator.name, point.machine.accelerator.kind)
                    for point in kinds
                ]
            )

    @property
    def moving(self) -> list[int]:
        """Return the places in `order` of the deviations that move a constant of any of these points."""
        return np.flatnonzero(sum(np.abs(matrix).sum(axis=0) for matrix in self._matrices.values())).tolist()

    def constants(self, deviations: Floats) -> dict[str, Floats]:
        """Return each constant for each point."""
        return {
            name: np.exp(self._priors[name] + matrix @ deviations)[self._kind]
            for name, matrix in self._matrices.items()
        }
