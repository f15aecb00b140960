"""Intervals of fits where arithmetic is at its limits: points that lie on a law, and very many ranks."""

import numpy as np
import pytest

from reports.laws.fit import fit_law


@pytest.mark.parametrize("kappa", [0.03, 0.01, 0.003])
def test_points_on_a_law_have_an_interval(kappa: float) -> None:
    ranks = [1, 2, 4, 8, 16, 32]
    fit = fit_law("usl", ranks, np.array([100 * n / (1 + kappa * n * (n - 1)) for n in ranks]))
    assert fit.parameters == pytest.approx({"lambda": 100, "sigma": 0, "kappa": kappa}, abs=1e-9)
    low, high = fit.intervals["kappa"]
    assert low is not None and high is not None and low <= fit.parameters["kappa"] <= high < kappa + 1e-6


@pytest.mark.parametrize("law", ["amdahl", "usl"])
def test_lambda_is_no_surer_where_there_are_very_many_ranks(law: str) -> None:
    noise = np.array([1.02, 0.99, 1.01, 0.98, 1.015, 0.985])

    def width(growth: int) -> float:
        ranks = [growth**step for step in range(6)]
        low, high = fit_law(law, ranks, 100 * np.array(ranks) * noise).intervals["lambda"]
        assert low is not None and high is not None
        return high - low

    assert width(10) == pytest.approx(width(4), rel=0.2) == pytest.approx(6, abs=2)
