"""The judge on made-up answers: noise of a known size agrees, everything beyond it is a defect and says where."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reports.correctness import section
from reports.correctness.data import Answers, ReductionNoise, Scored, answers_of, noise_of
from reports.correctness.judge import FREEDOM, CorrectnessVerdict, judge_answers, limit_of
from reports.correctness.section import JudgedCell, correctness_table, ladder_lines, verdict_text
from reports.reading.load import load_run
from tests.support.run_folders.made_studies import cells_of, planned, words, write_measurements, write_plan

VOCABULARY, TOKENS, NEW, ORDERS, PROMPTS, TOP = 50, 30, 6, 4, 8, 4
LEVEL = 1e-3


def made_reference() -> Answers:
    """Answers of PROMPTS prompts; logits are kept at 10 positions of each."""
    random = np.random.default_rng(7)
    rows = {prompt: random.normal(0, 3, (10, VOCABULARY)).astype(np.float32) for prompt in range(PROMPTS)}
    scored = Scored(
        nll={prompt: random.uniform(1, 3, TOKENS - 1) for prompt in range(PROMPTS)},
        nll_positions={prompt: np.arange(TOKENS - 1) for prompt in range(PROMPTS)},
        logits=rows,
        positions={prompt: np.linspace(0, TOKENS - 1, 10).astype(np.int64) for prompt in range(PROMPTS)},
    )
    top_tokens = {prompt: np.tile(np.arange(TOP), (NEW, 1)) + prompt for prompt in range(PROMPTS)}
    leads = {prompt: np.tile([9.0, 8.0, 7.0, 6.0], (NEW, 1)) for prompt in range(PROMPTS)}
    return Answers(
        tokens={prompt: top_tokens[prompt][:, 0] for prompt in range(PROMPTS)},
        prefill=scored,
        gaps={prompt: np.zeros(NEW) for prompt in range(PROMPTS)},
        top_tokens=top_tokens,
        top_logits=leads,
    )


def noisy(reference: Answers, seed: int, level: float = LEVEL) -> Answers:
    """The reference with noise of `level` on everything, the last rows through a cache too."""
    random = np.random.default_rng(seed)
    own = reference.prefill

    def scored() -> Scored:
        return Scored(
            nll={prompt: each + random.normal(0, level, each.shape) for prompt, each in own.nll.items()},
            nll_positions=own.nll_positions,
            logits={
                prompt: (each + random.normal(0, level, each.shape)).astype(np.float32)
                for prompt, each in own.logits.items()
            },
            positions=own.positions,
        )

    return replace(reference, prefill=scored(), cached=scored())


def made_noise(reference: Answers, level: float = LEVEL, orders: int = ORDERS) -> ReductionNoise:
    """Noise as it would have been measured."""
    from reports.correctness.statistics import candidate_errors

    random = np.random.default_rng(3)
    found = [noisy(reference, 100 + order, level) for order in range(orders)]
    errors = [candidate_errors(reference.prefill, each.prefill) for each in found]
    prompts = range(PROMPTS)

    def by_prompt(name: str) -> dict[int, np.ndarray]:
        return {p: np.stack([getattr(each, name)[each.row_prompts == p] for each in errors]) for p in prompts}

    return ReductionNoise(
        nll={p: np.stack([each.nll[each.token_prompts == p] for each in errors]) for p in prompts},
        rms=by_prompt("rms"),
        largest=by_prompt("largest"),
        kl=by_prompt("kl"),
        flips={p: np.zeros((orders, 10)) for p in prompts},
        gaps={p: random.normal(0, level, (orders, NEW, TOP - 1)) for p in prompts},
        columns=np.stack([each.columns for each in errors]),
        chain=np.ones(orders),
    )


REFERENCE = made_reference()
NOISE = made_noise(REFERENCE)


def test_noise_agrees_whatever_its_seed() -> None:
    for seed in range(40):
        verdict = judge_answers(REFERENCE, noisy(REFERENCE, seed), NOISE)
        assert verdict.word == "agrees" and verdict.reason == "" and not verdict.findings
        assert verdict.nearest is not None and verdict.nearest.excess < 0.9
    assert judge_answers(REFERENCE, REFERENCE, NOISE).word == "agrees"


def test_more_noise_than_a_correct_program_may_have_is_a_defect() -> None:
    assert judge_answers(REFERENCE, noisy(REFERENCE, 1, 1.5 * LEVEL), NOISE).word == "agrees"
    verdict = judge_answers(REFERENCE, noisy(REFERENCE, 1, 3.5 * LEVEL), NOISE)
    assert verdict.word == "defect" and "times the noise" in verdict.reason


def test_a_model_whose_sums_are_long_chains_is_given_their_noise() -> None:
    """What torch sums in blocks, a correct kernel may sum in one chain."""
    chained = replace(NOISE, chain=np.full(ORDERS, 3.0))
    assert judge_answers(REFERENCE, noisy(REFERENCE, 1, 3.5 * LEVEL), chained).word == "agrees"
    assert judge_answers(REFERENCE, noisy(REFERENCE, 1, 12 * LEVEL), chained).word == "defect"


def test_the_limit_grows_with_the_spread_of_the_orders() -> None:
    assert limit_of(np.array([1.0, 1.0, 1.0]), FREEDOM) == FREEDOM
    assert limit_of(np.array([1.0, 1.5, 1.2]), FREEDOM) == pytest.approx(FREEDOM * 1.5 * 1.5)
    assert limit_of(np.array([0.0, 2.0]), FREEDOM) == pytest.approx(FREEDOM * 3 * 2)


@pytest.mark.parametrize(("level", "said"), [(0.0, "zero"), (np.nan, "not finite")])
def test_noise_that_gives_no_limit_is_not_judged_by(level: float, said: str) -> None:
    still = ReductionNoise(
        nll={p: each * level for p, each in NOISE.nll.items()},
        rms={p: each * level for p, each in NOISE.rms.items()},
        largest={p: each * level for p, each in NOISE.largest.items()},
        kl={p: each * level for p, each in NOISE.kl.items()},
        flips=NOISE.flips,
        gaps={p: each * level for p, each in NOISE.gaps.items()},
        columns=NOISE.columns * level,
        chain=NOISE.chain,
    )
    verdict = judge_answers(REFERENCE, noisy(REFERENCE, 1, 1e-9), still)
    assert verdict.word == "not judged" and f"the noise of the reference is {said}" in verdict.reason
    if level == 0:  # what has a limit without noise is still judged
        assert judge_answers(REFERENCE, noisy(REFERENCE, 1, 10.0), still).word == "defect"


def moved_row(answers: Answers) -> None:
    answers.prefill.logits[3][4] += np.random.default_rng(0).normal(0, 12 * LEVEL, VOCABULARY).astype(np.float32)


def moved_word(answers: Answers) -> None:
    for rows in answers.prefill.logits.values():
        rows[:, 17] += 6 * LEVEL


def moved_logit(answers: Answers) -> None:
    answers.prefill.logits[2][5, 9] += 40 * LEVEL


def moved_token(answers: Answers) -> None:
    answers.prefill.nll[5][11] += 40 * LEVEL


def moved_prompt(answers: Answers) -> None:
    answers.prefill.nll[6][:] += np.random.default_rng(0).normal(0, 6 * LEVEL, TOKENS - 1)


def biased(answers: Answers) -> None:
    for nll in answers.prefill.nll.values():
        nll += 1.2 * LEVEL


def moved_cache(answers: Answers) -> None:
    for rows in answers.cached.logits.values():
        rows[-1] += np.random.default_rng(0).normal(0, 8 * LEVEL, VOCABULARY).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "statistic", "prompt", "position"),
    [
        (moved_row, "logits at a position", 3, 12),
        (moved_word, "logits of a word", None, None),
        (moved_logit, "a single logit", 2, 16),
        (moved_token, "likelihood of a token", 5, 11),
        (moved_prompt, "likelihoods of a prompt", 6, None),
        (biased, "mean likelihood", None, None),
        (moved_cache, "through the cache", None, None),
    ],
)
def test_each_kind_of_defect_has_its_statistic(
    change: Callable[[Answers], None], statistic: str, prompt: int | None, position: int | None
) -> None:
    answers = noisy(REFERENCE, 5)
    change(answers)
    verdict = judge_answers(REFERENCE, answers, NOISE)
    assert verdict.word == "defect"
    found = [finding for finding in verdict.findings if statistic in finding.name]
    assert found, [finding.name for finding in verdict.findings]
    if prompt is not None:
        assert (found[0].statistic.prompt, found[0].statistic.position) == (prompt, position)


def decoded(prompt: int, place: int, token: int, gap: float = 0.0) -> Answers:
    """Answers with one other token, which the cell itself gives `gap` less than its best."""
    answers = noisy(REFERENCE, 5)
    tokens, gaps = dict(answers.tokens), dict(answers.gaps)
    tokens[prompt] = tokens[prompt].copy()
    tokens[prompt][place] = token
    gaps[prompt] = gaps[prompt].copy()
    gaps[prompt][place] = gap
    return replace(answers, tokens=tokens, gaps=gaps)


def test_a_divergence_is_judged_by_the_margin_of_the_reference() -> None:
    """The reference leads by 1: no near tie. With a lead of one level of noise it is one."""
    second = int(REFERENCE.top_tokens[2][3, 1])
    wrong = judge_answers(REFERENCE, decoded(2, 3, second), NOISE)
    assert wrong.word == "defect" and "lead of the reference's token" in wrong.reason
    assert wrong.ladder is not None
    assert (wrong.ladder.first_divergence, wrong.ladder.margin, wrong.ladder.prompts_equal) == ((2, 3), 1.0, 7)
    near = {**REFERENCE.top_logits, 2: REFERENCE.top_logits[2] - np.array([1.0 - LEVEL, 0, 0, 0])}
    close = judge_answers(replace(REFERENCE, top_logits=near), decoded(2, 3, second), NOISE)
    assert close.word == "agrees" and close.ladder is not None
    assert close.ladder.margin == pytest.approx(LEVEL, rel=1e-6) and close.ladder.prompts_equal == 7
    # A token that is not among the reference's best is further away than the last of them.
    assert judge_answers(replace(REFERENCE, top_logits=near), decoded(2, 3, 49), NOISE).word == "defect"


def test_a_decoded_token_is_found_where_it_stands() -> None:
    """After the prompt, or after the first token of a decoder with a stack of its own."""
    wrong = decoded(2, 3, int(REFERENCE.top_tokens[2][3, 1]))
    for own_stack, position in ((False, TOKENS + 3), (True, 4)):
        verdict = judge_answers(REFERENCE, wrong, NOISE, own_stack)
        assert f"(prompt 2, position {position})" in verdict.reason


@pytest.mark.parametrize(("kind", "own_stack"), [("generate", False), ("seq2seq", True)])
def test_an_encoder_decoder_is_judged_as_one(
    kind: str, own_stack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(f"""
