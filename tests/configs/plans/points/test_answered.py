"""A correctness experiment answers at the sizes that the study's other cells measure."""

from typing import Any

import pytest

from configs.plans.expand import expand
from configs.plans.plan import PlannedModel
from configs.spec.study import StudyError, parse_study
from configs.workloads.generate import GenerateWorkload
from configs.workloads.prompted import PromptedWorkload
from configs.workloads.seq2seq import Seq2SeqWorkload

MODEL = PlannedModel(name="m", identity="folder:abc", manifest="unused")
SWEEP = {"kind": "sweep", "over": {"batch_size": [1, 32], "prompt_tokens": [16, 900]}}


def answered(
    right: dict[str, Any],
    others: dict[str, Any],
    references: dict[str, PromptedWorkload] | None = None,
    lines: int = 0,
    **work: Any,
) -> tuple[GenerateWorkload, GenerateWorkload]:
    """The workloads of the reference and of the first candidate; correctness comes first in the file."""
    data = {
        "study": "s",
        "models": [{"id": "./m", "name": "m"}],
        "workload": {"kind": "generate", "new_tokens": 48} | work,
        "experiments": {"right": {"kind": "correctness", "layouts": [{"tp": 2}]} | right} | others,
    }
    plan = expand(parse_study(data), [MODEL], {"r.zip": "sha"}, lambda workload: lines, None, references)
    assert [experiment.name for experiment in plan.experiments] == ["right", *others]
    found = [plan.cells[point.cell].workload for point in plan.experiments[0].points]
    reference, candidate = found[0], found[1]
    assert isinstance(reference, GenerateWorkload) and isinstance(candidate, GenerateWorkload)
    return reference, candidate


def sizes(workload: GenerateWorkload) -> tuple[int | None, int, int, int | None]:
    return workload.num_prompts, workload.batch_size, workload.new_tokens, workload.longest_tokens


def test_the_largest_batch_the_most_steps_and_the_longest_prompt_are_answered() -> None:
    reference, candidate = answered({}, {"grid": SWEEP})
    assert sizes(candidate) == (32, 32, 48, 900) and sizes(reference) == (32, 1, 48, 900)
    assert reference.noise_dtypes == ("float32",) and candidate.noise_dtypes == ()


def test_what_the_author_says_stands() -> None:
    right = {"prompts": 6, "new_tokens": 5, "positions": 300, "base": {"batch_size": 2}}
    assert sizes(answered(right, {"grid": SWEEP})[1]) == (6, 2, 5, 295)


def test_without_a_word_the_price_is_bounded() -> None:
    large = {"kind": "sweep", "over": {"batch_size": [512], "prompt_tokens": [30000], "new_tokens": [4000]}}
    assert sizes(answered({}, {"grid": large})[1]) == (64, 64, 64, 2048 - 64)


def test_a_study_of_correctness_alone_answers_its_own_workload() -> None:
    assert sizes(answered({}, {}, batch_size=3)[1]) == (20, 3, 48, None)
    assert sizes(answered({}, {}, prompts="p.jsonl", lines=7)[1]) == (7, 1, 48, None)


def test_a_micro_batch_is_no_larger_than_the_batch_that_is_answered() -> None:
    work = {"batch_size": 128, "micro_batch_size": 100, "num_prompts": 128}
    for right, size in (({}, 64), ({"prompts": 20}, 20)):
        reference, candidate = answered(right, {}, **work)
        assert (candidate.batch_size, candidate.micro_batch_size, reference.micro_batch_size) == (size, size, None)
    assert answered({}, {}, batch_size=8, micro_batch_size=4)[1].micro_batch_size == 4
    saved = GenerateWorkload(prompts="ab" * 32, num_prompts=9, answers=True, noise_dtypes=("float32",))
    assert answered({"reference": "r.zip"}, {}, {"r.zip": saved}, **work)[1].micro_batch_size == 9
    with pytest.raises(StudyError, match="micro_batch_size: got 9, more than the batch of 8"):
        answered({}, {}, batch_size=8, micro_batch_size=9)


def test_a_saved_reference_brings_its_prompts() -> None:
    saved = GenerateWorkload(
        prompts="ab" * 32, num_prompts=9, new_tokens=6, longest_tokens=100, answers=True, noise_dtypes=("float32",)
    )
    reference, candidate = answered({"reference": "r.zip"}, {"grid": SWEEP}, {"r.zip": saved})
    assert reference == saved
    assert sizes(candidate) == (9, 9, 6, 100) and (candidate.prompts, candidate.noise_dtypes) == ("ab" * 32, ())
    with pytest.raises(StudyError) as raised:
        answered({"reference": "r.zip", "dtypes": ["bfloat16"]}, {}, {"r.zip": saved})
    assert "experiments.right.reference: r.zip: dtypes: noise of float32 only" in raised.value.problems[0]
    with pytest.raises(StudyError, match="a saved seq2seq workload, expected generate"):
        answered({"reference": "r.zip"}, {}, {"r.zip": Seq2SeqWorkload(noise_dtypes=("float32",))})
    with pytest.raises(StudyError, match="prompts: determined by the file of `reference`"):
        answered({"reference": "r.zip", "prompts": 5}, {}, {"r.zip": saved})
