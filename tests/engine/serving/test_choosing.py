"""Choosing tokens: each filter against its definition, and the same bits for the same request."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.serving.choosing import next_token, uniform
from engine.serving.sampling import Sampling

_LOGITS = np.array([2.0, 1.0, 0.0, -1.0, 1.0], dtype=np.float32)


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return weights / weights.sum()


def frequencies(draws: int = 4000, answer: tuple[int, ...] = (), **fields: Any) -> np.ndarray:
    """How often each token is drawn over seeds, with the logits above."""
    count = Counter(
        next_token(_LOGITS, Sampling(**{"temperature": 1.0, "seed": seed, **fields}), [0], answer).token
        for seed in range(draws)
    )
    return np.array([count[token] for token in range(len(_LOGITS))]) / draws


def assert_drawn_from(found: np.ndarray, expected: np.ndarray) -> None:
    """Within five standard deviations of a binomial count."""
    spread = 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-12
    assert (np.abs(found - expected) <= spread).all(), (found, expected)
    assert (found[expected == 0] == 0).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    assert_drawn_from(frequencies(temperature=temperature), softmax(_LOGITS, temperature))


def kept(tokens: list[int]) -> np.ndarray:
    only = np.zeros(len(_LOGITS))
    only[tokens] = softmax(_LOGITS)[tokens]
    return only / only.sum()


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),  # 1 and 4 are equal: the lower id
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.9}, [0, 1, 4]),
        ({"top_k": 3, "top_p": 0.7}, [0, 1]),  # top_p counts what top_k left
        ({"min_p": 0.3}, [0, 1, 4]),
        ({"min_p": 1.0}, [0]),
        ({"bias": ((3, 100.0),)}, None),
    ],
    ids=str,
)
def test_filters_leave_what_they_say(fields: dict[str, Any], tokens: list[int] | None) -> None:
    assert_drawn_from(frequencies(**fields), np.eye(5)[3] if tokens is None else kept(tokens))


def test_penalties() -> None:
    """Presence once, frequency by the count, of the answer alone; repetition of the prompt too."""
    answer = (1, 1, 4)
    changed = _LOGITS - np.array([0, 0.5 + 2 * 0.25, 0, 0, 0.5 + 0.25], dtype=np.float32)
    assert_drawn_from(frequencies(answer=answer, presence_penalty=0.5, frequency_penalty=0.25), softmax(changed))
    repeated = np.array([1.0, 0.5, 0.0, -1.0, 0.5], dtype=np.float32)
    assert_drawn_from(frequencies(answer=answer, repetition_penalty=2.0), softmax(repeated))
    negative = next_token(np.array([-1.0, -1.5], dtype=np.float32), Sampling(repetition_penalty=2.0), [0], [])
    assert negative.token == 1, "a negative logit is multiplied"


def test_banned_tokens_come_back_after_the_minimum() -> None:
    sampling = Sampling(min_tokens=2, banned=(0,))
    tokens = [next_token(_LOGITS, sampling, [3], [2] * count).token for count in range(4)]
    assert tokens == [1, 1, 0, 0]


def test_log_probabilities_are_of_the_raw_logits() -> None:
    sampling = Sampling(temperature=7.0, seed=3, logprobs=2, bias=((2, 50.0),))
    chosen = next_token(_LOGITS, sampling, [0], [])
    probabilities = softmax(_LOGITS)
    assert chosen.token == 2
    assert chosen.logprob == pytest.approx(math.log(probabilities[2]))
    assert [word for word, _ in chosen.top] == [0, 1]
    assert [value for _, value in chosen.top] == pytest.approx(np.log(probabilities[[0, 1]]))
    assert next_token(_LOGITS, Sampling(logprobs=0), [0], []).top == ()


def test_a_seed_gives_the_same_draws_and_choices_differ() -> None:
    logits = np.random.default_rng(1).normal(size=500).astype(np.float32)

    def draw(seed: int, choice: int, place: int) -> int:
        return next_token(logits, Sampling(temperature=1.0, seed=seed, choice=choice), [0], [0] * place).token

    first = [draw(1, 0, place) for place in range(30)]
    assert first == [draw(1, 0, place) for place in range(30)]
    assert len(set(first)) > 20
    assert first != [draw(2, 0, place) for place in range(30)] != [draw(1, 1, place) for place in range(30)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=2000),
    st.floats(0.01, 1.0),
    st.integers(0, 50),
    st.integers(0, 2**63),
)
def test_top_p_is_the_smallest_set(values: list[float], top_p: float, top_k: int, seed: int) -> None:
    """The drawn token is in the set found by sorting everything, within the rounding of 32-bit weights."""
    logits = np.array(values, dtype=np.float32)
    token = next_token(logits, Sampling(temperature=1.0, top_p=top_p, top_k=top_k, seed=seed), [0], []).token
    order = np.lexsort((np.arange(len(logits)), -logits))[: top_k or None]
    weights = softmax(logits)[order]
    count = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum() * (1 + 1e-6))) + 1
    assert token in order[:count]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.4}], ids=str)
def test_logits_whose_weights_round_to_one_number_keep_their_order(fields: dict[str, Any]) -> None:
    logits = np.array([0.0, 1e-45], dtype=np.float32)
    assert next_token(logits, Sampling(), [0], []).token == 1, "greedy"
    drawn = {next_token(logits, Sampling(temperature=1.0, seed=seed, **fields), [0], []).token for seed in range(20)}
    assert drawn == {1}


def test_equal_logits_beyond_the_first_candidates() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    drawn = {next_token(flat, Sampling(temperature=1.0, top_p=0.8, seed=seed), [0], []).token for seed in range(300)}
    assert max(drawn) < 4000 and max(drawn) > 3000, "four fifths of the tokens, the lowest ids of equals"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(FloatingPointError):
        next_token(np.array([0.0, bad], dtype=np.float32), Sampling(), [0], [])


def test_what_greedy_decoding_gives_needs_no_logits() -> None:
    assert Sampling(seed=4, choice=2, banned=(1,)).is_greedy
    assert not Sampling(temperature=1.0).is_greedy and not Sampling(temperature=1.0).needs_host
    assert not Sampling(logprobs=0).is_greedy and Sampling(logprobs=0).needs_host
    assert Sampling(min_tokens=1, banned=(1,)).needs_host
    # What leaves the most likely token as it is costs no logits: a load generator's min_tokens with ignore_eos.
    assert Sampling(min_tokens=64, top_p=0.9, top_k=5, min_p=0.1).is_greedy


@pytest.mark.parametrize("temperature", [1e-300, 1e-310, 5e-324])
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_temperature_close_to_0_is_greedy(temperature: float, fields: dict[str, Any]) -> None:
    for shift in (0.0, -50.0):
        chosen = next_token(_LOGITS + np.float32(shift), Sampling(temperature=temperature, **fields), [0], [])
        assert chosen.token == 0


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(0.01, 10),
    st.sampled_from([1e-300, 0.3, 1.0, 2.0]),
    st.sampled_from([0.0, 0.05]),
    st.integers(0, 2**63),
)
def test_a_draw_is_the_first_word_whose_sum_exceeds_its_number(
    words: int, spread: float, temperature: float, min_p: float, seed: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(words) * spread).astype(np.float32)
    sampling = Sampling(temperature=temperature, min_p=min_p, seed=seed)
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    weights[weights < min_p] = 0.0
    token = next_token(logits, sampling, [0], [0] * 3).token
    sums = np.cumsum(weights) / weights.sum()
    before = sums[token - 1] if token else 0.0
    assert weights[token] > 0 and before - 1e-6 <= uniform(sampling, 3) <= sums[token] + 1e-6


def test_the_largest_are_found_among_equals_and_in_every_part() -> None:
    random = np.random.default_rng(3)
    for words in (40, 1000, 4096, 9001):
        logits = random.integers(0, 12, words).astype(np.float32)
        for count in (1, 5, 40):
            chosen = next_token(logits, Sampling(logprobs=count), [0], [])
            expected = np.lexsort((np.arange(words), -logits))[:count]
            assert [word for word, _ in chosen.top] == expected.tolist()


def test_random_numbers_are_those_of_one_generator_for_each_place() -> None:
    for seed, choice in ((0, 0), (5, 3), (2**63 + 7, 1)):
        for place in (0, 1, 63, 64, 200):
            key = np.array([seed, choice], dtype=np.uint64)
            alone = np.random.Generator(np.random.Philox(key=key, counter=place)).random()
            assert uniform(Sampling(seed=seed, choice=choice), place) == alone
