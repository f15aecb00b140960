"""Ratios of equal work without noise: what rounding leaves is no difference."""

import pytest

from reports.numbers.statistics import paired_ratio, unpaired_ratio


@pytest.mark.parametrize("times", [0.6, 1.8, 3.0, 7.0, 0.333])
def test_without_noise_the_interval_holds_the_ratio(times: float) -> None:
    """exp(log(3)) is more than 3: a bar of a length below 0 is no bar."""
    values = {repeat: 100.0 * times for repeat in range(8)}
    for ratio in (
        paired_ratio(values, dict.fromkeys(values, 100.0)),
        unpaired_ratio(list(values.values()), [100.0] * 8),
    ):
        assert ratio is not None and ratio.interval is not None
        assert ratio.interval[0] <= ratio.value <= ratio.interval[1] and ratio.interval == pytest.approx((times, times))
        assert ratio.differs and ratio.is_above(1) is (times > 1)


def test_what_rounding_leaves_of_equal_work_is_no_difference() -> None:
    third = {repeat: 0.1 + 0.2 for repeat in range(8)}  # 0.30000000000000004
    ratio = paired_ratio(third, dict.fromkeys(third, 0.3))
    assert ratio is not None and ratio.value > 1
    assert ratio.differs is False and not ratio.is_above(1)
