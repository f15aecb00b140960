"""Intervals of time: by hand, and as sets of moments."""

from hypothesis import given
from hypothesis import strategies as some

from configs.common.intervals import Intervals, difference, intersection, intervals, length, union


def test_intervals_by_hand() -> None:
    one, other = intervals([(4, 6), (0, 2), (1, 3), (3, 3)]), intervals([(2, 5)])
    assert union(one).tolist() == [[0, 3], [4, 6]]
    assert union(one, other).tolist() == [[0, 6]]
    assert intersection(one, other).tolist() == [[2, 3], [4, 5]]
    assert difference(one, other).tolist() == [[0, 2], [5, 6]]
    assert length(one) == 5
    nothing = intervals()
    assert len(union()) == len(union(nothing)) == len(intersection(one, nothing)) == 0
    assert difference(one, nothing).tolist() == union(one).tolist()
    assert length(difference(nothing, one)) == 0


PAIRS = some.lists(some.tuples(some.integers(0, 30), some.integers(0, 30)).map(sorted), max_size=8)


def moments(parts: Intervals) -> set[int]:
    """The unit steps that whole-numbered intervals cover."""
    return {step for begin, end in parts.tolist() for step in range(int(begin), int(end))}


@given(PAIRS, PAIRS)
def test_intervals_are_sets_of_moments(left: list[list[int]], right: list[list[int]]) -> None:
    one, other = intervals(left), intervals(right)
    for found, expected in (
        (union(one, other), moments(one) | moments(other)),
        (intersection(one, other), moments(one) & moments(other)),
        (difference(one, other), moments(one) - moments(other)),
    ):
        assert moments(found) == expected
        assert length(found) == len(expected)
        assert all(begin < end for begin, end in found.tolist())
        assert all(end < begin for (_, end), (begin, _) in zip(found.tolist(), found.tolist()[1:], strict=False))
