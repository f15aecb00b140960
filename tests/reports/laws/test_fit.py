"""Intervals of fits to points that lie on a law, as a model's own figures do."""

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
