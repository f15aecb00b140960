"""Defects that begin late are found by the prompts, the batch and the decode steps of `rankwise verify`.

The former reach is kept beside it: it shows that the defects are nothing before they begin.
"""

from functools import cache

import pytest

from engine.correctness.answers import Sequence, _of_similar_length
from tasks.checks.own_prompts import longest_sequence, own_prompts
from tasks.checks.verification import BATCH_SIZE, NEW_TOKENS, NUM_PROMPTS
from tests.support.answers.correctness_runs import Case, Setting, random_model, reference_case
from tests.support.planted_defects.far import FAR

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, LIMIT, VOCABULARY = 512, 1024, 97
FORMER = {"count": 12, "batch": 4, "longest": 192, "new_tokens": 16}


@cache
def case_of(former: bool) -> Case:
    model = random_model(
        "mistral",
        3,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        max_position_embeddings=LIMIT,
    )
    new_tokens = FORMER["new_tokens"] if former else NEW_TOKENS
    positions = FORMER["longest"] + new_tokens if former else longest_sequence(model.config.to_dict(), "model")
    room = positions - new_tokens
    count = FORMER["count"] if former else NUM_PROMPTS
    lines = own_prompts(None, VOCABULARY, count, room, new_tokens)
    prompts = [list(line["tokens"]) for line in lines]
    prompts[-1] = (prompts[-1] * room)[:room]  # as `PromptedWorkload.longest_tokens`
    return reference_case("reach", model, prompts, new_tokens, ("float32",))


@pytest.mark.parametrize("name", FAR)
def test_a_defect_that_begins_late_is_found(name: str) -> None:
    verdict = case_of(former=False).verdict(Setting(batch=BATCH_SIZE), FAR[name])
    assert verdict.word == "defect" and verdict.findings[0].excess > 10, verdict.reason


@pytest.mark.parametrize("name", FAR)
def test_the_former_reach_did_not_find_it(name: str) -> None:
    assert case_of(former=True).verdict(Setting(batch=FORMER["batch"]), FAR[name]).word == "agrees"


@pytest.mark.parametrize("setting", [Setting(batch=BATCH_SIZE), Setting(tp=2, pp=2, batch=BATCH_SIZE)], ids=str)
def test_a_clean_run_agrees(setting: Setting) -> None:
    verdict = case_of(former=False).verdict(setting)
    assert verdict.word == "agrees", verdict.reason
    assert verdict.nearest is not None and verdict.nearest.excess < 0.9


def test_rows_of_similar_length_share_a_batch_and_lose_at_most_half_of_the_steps() -> None:
    lengths = [1, 2, 9, 16, 17, 30, 33, 34, 200]
    rows = [Sequence(place, [0] * length, []) for place, length in enumerate(lengths)]
    assert _of_similar_length(rows, 32) == [[1], [2, 3], [4, 5], [6, 7, 8]]
    assert _of_similar_length(rows, 8) == [[1], [2, 3, 4, 5, 6, 7, 8]]
