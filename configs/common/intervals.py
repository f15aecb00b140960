"""Sets of moments as intervals: union, intersection, difference and length. Pure arithmetic.

    busy = union(np.array([[0.0, 2.0], [1.0, 3.0]]))      # [[0, 3]]: what overlaps counts once
    length(difference(busy, waiting))                     # seconds busy and not waiting

An array [n, 2] of begin and end, in seconds. Every function takes intervals in any order, overlapping or empty,
and gives them sorted, disjoint and not empty.
"""

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def intervals(pairs: object = ()) -> Intervals:
    """An array [n, 2] from pairs of begin and end; none gives [0, 2]."""
    return np.asarray(pairs, dtype=np.float64).reshape(-1, 2)


def union(*parts: Intervals) -> Intervals:
    """Moments that lie in at least one of the intervals."""
    joined = np.concatenate([intervals(part) for part in parts]) if parts else intervals()
    joined = joined[joined[:, 1] > joined[:, 0]]
    if not len(joined):
        return joined
    joined = joined[np.argsort(joined[:, 0], kind="stable")]
    latest = np.maximum.accumulate(joined[:, 1])
    apart = np.flatnonzero(joined[1:, 0] > latest[:-1])
    first = np.concatenate(([0], apart + 1))
    last = np.concatenate((apart, [len(joined) - 1]))
    return np.stack([joined[first, 0], latest[last]], axis=1)


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Moments that lie in both."""
    pieces, in_left, in_right = _pieces(left, right)
    return union(pieces[in_left & in_right])


def difference(left: Intervals, right: Intervals) -> Intervals:
    """Moments of `left` that do not lie in `right`."""
    pieces, in_left, in_right = _pieces(left, right)
    return union(pieces[in_left & ~in_right])


def length(parts: Intervals) -> float:
    """Seconds that the intervals cover; what overlaps counts once."""
    merged = union(parts)
    return float((merged[:, 1] - merged[:, 0]).sum())


def _pieces(left: Intervals, right: Intervals) -> tuple[Intervals, NDArray[np.bool_], NDArray[np.bool_]]:
    """The time between each two neighbouring bounds, and which of these pieces lie in `left` and in `right`."""
    left, right = union(left), union(right)
    bounds = np.unique(np.concatenate((left.ravel(), right.ravel())))
    pieces = np.stack([bounds[:-1], bounds[1:]], axis=1)
    return pieces, _within(pieces, left), _within(pieces, right)


def _within(pieces: Intervals, merged: Intervals) -> NDArray[np.bool_]:
    if not len(merged):
        return np.zeros(len(pieces), dtype=np.bool_)
    place = np.searchsorted(merged[:, 0], pieces[:, 0], side="right") - 1
    within: NDArray[np.bool_] = (place >= 0) & (pieces[:, 0] < merged[place, 1])
    return within
