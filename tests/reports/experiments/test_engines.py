"""Engines side by side: who is the fastest whose answers are right, and what this version has not."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from configs.plans.plan import RefusedPoint
from configs.records.record import Status
from reports.correctness.judge import CorrectnessVerdict
from reports.correctness.section import JudgedCell
from reports.document.album import Album
from reports.experiments.engines import choice, engines, engines_lines, engines_sentence, engines_table
from reports.reading.load import StudyResult, load_run
from reports.render import render_report
from reports.sections.experiments import correctness_section, experiment_sections
from reports.tables import failures_table
from tests.support.run_folders.made_studies import (
    cells_of,
    decoded,
    planned,
    words,
    write_failure,
    write_measurements,
    write_plan,
    write_record,
)
from tests.support.run_folders.reports import whole_report

STUDY = """
workload: {kind: generate, new_tokens: 9, num_prompts: 4, batch_size: 1}
experiments:
  engines:
    kind: sweep
    over: {tp: [1, 2], engine: [transformers, deepspeed, onnxruntime, rankwise]}
  right: {kind: correctness, engines: [rankwise, onnxruntime], layouts: [{}, {tp: 2}]}
"""
SECONDS = {"rankwise": 1.0, "transformers": 2.0, "deepspeed": 0.5, "onnxruntime": 1.5}


def made(folder: Path, **seconds: float) -> RunPaths:
    plan = planned(STUDY)
    run = write_plan(folder, plan)
    for _, cell in cells_of(plan):
        write_measurements(run, cell, {**SECONDS, **seconds}[cell.engine], peak_mib=100)
    return run


def judged(study: StudyResult, **words: str) -> list[tuple[str, JudgedCell]]:
    """A verdict on every cell of the sweep."""
    found = []
    for result in study.points(study.plan.experiments[0]):
        word = words.get(result.cell.engine)
        if word is not None:
            verdict = CorrectnessVerdict(word, "off by much" if word == "defect" else "")  # type: ignore[arg-type]
            found.append((result.model, JudgedCell(result.cell.engine, result, verdict)))
    return found


def test_what_an_engine_has_not_is_kept_as_unsupported() -> None:
    experiment, right = planned(STUDY).experiments
    assert {item.label: item.reason for item in experiment.refused} == {
        "tp 1, engine deepspeed": "engine deepspeed requires tp of 2 or more",
        "tp 2, engine onnxruntime": "engine onnxruntime supports one rank only",
    }
    assert len(experiment.points) == 6 and experiment.points[0].baseline
    assert [item.label for item in right.refused] == ["onnxruntime, tp=2, float32"]


def test_a_sweep_over_layouts_alone_refuses_as_before() -> None:
    with pytest.raises(ValueError, match="engine deepspeed requires tp of 2 or more"):
        planned("workload: {kind: generate}\nengine: deepspeed\nexperiments: {s: {kind: sweep, over: {tp: [1, 2]}}}")


def test_a_grid_without_any_cell_is_a_problem() -> None:
    over = "over: {engine: [deepspeed], tp: [1]}"
    with pytest.raises(ValueError, match="no point can be measured: engine deepspeed requires tp"):
        planned(f"workload: {{kind: generate}}\nexperiments: {{s: {{kind: sweep, {over}}}}}")


def test_the_fastest_with_right_answers_is_recommended(tmp_path: Path) -> None:
    study = load_run(made(tmp_path / "run"))
    verdicts = judged(study, rankwise="agrees", deepspeed="defect", transformers="agrees")
    found = engines(study, study.plan.experiments[0], verdicts)
    assert found is not None
    one, two = found.places
    assert [row.engine for row in one.rows] == ["rankwise", "onnxruntime", "transformers", "deepspeed"]
    assert one.rows[1].ratio is not None and one.rows[1].ratio.value == pytest.approx(1.5)
    assert two.rows[0].engine == "deepspeed" and choice(one) == choice(two) == ("rankwise",)
    text = engines_sentence(found)
    assert text.startswith("Use rankwise: it is the fastest at 2 combinations of the other values, 1.50 to 2.00 times")
    assert text.endswith("Its answers agree with the reference.")
    assert engines_lines(found)[-1] == "deepspeed is not recommended, its answers are a defect: off by much."
    rows = engines_table(found).rows
    assert rows[3][-1] == "unsupported: engine deepspeed requires tp of 2 or more"
    assert rows[4][2] == "**defect**: off by much" and rows[4][5] == "fastest"


def test_of_hundreds_of_unsupported_points_some_are_told(tmp_path: Path) -> None:
    """A grid of engines had a line for each, and a correctness experiment a sentence with all of them."""
    plan = planned(STUDY)
    many = tuple(RefusedPoint(label=f"tp {tp}, engine x", values={"tp": tp}, reason="not here") for tp in range(300))
    both = tuple(one.model_copy(update={"refused": many}) for one in plan.experiments)
    run = write_plan(tmp_path / "run", plan.model_copy(update={"experiments": both}))
    for _, cell in cells_of(plan):
        write_measurements(run, cell, SECONDS[cell.engine])
    study = load_run(run)
    sweep = experiment_sections(study, Album(draws=False))["sweep"][0]
    assert "tp 11, engine x is unsupported: not here." in sweep.lines and len(sweep.lines) < 20
    assert "288 more points are unsupported: plan.json lists them." in sweep.lines
    told = correctness_section(study, both[1], study.points(both[1])[0], []).sentence
    assert "tp 11, engine x (not here); and 288 more, which plan.json lists." in str(told)
    table = failures_table(study)
    assert table is not None and table.rows[-1][0].endswith("all of them are in records.parquet and plan.json")


def test_intervals_that_overlap_leave_it_undecided(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    for _, cell in cells_of(plan):
        for repeat in range(10):
            # Now one, now the other is the faster by a tenth.
            seconds = 1.0 + 0.1 * ((repeat % 2) == (cell.engine == "rankwise"))
            write_record(run, cell, repeat, samples=decoded(cell, seconds), figures={"num_prompts": 4})
    study = load_run(run)
    found = engines(study, study.plan.experiments[0])
    assert found is not None
    assert "rankwise" in choice(found.places[0]) and len(choice(found.places[0])) > 1
    assert "ndecided" in engines_sentence(found) and "not judged" in engines_sentence(found)


def test_the_fastest_is_not_the_only_one_where_the_next_shares_no_block(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    for _, cell in cells_of(plan):
        samples = decoded(cell, SECONDS[cell.engine])
        if cell.engine in ("rankwise", "transformers"):
            block = int(cell.engine == "rankwise")
            write_record(run, cell, block, samples=samples, figures={"num_prompts": 4, "measurement_seconds": 2.0})
    study = load_run(run)
    found = engines(study, study.plan.experiments[0])
    assert found is not None
    assert engines_sentence(found).startswith(
        "Use rankwise: it is the fastest at 2 combinations of the other values by its median (no block has both it and "
        "the next). "
    )


def test_another_engine_may_win_elsewhere(tmp_path: Path) -> None:
    study = load_run(made(tmp_path / "run"))
    found = engines(study, study.plan.experiments[0])
    assert found is not None
    assert engines_sentence(found).startswith(
        "It depends on the other values: of 2 combinations rankwise at 1 and deepspeed at 1 is the fastest."
    )
    assert engines_lines(found)[1].startswith("tp 2: use deepspeed (")


def test_an_engine_that_is_wrong_in_one_place_is_named_there(tmp_path: Path) -> None:
    """One line said to use it, the next that it is not recommended; and `Its answers` were of nobody knew whom."""
    study = load_run(made(tmp_path / "run"))
    verdicts = judged(study, rankwise="agrees", deepspeed="agrees", transformers="agrees", onnxruntime="agrees")
    defect = CorrectnessVerdict("defect", "off by much")
    verdicts = [
        (model, replace(item, verdict=defect) if item.label == "rankwise" and item.result.cell.layout.tp == 2 else item)
        for model, item in verdicts
    ]
    found = engines(study, study.plan.experiments[0], verdicts)
    assert found is not None
    assert [choice(place) for place in found.places] == [("rankwise",), ("deepspeed",)]
    assert engines_sentence(found) == (
        "It depends on the other values: of 2 combinations rankwise at 1 and deepspeed at 1 is the fastest. "
        "The answers of rankwise and deepspeed agree with the reference."
    )
    assert engines_lines(found)[-1] == "rankwise is not recommended at tp 2, its answers are a defect: off by much."


def test_the_fastest_of_few_repeats_is_not_told_like_one_of_many(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    for _, cell in cells_of(plan):
        write_measurements(run, cell, {**SECONDS, "deepspeed": 3.0}[cell.engine], repeats=1)
    study = load_run(run)
    found = engines(study, study.plan.experiments[0])
    assert found is not None
    assert engines_sentence(found).startswith(
        "Use rankwise: it is the fastest at 2 combinations of the other values, 1.50 to 2.00 times the next, from too "
        "few pairs for an interval. "
    )


def test_one_engine_alone_has_no_such_section(tmp_path: Path) -> None:
    plan = planned(
        "workload: {kind: generate, num_prompts: 4}\nexperiments: {s: {kind: sweep, over: {batch_size: [1, 2]}}}"
    )
    study = load_run(write_plan(tmp_path / "run", plan))
    assert engines(study, study.plan.experiments[0]) is None


def test_the_report_says_which_engine_and_lists_what_failed(tmp_path: Path) -> None:
    plan = planned(STUDY)
    run = write_plan(tmp_path / "run", plan)
    for _, cell in cells_of(plan):
        if cell.engine == "transformers":
            write_failure(run, cell, Status.UNSUPPORTED, "transformers is not installed")
        else:
            write_measurements(run, cell, SECONDS[cell.engine])
    for _, cell in cells_of(plan, 1):
        write_measurements(run, cell, 1.0, words(0.0), answer_vocabulary=8)
    render_report(run)
    text = whole_report(run)
    assert "#### Which engine" in text and "transformers is not installed" in text
    assert "engines: tp 1, engine deepspeed | all | unsupported" in text
    assert "3 points of the grids are unsupported, listed under failures" in text
    assert "Unsupported, so not judged: onnxruntime, tp=2, float32 (engine onnxruntime supports one rank only)" in text
