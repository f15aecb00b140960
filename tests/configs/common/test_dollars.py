"""Dollars as they are printed: nothing that costs is called 0.00."""

import pytest

from configs.common.dollars import dollars
from tasks.planning.study_cost import StudyCost


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0, "0.00"),
        (0.0033, "0.0033"),
        (0.05, "0.05"),
        (0.0999, "0.1"),
        (0.1, "0.10"),
        (12.5, "12.50"),
        (1204.5, "1,204.50"),
    ],
)
def test_an_amount_has_cents_or_two_digits(usd: float, text: str) -> None:
    assert dollars(usd) == text


def test_a_plan_of_less_than_a_cent_has_a_price() -> None:
    text = StudyCost(launches=3, measurements=3, seconds=30, unknown=0, usd=0.0033).text
    assert text == "measuring takes about 30 s, $0.0033 in 3 launches"
