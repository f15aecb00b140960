"""Drawn lengths: numbers of tokens from a distribution."""

from math import log

import numpy as np

from configs.load.lengths import Lengths, LognormalLengths, UniformLengths


def draw_length(lengths: Lengths, rng: np.random.Generator) -> int:
    """One length, at least 1."""
    if isinstance(lengths, UniformLengths):
        return int(rng.integers(lengths.low, lengths.high + 1))
    if isinstance(lengths, LognormalLengths):
        # E[exp(normal(mu, sigma))] = exp(mu + sigma^2 / 2)
        center = log(lengths.mean) - lengths.sigma**2 / 2
        return min(lengths.max, max(1, round(float(rng.lognormal(center, lengths.sigma)))))
    return lengths
