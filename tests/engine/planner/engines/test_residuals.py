"""The size of what constants leave unexplained is learnt for each engine and device from its own rows."""

import numpy as np
import pytest

from configs.common.arrays import Floats
from engine.planner.engines.residuals import SIGNAL, ResidualProcess, RowPlace


def places(device: str, models: int = 3, rows: int = 20) -> list[RowPlace]:
    return [
        RowPlace("vllm", device, f"model-{model}", (0.5 * row, 0.0, 0.0, 0.0, 0.0, 0.0), False)
        for model in range(models) for row in range(rows)
    ]  # fmt: skip


def errors(count: int, size: float, seed: int) -> Floats:
    """Of one row each, slowly changing along a model's rows."""
    steps = np.random.default_rng(seed).normal(size=(3, count // 3))
    smooth = np.stack([np.convolve(row, np.ones(5) / np.sqrt(5), mode="same") for row in steps])
    found: Floats = size * smooth.ravel()
    return found


def test_devices_whose_rows_scatter_more_have_wider_intervals_for_another_model() -> None:
    quiet, loud = places("quiet"), places("loud")
    learned = ResidualProcess.learn([*quiet, *loud], np.concatenate([errors(60, 0.03, 0), errors(60, 0.3, 1)]))
    assert learned.signals["vllm", "quiet"] < SIGNAL / 2 and learned.signals["vllm", "loud"] > 2 * SIGNAL
    others = [RowPlace("vllm", device, "another", quiet[5].numbers, False) for device in ("quiet", "loud", "unknown")]
    _, variances = learned.at(others)
    assert variances[0] < variances[1] / 9
    assert variances[2] == pytest.approx(2 * SIGNAL**2 + 0.025**2)


def test_an_outlier_widens_its_own_noise_and_not_the_device() -> None:
    rows, found = places("device"), errors(60, 0.05, 2)
    plain = ResidualProcess.learn(rows, found).signals["vllm", "device"]
    odd = found.copy()
    odd[30] += 1.0
    assert ResidualProcess.learn(rows, odd).signals["vllm", "device"] < 2 * plain


def test_before_any_row_nothing_is_corrected() -> None:
    corrections, variances = ResidualProcess.learn([], np.zeros(0)).at(places("device", 1, 2))
    assert corrections.tolist() == [0.0, 0.0] and variances.tolist() == pytest.approx([2 * SIGNAL**2 + 0.025**2] * 2)
