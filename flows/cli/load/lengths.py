"""Lengths as the command line writes them."""

from pydantic import ValidationError

from configs.common.files.reading import validation_text
from configs.load.lengths import MAX_TOKENS, Lengths, LognormalLengths, UniformLengths

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
        length = int(text)
    except ValidationError as error:
        raise ValueError(f"got {text[:60]!r}: {validation_text(error)}") from error
    except ValueError as error:
        raise ValueError(f"got {text[:60]!r}, expected {EXAMPLES}") from error
    if not 0 < length <= MAX_TOKENS:
        raise ValueError(f"got {text[:60]!r}, expected 1 to {MAX_TOKENS:,} tokens")
    return length
