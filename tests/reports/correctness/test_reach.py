"""What a comparison of answers did not reach is named: against the study's other cells, or the model's limits."""

from pathlib import Path
from typing import Any

import pytest

from reports.correctness.reach import Reach
from reports.correctness.section import correctness_table, judge_experiment
from reports.reading.load import load_run
from tests.support.run_folders.made_studies import cells_of, planned, words, write_measurements, write_plan

CORRECTNESS = "{kind: correctness, prompts: 4, new_tokens: 3, positions: 8, base: {batch_size: 2}}"


def reach(folder: Path, others: str, **figures: Any) -> Reach:
    """Of answers to prompts of 6 tokens and 3 new ones, of which none went through the cache."""
    plan = planned(f"""
workload: {{kind: generate, new_tokens: 3, batch_size: 2}}
experiments:
  right: {CORRECTNESS}
{others}""")
    run = write_plan(folder, plan)
    for _, cell in cells_of(plan):
        write_measurements(run, cell, 0.1, answers=words(0), answer_vocabulary=8, **figures)
    for experiment in range(1, len(plan.experiments)):
        for _, cell in cells_of(plan, experiment):
            write_measurements(run, cell, 0.1, max_prompt_tokens=40)
    study = load_run(run)
    _, [judged] = judge_experiment(study, study.plan.experiments[0])
    assert judged.reach is not None
    assert (judged.reach.missed_text in correctness_table([judged]).markdown()) or not judged.reach.missed
    return judged.reach


@pytest.mark.parametrize(
    ("longest", "reached", "missed"), [(8, 12, ()), (30, 30, ()), (50, 50, ()), (60, 50, ("positions 51 to 60",))]
)
def test_sources_and_answers_of_an_encoder_decoder_lie_in_stacks_of_their_own(
    longest: int, reached: int, missed: tuple[str, ...], tmp_path: Path
) -> None:
    """Forced answers have 6 tokens, and 12 are decoded: the longest source is what is reached beyond those."""
    plan = planned(f"""
workload: {{kind: seq2seq, new_tokens: 12, prompt_tokens: 8}}
experiments:
  right: {{kind: correctness, prompts: 4{", positions: 50" if longest == 60 else ""}}}
  grid: {{kind: sweep, over: {{prompt_tokens: {sorted({8, longest})}}}}}""")
    run = write_plan(tmp_path, plan)
    for _, cell in cells_of(plan):
        write_measurements(run, cell, 0.1, answers=words(0, new=12), answer_vocabulary=8)
    study = load_run(run)
    _, [judged] = judge_experiment(study, study.plan.experiments[0])
    assert judged.reach is not None and judged.reach.positions == reached
    assert [text for text in judged.reach.missed if "position" in text] == list(missed)


def test_without_other_cells_the_limits_of_the_model_count(tmp_path: Path) -> None:
    found = reach(tmp_path, "", model_max_positions=128, model_window=64)
    assert (found.positions, found.rows, found.steps) == (9, 2, 0)
    assert found.missed == (
        "positions 10 to 128",
        "the attention window of 64 tokens",
        "batches of more than 2",
        "decode steps from 1",
    )
    assert found.text == "sequences of 9 tokens, batches of 2, 0 decode steps"


def test_a_model_without_a_known_limit(tmp_path: Path) -> None:
    assert reach(tmp_path, "").missed[0] == "positions from 10"


@pytest.mark.parametrize(
    ("others", "missed"),
    [
        (
            "  grid: {kind: sweep, over: {batch_size: [1, 8], prompt_tokens: [50]}}",
            ("positions 10 to 53", "rows 3 to 8 of a batch", "decode steps 1 to 3"),
        ),
        # Of prompts from a file, what the ranks counted.
        ("  grid: {kind: sweep, over: {batch_size: [2]}}", ("positions 10 to 43", "decode steps 1 to 3")),
    ],
)
def test_what_other_cells_measure_counts(others: str, missed: tuple[str, ...], tmp_path: Path) -> None:
    found = reach(tmp_path, others, model_max_positions=128, model_window=64)
    assert found.missed == missed
