"""Choose one token from the logits of one row, with numpy alone: the same bits in any company.

    chosen = next_token(logits, sampling, prompt, answer)      # float32 [words]
    chosen.token, chosen.logprob, chosen.top

Penalties and the order of the filters are those of vLLM (https://docs.vllm.ai/en/stable/api/vllm/sampling_params.html):
log-probabilities are of the raw logits; bias and penalties change the logits; then temperature, min_p, top_k and top_p.
The random number of a token depends on seed, choice and the token's place only, so that a seeded answer is repeatable
whatever else is computed.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_FIRST_CANDIDATES = 256
_DRAWN_TOGETHER = 64
"""Random numbers of an answer that are made at once: a generator costs more than its numbers."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen. temperature 0: the most likely one.

    top_k 0 and top_p 1: all. seed, choice: of the random numbers. logprobs: how many of the most likely words are
    reported; None: no log-probabilities. banned: never chosen before `min_tokens` tokens. bias: added to logits by id.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    banned: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def needs_logits(self) -> bool:
        """Whether more than the most likely token is asked for. Filters leave that as it is."""
        return self.temperature != 0.0 or self.needs_host

    @property
    def needs_host(self) -> bool:
        """Whether a choice needs more than the logits, temperature, filters and a random number."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.logprobs is not None
            or bool(self.bias)
            or (self.min_tokens > 0 and bool(self.banned))
        )


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
        token = _drawn(changed, sampling, len(answer))
    if sampling.logprobs is None:
        return Chosen(token)
    wide = logits.astype(np.float64)
    largest = wide.max()
    log_total = largest + np.log(np.exp(wide - largest).sum())
    best = _best(logits, sampling.logprobs) if sampling.logprobs else np.empty(0, dtype=np.int64)
    return Chosen(
        token, float(wide[token] - log_total), tuple((int(word), float(wide[word] - log_total)) for word in best)
    )


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


def _drawn(logits: Logits, sampling: Sampling, place: int) -> int:
    """Draw a token from the softmax of the logits over the temperature, after min_p, top_k and top_p."""
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # of a temperature close to 0: minus infinity
        weights = np.exp((wide - wide.max()) / sampling.temperature)
    weights[weights < sampling.min_p] = 0.0  # the largest is 1
    words = None
    if sampling.top_k or sampling.top_p < 1.0:
        words = _kept(logits, weights, sampling)
        weights = weights[words]
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, uniform(sampling, place) * sums[-1], side="right"))
    index = min(index, int(np.flatnonzero(weights)[-1]))
    return index if words is None else int(words[index])


def _kept(logits: Logits, weights: NDArray[np.float64], sampling: Sampling) -> NDArray[np.int64]:
    """Return the words that top_k and top_p keep, the most likely first.

    They are ranked by logits: weights of different logits can round to one number.
    """
    if sampling.top_k and sampling.top_k < len(weights):
        words = _best(logits, sampling.top_k)
        return words[: _within(weights[words], float(weights[words].sum()), sampling.top_p)]
    total, count = float(weights.sum()), _FIRST_CANDIDATES
    while True:
        words = _best(logits, count)
        kept = _within(weights[words], total, sampling.top_p)
        if kept < len(words) or len(words) == len(weights):
            return words[:kept]
        count *= 8


def _within(sorted_weights: NDArray[np.float64], total: float, share: float) -> int:
    """Return how many of the weights, largest first, make up the share of the total; at least one."""
    sums = np.cumsum(sorted_weights)
    return min(len(sums), int(np.searchsorted(sums, share * total, side="left")) + 1)


def _best(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values, largest first, the lower index of equals first."""
    count = min(count, len(values))
    if count < len(values):
        edge = np.partition(values, -count)[-count]
        above = np.flatnonzero(values > edge)
        chosen = np.concatenate([above, np.flatnonzero(values == edge)[: count - len(above)]])
    else:
        chosen = np.arange(len(values))
    return chosen[np.lexsort((chosen, -values[chosen]))]
