"""Choose one token from the logits of one row, with numpy: the same bits in any company.

    chosen = next_token(logits, sampling, prompt, answer)      # float32 [words]
    chosen.token, chosen.logprob, chosen.top

Penalties and the order of the filters are those of vLLM (https://docs.vllm.ai/en/stable/api/vllm/sampling_params.html):
log-probabilities are of the raw logits; bias and penalties change the logits; then temperature, min_p, top_k and top_p.
The random number of a token depends on seed, choice and the token's place only, so that a seeded answer is repeatable
whatever else is computed.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.kernels.rows import edge_class
from engine.serving.messages import ScoredToken
from engine.serving.sampling import Sampling

_SUMMED_TOGETHER, _COMPARED_TOGETHER = 256, 32
"""Words of a part, when the place of a sum and the largest words are looked for."""
_MOST_SORTED, _CLASS_BITS = 2048, 13
"""So many words are sorted; more are put into 2 to the power of so many classes first."""
_DRAWN_TOGETHER = 64
"""Random numbers of an answer that are made at once: a generator costs more than its numbers."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Chosen:
    """A token; with log-probabilities its own and those of the most likely words."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = field(default=())


def next_token(logits: Logits, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Chosen:
    """Return the next token after `prompt` and `answer`. Raises FloatingPointError for logits that are not finite."""
    if not np.isfinite(logits).all():
        raise FloatingPointError("the model's logits are not finite")
    changed = _changed(logits, sampling, prompt, answer)
    if sampling.temperature == 0.0:
        token = int(changed.argmax())  # the first of equals, as everywhere
    else:
        chance = uniform(sampling, len(answer))
        token = drawn_token(changed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, chance)
    return Chosen(token) if sampling.logprobs is None else Chosen(*_scored(logits, token, sampling.logprobs))


def scored(logits: Logits, token: int, count: int) -> ScoredToken:
    """Return the log-probabilities of a token and of the `count` most likely words.

    Raises FloatingPointError for logits that are not finite.
    """
    if not np.isfinite(logits).all():
        raise FloatingPointError("the model's logits are not finite")
    return _scored(logits, token, count)


def _scored(logits: Logits, token: int, count: int) -> ScoredToken:
    log_total = float(logits.max()) + math.log(float(_weights(logits, 1.0).sum(dtype=np.float64)))
    best = _best(logits, count) if count else np.empty(0, dtype=np.int64)
    top = tuple((int(word), float(logits[word]) - log_total) for word in best)
    return ScoredToken(token, float(logits[token]) - log_total, top)


def _changed(logits: Logits, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Logits:
    """Return the logits after bias and penalties; the given ones are not changed."""
    changed = logits.astype(np.float32, copy=True)
    if len(answer) < sampling.min_tokens:
        changed[list(sampling.banned)] = -np.inf
    for word, bias in sampling.bias:
        changed[word] += np.float32(bias)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.asarray([*prompt, *answer], dtype=np.int64))
        value, factor = changed[seen], np.float32(sampling.repetition_penalty)
        changed[seen] = np.where(value > 0, value / factor, value * factor)
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        words, counts = np.unique(np.asarray(answer, dtype=np.int64), return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        changed[words] -= penalty.astype(np.float32)
    return changed


def uniform(sampling: Sampling, place: int) -> float:
    """Return the random number in [0, 1) of the token at a place of an answer, from Philox4x64-10.

    Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3": the counter is the place.
    """
    group, within = divmod(place, _DRAWN_TOGETHER)
    return float(_uniforms(sampling.seed, sampling.choice, group)[within])


@functools.lru_cache(maxsize=4096)
def _uniforms(seed: int, choice: int, group: int) -> NDArray[np.float64]:
    generator = np.random.Philox(key=np.array([seed, choice], dtype=np.uint64), counter=group * _DRAWN_TOGETHER)
    # Each value of the counter gives four numbers, of which the first is used, with its upper 53 bits.
    raw: NDArray[np.uint64] = generator.random_raw(4 * _DRAWN_TOGETHER)[::4]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def drawn_token(logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float, chance: float) -> int:
    """Draw a token from the softmax of finite logits over the temperature, after min_p, top_k and top_p.

    chance: the random number in [0, 1) that decides.
    """
    weights = _weights(logits, temperature)
    if min_p:
        weights[weights < min_p] = 0.0  # the largest is 1
    if 0 < top_k < len(weights):
        words = _best(logits, top_k)
        share = top_p * float(weights[words].sum(dtype=np.float64))
        words = np.sort(words[: _within(weights[words], share)])
        return int(words[_place(weights[words], chance)])
    if top_p < 1.0:
        _keep_share(logits, weights, top_p)
    return _place(weights, chance)


def _weights(logits: Logits, temperature: float) -> Logits:
    """Return the weight of each word over that of the most likely one.

    In 32 bits, of which an exponential takes a tenth of the time of 64: sums are what needs more.
    """
    weights: Logits = logits - logits.max()
    # A temperature close to 0 gives minus infinity, and 0 for the most likely word.
    factor = np.float32(min(1.0 / temperature, float(np.finfo(np.float32).max)))
    with np.errstate(over="ignore", under="ignore"):
        np.multiply(weights, factor, out=weights)
        np.exp(weights, out=weights)
    return weights


def _place(weights: Logits, chance: float) -> int:
    """Return the first place whose sum of weights exceeds `chance` of all, at most the last that has a weight."""
    whole = len(weights) // _SUMMED_TOGETHER * _SUMMED_TOGETHER
    sums = weights[:whole].reshape(-1, _SUMMED_TOGETHER).sum(axis=1, dtype=np.float64)
    if whole < len(weights):
        sums = np.append(sums, weights[whole:].sum(dtype=np.float64))
    until = np.cumsum(sums)
    wanted = chance * until[-1]
    part = min(int(np.searchsorted(until, wanted, side="right")), int(np.flatnonzero(sums)[-1]))
    first = part * _SUMMED_TOGETHER
    own = weights[first : first + _SUMMED_TOGETHER]
    within = np.cumsum(own, dtype=np.float64)
    found = int(np.searchsorted(within, wanted - (until[part] - sums[part]), side="right"))
    return first + min(found, int(np.flatnonzero(own)[-1]))


def _keep_share(logits: Logits, weights: Logits, top_p: float) -> None:
    """Set all weights to 0 but the largest that make up a share of their sum.

    Words are ranked by logits: weights of different logits can round to one number.
    """
    total = float(weights.sum(dtype=np.float64))
    # Words below this weight have less than the share that is left out, all of them together.
    least = np.float32(0.5 * (1.0 - top_p) * total / len(weights))
    large = weights >= least
    if np.count_nonzero(large) <= _MOST_SORTED:
        words = _ranked(np.flatnonzero(large), logits)
        words = words[: _within(weights[words], top_p * total)]
        kept = weights[words]
        weights.fill(0.0)
        weights[words] = kept
        return
    # Sorting many would take milliseconds. Positive numbers of 32 bits are in the order of their bits: the first of
    # these are a class, and only the class in which the share is reached is sorted.
    bits = weights.view(np.int32)
    lowest, highest = int(least.view(np.int32)), int(weights.max().view(np.int32))
    shift = max(0, (highest - lowest).bit_length() - _CLASS_BITS)
    edge, before = edge_class(weights, lowest, shift, 1 + ((highest - lowest) >> shift), top_p * total)
    first = lowest + (edge << shift) if edge else 0
    last = _ranked(np.flatnonzero((bits >= first) & (bits < lowest + ((edge + 1) << shift))), logits)
    weights[last[_within(weights[last], top_p * total - before) :]] = 0.0
    weights *= bits >= first


def _within(weights: Logits, share: float) -> int:
    """Return how many of the weights, largest first, make up the share; at least one, at most all."""
    sums = np.cumsum(weights, dtype=np.float64)
    return min(len(sums), int(np.searchsorted(sums, share, side="left")) + 1)


def _ranked(words: NDArray[np.int64], logits: Logits) -> NDArray[np.int64]:
    """Return words, given in order, by their logits: the largest first, the lower id of equals first."""
    return words[np.argsort(-logits[words], kind="stable")]


def _best(values: Logits, count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values, largest first, the lower index of equals first."""
    parts = len(values) // _COMPARED_TOGETHER
    if count < parts:
        # As many parts have a value as large as this, so that none of the largest is smaller.
        largest = values[: parts * _COMPARED_TOGETHER].reshape(_COMPARED_TOGETHER, parts).max(axis=0)
        words = np.flatnonzero(values >= np.partition(largest, -count)[-count])
    else:
        words = np.arange(len(values))
    return _ranked(words, values)[:count]
