"""How far two rows of logits are apart: one definition for the engine that measures noise and the report that judges.

    rows = row_differences(baseline, other)      # both [rows, vocabulary]
    rows.rms / rows.scale                        # relative, by row
    vector_differences(baseline, other).cosine   # of hidden states and embeddings

A constant added to all logits of a row changes no probability, so rows are centred before they are compared.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats


@dataclass(frozen=True)
class RowDifferences:
    """By row. What is not a number on either side gives NaN.

    scale: root mean square of the centred baseline. rms, largest: root mean square and largest magnitude of the
    difference of the centred rows. kl: Kullback-Leibler divergence from the baseline, nats. columns: mean over rows
    of the squared difference, [vocabulary].
    """

    scale: Floats
    rms: Floats
    largest: Floats
    kl: Floats
    columns: Floats


def row_differences(baseline: NDArray[np.floating], other: NDArray[np.floating]) -> RowDifferences:
    """Compare rows [rows, vocabulary] of equal shape."""
    assert baseline.shape == other.shape and baseline.ndim == 2
    count, vocabulary = baseline.shape
    found = np.empty((4, count))
    columns = np.zeros(vocabulary)
    # Row by row: a whole array of float64 copies would take many times the memory of the logits.
    with np.errstate(invalid="ignore", over="ignore"):
        for row in range(count):
            one, two = baseline[row].astype(np.float64), other[row].astype(np.float64)
            one, two = one - one.mean(), two - two.mean()
            change = two - one
            found[0, row] = np.sqrt(np.mean(one * one))
            found[1, row] = np.sqrt(np.mean(change * change))
            found[2, row] = np.abs(change).max()
            found[3, row] = _kl(one, change)
            columns += change * change
    scale, rms, largest, kl = found
    return RowDifferences(scale, rms, largest, kl, columns / max(count, 1))


def _kl(one: Floats, change: Floats) -> float:
    """KL of softmax(one + change) from softmax(one), without the cancellation that log-probabilities would bring.

    With p = softmax(one): log(sum p exp(change)) - sum p change; the change is first centred under p.
    """
    weights = np.exp(one - one.max())
    weights /= weights.sum()
    moved = change - weights @ change
    peak = moved.max()
    if not np.isfinite(peak):
        return float("nan")
    if peak > 1.0:
        return float(peak + np.log(weights @ np.exp(moved - peak)))
    # Small changes: sum p expm1(x) with sum p x = 0 keeps the digits that 1 + x would lose.
    return float(np.log1p(weights @ (np.expm1(moved) - moved)))


@dataclass(frozen=True)
class VectorDifferences:
    """By row, of vectors that mean themselves (hidden states, embeddings): nothing is centred. NaN as above.

    scale: root mean square of the baseline. rms, largest: root mean square and largest magnitude of the difference.
    cosine: 1 less the cosine of the angle between the two. columns: mean over rows of the squared difference.
    """

    scale: Floats
    rms: Floats
    largest: Floats
    cosine: Floats
    columns: Floats


def vector_differences(baseline: NDArray[np.floating], other: NDArray[np.floating]) -> VectorDifferences:
    """Compare rows [rows, size] of equal shape."""
    assert baseline.shape == other.shape and baseline.ndim == 2
    with np.errstate(invalid="ignore", over="ignore"):
        one, two = baseline.astype(np.float64), other.astype(np.float64)
        change = two - one
        squares = change * change
        return VectorDifferences(
            scale=np.sqrt(np.mean(one * one, axis=1)),
            rms=np.sqrt(np.mean(squares, axis=1)),
            largest=np.abs(change).max(axis=1, initial=0.0),
            cosine=_cosine_distance(one, two),
            columns=squares.sum(axis=0) / max(len(one), 1),
        )


def _cosine_distance(one: Floats, two: Floats) -> Floats:
    """Half the squared distance of the two on the unit sphere, which keeps the digits that 1 - cosine would lose."""
    least = np.finfo(np.float64).tiny
    lengths = [np.maximum(np.sqrt(np.sum(each * each, axis=1, keepdims=True)), least) for each in (one, two)]
    found: Floats = np.sum((two / lengths[1] - one / lengths[0]) ** 2, axis=1) / 2
    return found
