"""Fit the constants of the time model, and a correction of the residuals, to measured training throughput.

    calibrated = calibrate_constants(setups, tokens_per_second, groups)       # groups: the model of each row
    seconds, sigma = calibrated.step_seconds(setup)                 # of any other setup

First the `DeviceConstants`: each moves from its prior only as far as the rows require (least squares of log errors with
a robust loss, and a ridge toward the prior). Those of software are shared by all devices; `matmul` and `attention` are
a device's too, so each device of the rows has its own deviation from the shared change. Then the residuals are learned
by similarity of rows (`engine.planner.fitting.correction`). A device without rows gets its priors times the shared
change.

On the 81 published runs of docs/measurements/published (2026-11; in brackets how they move when a model is left out):
matmul 0.75 of peak on A100 (0.74 to 0.76) and 0.60 on H100 (0.60 to 0.61), attention 0.32 (0.31 to 0.32) and 0.17
(0.17), passes 1.37 (1.34 to 1.48), contention 0.70 (0.65 to 0.74), product_depth 208 (185 to 225), head_depth 11 (11 to
15), recomputed 0.63 (0.61 to 0.66). The set of constants was chosen with all of these rows in view; their values, and
the correction's, are fitted without the left-out rows. Errors of a left-out model are within 1.645 sigma in 84 % of
rows, not 90, because sigma includes the rows' scatter but not the uncertainty of the constants.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import least_squares

from configs.common.arrays import Floats
from configs.hardware.hardware import Accelerator
from engine.planner.fitting.correction import Correction
from engine.planner.setup import TrainingSetup
from engine.planner.timing.compute import PRODUCT_FORMAT
from engine.planner.timing.constants import DeviceConstants, prior_for
from engine.planner.timing.training import step_time

SHARED: Mapping[str, float] = {
    "matmul": 0.15, "attention": 0.4, "passes": 0.3, "contention": 0.7, "product_depth": 0.7, "head_depth": 0.7,
    "recomputed": 0.5,
}  # fmt: skip
"""Standard deviation of each constant's logarithm about its prior: its uncertainty before any measurement.

A library's products are within 15 % of their share of peak; attention kernels of different years differ by 1.5; bytes
of elementwise kernels are known to 30 %; contention, and lengths at which kernels saturate, to a factor of two.
"""
OF_A_DEVICE: Mapping[str, float] = {"matmul": 0.1, "attention": 0.3}
"""The same for a device's deviation from the shared change."""
_NOISE = 0.04
"""Usual error of a row, mostly of the model; larger errors count less (pseudo-Huber)."""
_LEAST_SHARE, _MOST_SHARE = 0.01, 1.0


@dataclass(frozen=True)
class FittedConstants:
    """Each constant as a multiple of its prior: shared by all devices, and per device."""

    shared: Mapping[str, float] = field(default_factory=dict)
    of_device: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def constants(self, accelerator: Accelerator) -> DeviceConstants:
        """Return a device's constants; shares stay at most 1."""
        prior = prior_for(accelerator)
        own = self.of_device.get(accelerator.name, {})
        changed = {
            name: getattr(prior, name) * self.shared.get(name, 1.0) * own.get(name, 1.0)
            for name in (*self.shared, *(name for name in own if name not in self.shared))
        }
        for name in ("matmul", "attention"):
            if name in changed:
                changed[name] = min(max(changed[name], _LEAST_SHARE), _MOST_SHARE)
        return prior.replace(**changed)


@dataclass(frozen=True)
class CalibratedConstants:
    """Constants, and the correction of their residuals."""

    fitted: FittedConstants
    correction: Correction

    def step_seconds(self, setup: TrainingSetup) -> tuple[float, float]:
        """Return seconds of one step, and the standard deviation of the logarithm of its error."""
        factor, sigma = self.correction.at(row_features(setup))
        return step_time(setup, self.fitted.constants(setup.machine.accelerator)).seconds / factor, sigma

    def tokens_per_second(self, setup: TrainingSetup) -> float:
        """Return tokens/s over all ranks."""
        return setup.trained_tokens / self.step_seconds(setup)[0]


def calibrate_constants(
    setups: Sequence[TrainingSetup], tokens_per_second: Sequence[float], groups: Sequence[Hashable] | None = None
) -> CalibratedConstants:
    """Fit to measured rows; without rows, return the priors.

    groups: as in `Correction.learn`. Raises ValueError for a figure that is not above 0.
    """
    if any(not figure > 0 for figure in tokens_per_second):
        raise ValueError("tokens_per_second: each measured figure must be above 0")
    if not setups:
        return CalibratedConstants(FittedConstants(), Correction.none())
    measured = np.log(np.asarray(tokens_per_second, dtype=np.float64))
    fitted = fit_constants(setups, measured)
    features = np.array([row_features(setup) for setup in setups])
    return CalibratedConstants(fitted, Correction.learn(features, measured - _predicted(setups, fitted), groups))


def fit_constants(setups: Sequence[TrainingSetup], log_tokens_per_second: Floats) -> FittedConstants:
    """Return the most likely constants given their priors and the rows."""
    devices = sorted({setup.machine.accelerator.name for setup in setups})
    sigmas = np.array([*SHARED.values(), *(sigma for _ in devices for sigma in OF_A_DEVICE.values())])

    def fitted(parameters: Floats) -> FittedConstants:
        multiples = [float(value) for value in np.exp(parameters * sigmas)]
        own = multiples[len(SHARED) :]
        width = len(OF_A_DEVICE)
        return FittedConstants(
            dict(zip(SHARED, multiples, strict=False)),
            {
                device: dict(zip(OF_A_DEVICE, own[index * width : (index + 1) * width], strict=True))
                for index, device in enumerate(devices)
            },
        )

    def residuals(parameters: Floats) -> Floats:
        errors = (_predicted(setups, fitted(parameters)) - log_tokens_per_second) / _NOISE
        robust = np.sign(errors) * 2 * np.sqrt(np.sqrt(1 + errors**2 / 4) - 1)
        return np.concatenate([robust, parameters])

    found = least_squares(residuals, np.zeros(len(sigmas)), diff_step=[1e-3], ftol=1e-4, xtol=1e-3)
    return fitted(found.x)


def row_features(setup: TrainingSetup) -> list[float]:
    """Return a setup's features for the correction: half a power of two of most sizes equals one of the width."""
    accelerator = setup.machine.accelerator
    return [
        float(np.log2(setup.architecture.hidden)),
        0.5 * float(np.log2(setup.sequence_length)),
        0.5 * float(np.log2(setup.layout.ranks)),
        0.5 * float(np.log2(setup.micro_batch * setup.sequence_length)),
        1.2 * float(np.log2(accelerator.flops(PRODUCT_FORMAT[setup.precision]) / 1e12)),
        1.0 if setup.checkpointing == "full" else 0.0,
    ]


def _predicted(setups: Sequence[TrainingSetup], fitted: FittedConstants) -> Floats:
    """Return logarithms of tokens/s."""
    constants: dict[str, DeviceConstants] = {}
    found = []
    for setup in setups:
        accelerator = setup.machine.accelerator
        if accelerator.name not in constants:
            constants[accelerator.name] = fitted.constants(accelerator)
        found.append(step_time(setup, constants[accelerator.name]).tokens_per_second)
    return np.asarray(np.log(np.array(found)), dtype=np.float64)
