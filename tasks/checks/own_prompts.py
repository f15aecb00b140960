"""Prompts of a verification that brings none: as many sizes as defects may depend on, at a bounded price.

    positions = longest_sequence(config, name)
    lines = own_prompts(texts, vocabulary, count, room, new_tokens)       # objects of a prompts file

All but the last batch hold prompts that are longer than the decode steps, so that every row of a full batch is fed
through the cache for all of them. The last batch is very uneven: two short prompts, and one that the ranks repeat to
the longest sequence (`PromptedWorkload.longest_tokens`). Lengths are mixed, so batches are padded and the cache is
used again.
"""

import random
from contextlib import suppress
from typing import Any

from configs.common.printable import plural
from configs.families.positions import LIMIT_KEYS, are_distances
from engine.planner.families import read_architecture

MAX_POSITIONS = 2048
"""Longest sequence by default: in a bigger context it is a part of the cost that should be asked for."""
MAX_WINDOW = 8192
"""Largest attention window that the default goes beyond."""
_BEYOND_WINDOW = 256
_LONG_TOKENS = 192
_SHORT_TOKENS = (2, 12)
_CACHED_STEPS = 8
_CHARACTERS_PER_TOKEN = 5
_SPECIAL_TOKENS = 8
"""Room in the context for what a tokenizer adds to a text."""


def position_limit(config: dict[str, Any], name: str) -> int | None:
    """Return the most positions that a model takes; None: unlimited, or unknown."""
    return None if are_distances(config) else _trained_length(config, name)


def _trained_length(config: dict[str, Any], name: str) -> int | None:
    """Return the length that a model was made for, which one without positions of its own exceeds; None: unknown."""
    with suppress(ValueError):  # a family, or an option of one, that the planner does not know
        found = read_architecture(config, name).max_positions
        if found:
            return found
    known = (config.get(key) for key in LIMIT_KEYS)
    return next((found for found in known if isinstance(found, int) and found > 0), None)


def longest_sequence(config: dict[str, Any], name: str) -> int:
    """Return the length of the longest sequence by default: the model's limit, at most MAX_POSITIONS, or somewhat more
    than its attention window.
    """
    window = config.get("sliding_window")
    beyond = window + _BEYOND_WINDOW if isinstance(window, int) and 0 < window <= MAX_WINDOW else 0
    wanted = max(MAX_POSITIONS, beyond)
    return min(_trained_length(config, name) or wanted, wanted)


def own_prompts(
    texts: list[str] | None, vocabulary: int, count: int, room: int, new_tokens: int
) -> list[dict[str, Any]]:
    """Return the lines of a prompts file, the same for the same arguments.

    texts: repeated to their lengths, in characters; None: random token ids. room: tokens that fit.
    """
    if room < (_SHORT_TOKENS[0] if texts is None else _SHORT_TOKENS[0] + _SPECIAL_TOKENS):
        raise ValueError(
            f"--positions, --new-tokens: leave {plural(max(0, room), 'token')} for prompts, which is too few. "
            "Use more --positions or fewer --new-tokens"
        )
    generator = random.Random(0)
    lengths = [min(length, room) for length in _lengths(count, max(_CACHED_STEPS, new_tokens), generator)]
    if texts is None:
        return [{"tokens": [generator.randrange(vocabulary) for _ in range(length)]} for length in lengths]
    chosen = [texts[position % len(texts)] for position in range(count)]
    characters = [min(length * _CHARACTERS_PER_TOKEN, room - _SPECIAL_TOKENS) for length in lengths]
    return [
        {"prompt": (text * -(-length // len(text)))[:length]} for text, length in zip(chosen, characters, strict=True)
    ]


def _lengths(count: int, steps: int, generator: random.Random) -> list[int]:
    """Return lengths in tokens: mixed ones, all longer than the steps, then short ones and a long one."""
    last = [*_SHORT_TOKENS, max(_LONG_TOKENS, steps + 2)][-count:]
    usual = count - len(last)
    low, high = steps + 2, max(_LONG_TOKENS, 2 * steps)
    found = [round(low * (high / low) ** (place / max(1, usual - 1))) for place in range(usual)]
    generator.shuffle(found)
    return found + last
