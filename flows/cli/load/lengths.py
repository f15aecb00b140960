"""Lengths as the command line writes them."""

from configs.load.lengths import Lengths, LognormalLengths, UniformLengths

EXAMPLES = "128, 16..256 or lognormal:128:0.7"


def parse_lengths(text: str) -> Lengths:
    """`128` (each), `16..256` (uniform), `lognormal:MEAN[:SIGMA]`. Raises ValueError for anything else."""
    try:
        if ".." in text:
            low, _, high = text.partition("..")
            return UniformLengths(low=int(low), high=int(high))
        name, _, numbers = text.partition(":")
        if name == "lognormal":
            mean, _, sigma = numbers.partition(":")
            return LognormalLengths(mean=float(mean), sigma=float(sigma or 0.7))
        return int(text)
    except ValueError as error:
        raise ValueError(f"got {text[:60]!r}, expected {EXAMPLES}") from error
