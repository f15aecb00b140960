"""What is learnt of errors: near rows, far from them, in spite of a bad one, and how wide the interval is."""

import math

import numpy as np
import pytest

from engine.planner.fitting.correction import Correction


def test_nothing_learnt_changes_nothing() -> None:
    assert Correction.none(0.2).at([1.0, 2.0]) == (1.0, 0.2)
    learnt = Correction.learn(np.zeros((0, 3)), np.zeros(0), sigma=0.3)
    assert (learnt.rows, learnt.at([1.0, 2.0, 3.0])) == (0, (1.0, 0.3))


def test_one_row_is_believed_near_it_and_forgotten_far_away() -> None:
    learnt = Correction.learn(np.array([[0.0, 0.0]]), np.array([0.1]), sigma=0.1)
    factor, sigma = learnt.at([0.0, 0.0])
    # Simple kriging by hand: 0.1^2 / (0.1^2 + 0.02^2) of the error.
    assert math.log(factor) == pytest.approx(0.1 * 0.01 / (0.01 + 0.0004))
    assert sigma == pytest.approx(math.sqrt(0.01 - 0.01**2 / 0.0104 + 0.0004))
    far, unsure = learnt.at([100.0, 0.0])
    assert far == pytest.approx(1.0)
    assert unsure == pytest.approx(math.sqrt(0.01 + 0.0004))
    between, _ = learnt.at([2.0, 0.0])
    assert 1.0 < between < factor


def test_a_smooth_error_is_foretold_between_rows() -> None:
    places = np.linspace(0, 12, 25)[:, None]
    learnt = Correction.learn(places, 0.3 * np.sin(places[:, 0] / 2))
    for place in (1.25, 4.75, 9.1):
        assert math.log(learnt.at([place])[0]) == pytest.approx(0.3 * math.sin(place / 2), abs=0.03)


def test_noise_alone_teaches_next_to_nothing() -> None:
    random = np.random.default_rng(0)
    learnt = Correction.learn(random.uniform(0, 5, (60, 2)), random.normal(0, 0.04, 60))
    factors = [learnt.at(point)[0] for point in random.uniform(0, 5, (50, 2))]
    assert max(abs(math.log(factor)) for factor in factors) < 0.03
    assert learnt.at([2.5, 2.5])[1] == pytest.approx(0.04, rel=0.3)


def test_a_row_that_all_neighbours_contradict_counts_less() -> None:
    places = np.linspace(0, 4, 21)[:, None]
    errors = np.full(21, 0.05)
    errors[10] = -0.5
    learnt = Correction.learn(places, errors)
    assert math.log(learnt.at([2.0])[0]) == pytest.approx(0.05, abs=0.03)


def test_intervals_hold_what_they_say_for_groups_that_were_left_out() -> None:
    random = np.random.default_rng(1)
    inside = total = 0
    for _ in range(12):
        groups = np.repeat(np.arange(8), 5)
        offsets = random.normal(0, 0.1, 9)
        points = np.column_stack([groups * 1.0, random.uniform(0, 1, 40)])
        errors = offsets[groups] + random.normal(0, 0.02, 40)
        learnt = Correction.learn(points, errors, list(groups))
        for _ in range(5):
            factor, sigma = learnt.at([8.0, random.uniform(0, 1)])
            inside += abs(offsets[8] + random.normal(0, 0.02) - math.log(factor)) < 1.645 * sigma
            total += 1
    assert 0.75 <= inside / total <= 1.0


def test_the_same_rows_in_another_order_teach_the_same() -> None:
    random = np.random.default_rng(2)
    points, errors = random.uniform(0, 5, (20, 3)), random.normal(0, 0.1, 20)
    turned = Correction.learn(points[::-1], errors[::-1], list(range(20))[::-1])
    one, other = Correction.learn(points, errors).at([1.0, 2.0, 3.0]), turned.at([1.0, 2.0, 3.0])
    assert one == pytest.approx(other)


def test_wrong_shapes_and_figures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"features: an array of \(rows, n\) is needed"):
        Correction.learn(np.zeros((2, 1)), np.zeros(3))
    with pytest.raises(ValueError, match="each figure must be finite"):
        Correction.learn(np.zeros((2, 1)), np.array([0.0, math.nan]))
