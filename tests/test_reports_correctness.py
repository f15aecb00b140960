"""Planted differences are found and called by their name."""

import math

import numpy as np
import pytest

from reports.experiments.correctness import Answers, answers_of, judge

VOCABULARY = 8


def made(prompts: int = 4) -> Answers:
    """Answers with different numbers for each prompt; the largest logit is 10."""
    random = np.random.default_rng(7)
    logits = {prompt: random.uniform(-9, 9, 2 * VOCABULARY) for prompt in range(prompts)}
    logits[0][3] = -10.0
    return Answers(
        tokens={prompt: random.integers(0, VOCABULARY, 6) for prompt in range(prompts)},
        nll={prompt: random.uniform(1, 3, 5) for prompt in range(prompts)},
        logits=logits,
    )


def changed(
    answers: Answers, prompt: int, logits: float = 0.0, nll: float = 0.0, token_at: int | None = None
) -> Answers:
    tokens = {key: value.copy() for key, value in answers.tokens.items()}
    if token_at is not None:
        tokens[prompt][token_at] += 1
    moved_logits = {key: value.copy() for key, value in answers.logits.items()}
    moved_logits[prompt][0] += logits
    return Answers(tokens, {key: value + nll for key, value in answers.nll.items()}, moved_logits)


def test_equal() -> None:
    reference = made()
    verdict = judge(reference, made(), "float32")
    assert (verdict.word, verdict.reason) == ("equal", "")
    assert (verdict.prompts, verdict.prompts_equal, verdict.first_divergence) == (4, 4, None)
    assert verdict.logit_difference == 0 and verdict.nll_p99 == 0 and verdict.perplexity_change == 0
    tokens = np.concatenate([reference.nll[prompt] for prompt in range(4)])
    assert verdict.perplexity_reference == pytest.approx(math.exp(tokens.mean()))


def test_noise_within_the_tolerance_is_still_equal() -> None:
    verdict = judge(made(), changed(made(), 1, logits=9e-4), "float32")
    assert verdict.word == "equal"
    assert verdict.logit_difference == pytest.approx(9e-4) and verdict.logit_relative == pytest.approx(9e-5)


def test_one_token_changed_agrees_where_all_else_does() -> None:
    verdict = judge(made(), changed(made(), 2, token_at=4), "float32")
    assert verdict.word == "agrees" and verdict.first_divergence == (2, 4) and verdict.prompts_equal == 3


def test_the_first_divergence_is_of_the_first_prompt() -> None:
    verdict = judge(made(), changed(changed(made(), 3, token_at=0), 1, token_at=5), "float32")
    assert verdict.first_divergence == (1, 5) and verdict.prompts_equal == 2


def test_tokens_that_differ_without_any_explanation_differ() -> None:
    bare = Answers(made().tokens, {}, {})
    other = Answers(changed(made(), 0, token_at=0).tokens, {}, {})
    assert judge(bare, bare, "float32").word == "equal"
    assert judge(bare, other, "float32").word == "differs"


def test_logits_off() -> None:
    verdict = judge(made(), changed(made(), 1, logits=2e-3), "float32")
    assert verdict.word == "differs" and "logits are off" in verdict.reason
    assert judge(made(), changed(made(), 1, logits=2e-3), "bfloat16").word == "equal"


def test_perplexity_off() -> None:
    """Adding ln(1.02) to every likelihood raises perplexity by 2 %."""
    verdict = judge(made(), changed(made(), 1, nll=math.log(1.02)), "bfloat16")
    assert verdict.word == "differs" and "perplexity is off by more than 1 %" in verdict.reason
    assert verdict.perplexity_change == pytest.approx(0.02)
    assert verdict.nll_mean == verdict.nll_p99 == pytest.approx(math.log(1.02))
    assert judge(made(), changed(made(), 1, nll=math.log(1.005)), "bfloat16").word == "equal"
    assert judge(made(), changed(made(), 1, nll=math.log(1.005)), "float32").word == "differs"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_values_that_are_not_numbers_never_pass(broken: float) -> None:
    assert judge(made(), changed(made(), 1, logits=broken), "bfloat16").word == "differs"
    assert judge(made(), changed(made(), 1, nll=broken), "bfloat16").word == "differs"
    both = changed(made(), 1, logits=broken)
    assert judge(both, both, "bfloat16").word == "differs"


def test_a_prompt_that_was_not_answered_differs() -> None:
    verdict = judge(made(4), made(3), "float32")
    assert verdict.word == "differs" and verdict.prompts_missing == 1 and "1 prompt of the reference" in verdict.reason
    assert judge(made(2), Answers({}, {}, {}), "float32").word == "not judged"


def test_other_shapes_differ() -> None:
    reference, longer = made(), made()
    longer.logits[0] = np.append(longer.logits[0], 0.0)
    assert judge(reference, longer, "bfloat16").word == "differs"
    shorter = made()
    shorter.tokens[1] = shorter.tokens[1][:3]
    assert judge(reference, shorter, "float32").first_divergence == (1, 3)


def test_answers_of_two_ranks_are_joined_by_prompt() -> None:
    samples = {
        "0/answer_prompts": np.array([0, 1]),
        "1/answer_prompts": np.array([2]),
        "0/answer_tokens": np.array([1, 2, 3, 4]),
        "1/answer_tokens": np.array([5, 6]),
        "0/answer_nll": np.array([0.5, 0.25, 0.125]),
        "1/answer_nll": np.array([1.0]),
        "0/answer_nll_prompts": np.array([0, 0, 1]),
        "1/answer_nll_prompts": np.array([2]),
        "0/answer_logits": np.arange(6.0),
        "1/answer_logits": np.empty(0),
        "0/answer_logit_prompts": np.array([0, 0]),
        "1/answer_logit_prompts": np.empty(0),
    }
    answers = answers_of(samples, vocabulary=3)
    assert {prompt: tokens.tolist() for prompt, tokens in answers.tokens.items()} == {0: [1, 2], 1: [3, 4], 2: [5, 6]}
    assert {prompt: nll.tolist() for prompt, nll in answers.nll.items()} == {0: [0.5, 0.25], 1: [0.125], 2: [1.0]}
    assert {prompt: len(rows) for prompt, rows in answers.logits.items()} == {0: 6}
    with pytest.raises(ValueError, match="no rows of 4"):
        answers_of(samples, vocabulary=4)
    with pytest.raises(ValueError, match="answer_tokens has 3 values"):
        answers_of(samples | {"0/answer_tokens": np.array([1, 2, 3])}, vocabulary=3)


def test_what_was_not_kept_is_not_called_equal() -> None:
    full = made()
    assert judge(full, Answers(full.tokens, full.nll, {}), "float32").word == "not judged"
    assert judge(full, Answers(full.tokens, {0: full.nll[0]}, full.logits), "float32").word == "differs"