workload: {{kind: {kind}, new_tokens: 3}}
experiments: {{right: {{kind: correctness, prompts: 4}}}}""")
    run, judged = write_plan(tmp_path, plan), []
    for _, cell in cells_of(plan):
        write_measurements(run, cell, 0.1, answers=words(0), answer_vocabulary=8)
    verdict = CorrectnessVerdict("agrees", "")
    monkeypatch.setattr(section, "judge_answers", lambda *given: judged.append(given[3]) or verdict)
    study = load_run(run)
    section.judge_experiment(study, study.plan.experiments[0])
    assert judged == [own_stack]


def test_a_cell_whose_decoding_contradicts_its_own_prefill_is_a_defect() -> None:
    token = int(REFERENCE.tokens[4][2])
    verdict = judge_answers(REFERENCE, decoded(4, 2, token, gap=0.5), NOISE)
    assert verdict.word == "defect" and "lead over the decoded token" in verdict.reason


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_values_that_are_not_numbers_are_a_defect(broken: float) -> None:
    for part in ("prefill", "cached"):
        answers = noisy(REFERENCE, 1)
        getattr(answers, part).logits[3][0, 0] = broken
        assert "not finite" in judge_answers(REFERENCE, answers, NOISE).reason
        answers = noisy(REFERENCE, 1)
        getattr(answers, part).nll[3][0] = broken
        assert judge_answers(REFERENCE, answers, NOISE).word == "defect"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_reference_without_numbers_judges_nobody(broken: float) -> None:
    """A damaged checkpoint is as broken in the reference as in the cell."""
    reference = noisy(REFERENCE, 2)
    reference.prefill.logits[3][0, 0] = broken
    verdict = judge_answers(reference, reference, NOISE)
    assert (verdict.word, verdict.reason) == ("not judged", "the reference's logits of prompt 3 are not finite")


def test_prompts_of_one_token_are_not_called_a_reference_without_logits() -> None:
    single = replace(REFERENCE, prefill=replace(REFERENCE.prefill, nll={}, nll_positions={}))
    verdict = judge_answers(single, single, NOISE)
    assert verdict.word == "not judged" and "every prompt is a single token" in verdict.reason


def test_what_is_missing_or_unequal_is_a_defect() -> None:
    fewer = {prompt: tokens for prompt, tokens in REFERENCE.tokens.items() if prompt != 3}
    assert (
        "1 prompt of the reference"
        in judge_answers(REFERENCE, replace(noisy(REFERENCE, 1), tokens=fewer), NOISE).reason
    )
    unequal = judge_answers(REFERENCE, replace(noisy(REFERENCE, 1), unequal=(2,)), NOISE)
    assert unequal.word == "defect" and "ranks of a replica answer prompt 2" in unequal.reason
    shorter = noisy(REFERENCE, 1)
    shorter.prefill.nll[1] = shorter.prefill.nll[1][:5]
    assert judge_answers(REFERENCE, shorter, NOISE).word == "defect"


def test_what_cannot_be_judged() -> None:
    answers = noisy(REFERENCE, 1)
    assert judge_answers(REFERENCE, answers, None).word == "not judged"
    assert "fewer than" in judge_answers(REFERENCE, answers, made_noise(REFERENCE, orders=2)).reason
    bare = replace(answers, prefill=replace(answers.prefill, logits={}))
    assert judge_answers(REFERENCE, bare, NOISE).word == "not judged"
    assert judge_answers(replace(REFERENCE, prefill=Scored()), answers, NOISE).word == "not judged"


def test_the_ladder() -> None:
    answers = noisy(REFERENCE, 9)
    ladder = judge_answers(REFERENCE, answers, NOISE).ladder
    assert ladder is not None
    known = np.concatenate(list(REFERENCE.prefill.nll.values()))
    own = np.concatenate(list(answers.prefill.nll.values()))
    assert ladder.perplexity_reference == pytest.approx(math.exp(known.mean()))
    assert ladder.perplexity_difference == pytest.approx(math.exp(own.mean()) - math.exp(known.mean()), rel=1e-6)
    # Standard error of a mean of independent changes, times the perplexity.
    expected = math.exp(known.mean()) * LEVEL / math.sqrt(len(own))
    assert ladder.perplexity_error == pytest.approx(expected, rel=0.6)
    assert ladder.top1 == 1.0 and ladder.rows == 80 and ladder.prompts_equal == PROMPTS
    assert LEVEL < ladder.logit_difference < 6 * LEVEL
    assert ladder.kl_mean == pytest.approx(LEVEL**2 / 2, rel=0.5)


def test_text_of_a_verdict() -> None:
    verdict = judge_answers(REFERENCE, noisy(REFERENCE, 1), NOISE)
    assert verdict_text(verdict) == "**agrees**"
    assert verdict_text(replace(verdict, in_float32="agrees")) == "**agrees**: in float32: agrees"
    lines = ladder_lines(verdict)
    assert lines[0] == "prompts with every token equal: 8 of 8" and any(line.startswith("KL p99") for line in lines)
    assert ladder_lines(CorrectnessVerdict("defect", "no answers")) == []
    assert correctness_table([]).rows == ()


def test_columns_say_that_their_parentheses_are_the_noise() -> None:
    """The report says of all its tables that parentheses hold a 95 % interval."""
    result: Any = SimpleNamespace(kind=SimpleNamespace(answers="tokens"))
    table = correctness_table([JudgedCell("one", result, judge_answers(REFERENCE, noisy(REFERENCE, 1), NOISE))])
    (row,) = table.rows
    assert "(" in "".join(row[2:])
    for title, value in zip(table.columns[2:], row[2:], strict=True):
        assert title.endswith("(noise)") is value.endswith(")"), title


def samples_of_two_ranks() -> dict[str, np.ndarray]:
    """Prompt 0 by ranks 0 and 1 of one replica, of which 1 speaks; prompt 1 by rank 2."""
    return {
        "0/answer_prompts": np.array([0]), "1/answer_prompts": np.array([0]), "2/answer_prompts": np.array([1]),
        "0/answer_tokens": np.array([1, 2]), "1/answer_tokens": np.array([1, 2]), "2/answer_tokens": np.array([3, 4]),
        "1/answer_nll": np.array([0.5, 0.25]), "1/answer_nll_prompts": np.array([0, 0]),
        "2/answer_nll": np.array([1.0]), "2/answer_nll_prompts": np.array([1]),
        "1/answer_logits": np.arange(6.0), "1/answer_logit_prompts": np.array([0, 0]),
        "1/answer_logit_positions": np.array([0, 2]),
        "2/answer_logits": np.arange(3.0), "2/answer_logit_prompts": np.array([1]),
        "2/answer_logit_positions": np.array([1]),
        "1/answer_gaps": np.array([0.0, 0.5]), "2/answer_gaps": np.array([0.0, 0.0]),
        "1/answer_top_tokens": np.array([1, 0, 2, 1]), "2/answer_top_tokens": np.array([3, 0, 4, 1]),
        "1/answer_top_logits": np.arange(4.0), "2/answer_top_logits": np.arange(4.0),
    }  # fmt: skip


def test_answers_of_ranks_are_joined_by_prompt() -> None:
    answers = answers_of(samples_of_two_ranks(), vocabulary=3)
    assert {prompt: tokens.tolist() for prompt, tokens in answers.tokens.items()} == {0: [1, 2], 1: [3, 4]}
    assert {prompt: nll.tolist() for prompt, nll in answers.prefill.nll.items()} == {0: [0.5, 0.25], 1: [1.0]}
    assert {prompt: rows.shape for prompt, rows in answers.prefill.logits.items()} == {0: (2, 3), 1: (1, 3)}
    assert answers.prefill.positions[0].tolist() == [0, 2] and answers.gaps[0].tolist() == [0.0, 0.5]
    assert answers.top_tokens[1].tolist() == [[3, 0], [4, 1]] and answers.unequal == ()
    other = samples_of_two_ranks() | {"0/answer_tokens": np.array([1, 9])}
    assert answers_of(other, vocabulary=3).unequal == (0,)


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no 2 rows of 4"):
        answers_of(samples_of_two_ranks(), vocabulary=4)
    with pytest.raises(ValueError, match=r"2/answer_top_tokens has 3 values"):
        broken = samples_of_two_ranks() | {
            "2/answer_prompts": np.array([1, 2]), "2/answer_gaps": np.zeros(4), "2/answer_top_tokens": np.arange(3)
        }  # fmt: skip
        answers_of(broken, vocabulary=3)
    lacking = samples_of_two_ranks()
    del lacking["1/answer_logits"]
    with pytest.raises(ValueError, match="no column 1/answer_logits"):
        answers_of(lacking, vocabulary=3)
    assert noise_of(samples_of_two_ranks(), REFERENCE, "float16") is None
