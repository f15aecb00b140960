"""Recommendations: who wins, and whether that is sure."""

from pathlib import Path
from typing import Any

import pytest

from configs.plans.plan import PlannedModel
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.targets.target import LocalTarget, SlurmTarget
from configs.workloads.script import ScriptWorkload
from reports.decisions.cost import cell_costs
from reports.decisions.decision import decide
from reports.decisions.next_measurement import next_lines
from reports.decisions.objectives import judge_objectives
from reports.decisions.pareto import user_fronts
from reports.decisions.recommendation import Recommendation, open_questions, recommend, recommendation_table
from reports.document.album import Album
from reports.reading.load import StudyResult, load_run
from reports.render import compose
from reports.sections.decisions import decision_context
from tests.support.run_folders import made_studies
from tests.support.run_folders.priced_runs import (
    LARGE,
    TINY,
    cell,
    make_plan,
    rates,
    strong,
    study_of,
    train_cell,
    write_measurements,
    write_record,
    write_run,
)

OTHER = [99.0, 101.0, 100.0, 103.0, 97.5, 98.0, 102.0, 100.2, 100.1, 99.7]


def by_goal(study: StudyResult) -> dict[str, Recommendation]:
    return {item.goal.name: item for item in recommend(study, cell_costs(study), judge_objectives(study))}


def test_the_best_for_each_goal_and_by_how_much(tmp_path: Path) -> None:
    """Node b is 1.5 times as fast and three times as dear; batch 1 answers sooner, batch 4 more."""
    cells = {(node, size): cell(target=node, batch_size=size) for node in "ab" for size in (1, 4)}
    speed = {("a", 1): 100.0, ("a", 4): 200.0, ("b", 1): 150.0, ("b", 4): 300.0}
    targets = [LocalTarget(name="a"), LocalTarget(name="b")]
    plan = make_plan(list(cells.values()), prices={"a": 0.36, "b": 1.08}, targets=targets)
    study = study_of(tmp_path, plan, [(cells[place], rates(speed[place])) for place in cells])
    found = by_goal(study)
    assert found.keys() == {"latency", "throughput", "cost"}
    assert found["latency"].best.cell == cells["b", 1] and found["latency"].second is not None
    assert found["throughput"].best.cell == cells["b", 4] and found["cost"].best.cell == cells["a", 4]
    ratio = found["throughput"].ratio
    assert ratio is not None and ratio.value == pytest.approx(1.5) and ratio.comparisons == 3
    assert found["throughput"].verdict == "wins"
    # 0.36 dollars an hour at 200 tokens/s; the next, b at batch 4, costs twice that.
    assert found["cost"].value.median == pytest.approx(0.5)
    assert found["cost"].ratio is not None and found["cost"].ratio.value == pytest.approx(2.0)
    table = recommendation_table(list(found.values()))
    assert table is not None and table.rows[1][:5] == ("tiny", "generate, new tokens 5", "throughput", "b", "4")
    assert (
        table.rows[2][2] == "cost" and table.rows[2][6].startswith("0.500 (") and table.rows[2][8].startswith("2.00 (")
    )
    assert open_questions(study, list(found.values())) == []


def test_cells_that_cannot_be_told_apart_are_not_said_to_win(tmp_path: Path) -> None:
    one, two = cell(batch_size=1), cell(batch_size=2)
    study = study_of(tmp_path, make_plan([one, two]), [(one, rates(100)), (two, rates(100.1, OTHER))])
    found = by_goal(study)["throughput"]
    assert found.verdict == "not told apart"


def test_few_repeats_settle_nothing(tmp_path: Path) -> None:
    one, two = cell(batch_size=1), cell(batch_size=2)
    study = study_of(tmp_path, make_plan([one, two], 3), [(one, rates(100)[:3]), (two, rates(200)[:3])])
    found = by_goal(study)["throughput"]
    assert found.verdict == "not known: too few repeats"
    sentences = open_questions(study, [found])
    assert sentences[0].endswith("too few for an interval; 6 repeats would give one.")
    assert "tiny: what is cheapest in dollars is unknown without a price" in sentences[1]


def test_one_cell_and_none(tmp_path: Path) -> None:
    one, lost = cell(), cell(LARGE)
    run = write_run(tmp_path / "run", make_plan([one, lost], 1))
    write_measurements(run, one, [100.0])
    write_record(run, lost, status=Status.OUT_OF_MEMORY)
    study = load_run(run)
    found = recommend(study, cell_costs(study))
    assert {item.verdict for item in found} == {"the only one"}
    sentences = open_questions(study, found)
    assert "large: nothing to recommend, no cell has a figure." in sentences


def test_a_cell_with_wrong_answers_is_not_recommended(tmp_path: Path) -> None:
    """However fast it is; with nothing else there is no recommendation, and both are said."""
    right, wrong = cell(batch_size=1), cell(batch_size=2)
    study = study_of(tmp_path, make_plan([right, wrong]), [(right, rates(100)), (wrong, rates(200))])
    assert recommend(study, cell_costs(study))[1].best.cell == wrong
    found = recommend(study, cell_costs(study), wrong={wrong.key})
    assert {item.best.key for item in found} == {right.key} and {item.verdict for item in found} == {"the only one"}
    assert open_questions(study, found, wrong={wrong.key})[0] == "Not recommended because of wrong answers: 1 cell."
    none = recommend(study, cell_costs(study), wrong={right.key, wrong.key})
    assert none == []
    assert open_questions(study, none, wrong={right.key, wrong.key}) == [
        "Not recommended because of wrong answers: 2 cells.",
        "tiny: nothing to recommend, every cell with a figure has wrong answers.",
    ]


def test_different_work_is_not_compared(tmp_path: Path) -> None:
    short, long = cell(new_tokens=5), cell(new_tokens=9)
    study = study_of(tmp_path, make_plan([short, long]), [(short, rates(100)), (long, rates(200))])
    found = [item for item in recommend(study, cell_costs(study)) if item.goal.name == "throughput"]
    assert [item.best.cell for item in found] == [short, long] and all(item.second is None for item in found)


def test_many_kinds_of_work_are_cut_and_that_is_said(tmp_path: Path) -> None:
    cells = [cell(new_tokens=size) for size in range(2, 14)] + [cell(new_tokens=13, batch_size=8)]
    study = study_of(tmp_path, make_plan(cells, 1), [(item, [100.0]) for item in cells])
    found = recommend(study, cell_costs(study))
    table = recommendation_table(found)
    assert table is not None and len({row[1] for row in table.rows}) == 8
    assert any("new tokens 13" in row[1] for row in table.rows)
    assert "4 more kinds of work, of fewer cells each, are left out." in open_questions(study, found)


def test_the_cheapest_that_meets_the_objectives(tmp_path: Path) -> None:
    """The largest batch is the cheapest but answers too late."""
    cells = [cell(batch_size=size) for size in (1, 2, 4)]
    speed = (100.0, 150.0, 180.0)
    objectives = {"p99_latency_seconds": 0.1}
    measured = [(item, rates(value)) for item, value in zip(cells, speed, strict=True)]
    plan = make_plan(cells, prices={"local": 0.36}, objectives=objectives)
    found = by_goal(study_of(tmp_path, plan, measured, passes=1200))
    assert found["cost"].best.cell == cells[2]
    assert found["cheapest that meets the objectives"].best.cell == cells[1]
    unpriced = study_of(tmp_path / "unpriced", make_plan(cells, objectives=objectives), measured, passes=1200)
    assert by_goal(unpriced)["fastest that meets the objectives"].best.cell == cells[1]


def test_objectives_that_nothing_meets(tmp_path: Path) -> None:
    one = cell()
    study = study_of(tmp_path, make_plan([one], objectives={"tokens_per_second": 1000.0}), [(one, rates(100))])
    judgements = judge_objectives(study)
    found = recommend(study, cell_costs(study), judgements)
    assert not [item for item in found if "objectives" in item.goal.name]
    lines = open_questions(study, found, judgements)
    assert "tiny: no cell is known to meet every objective; each misses one at least." in lines


def test_work_that_no_objective_bounds_does_not_meet_the_objectives(tmp_path: Path) -> None:
    """Training has no first token: its row hid, too, that no cell of the same model answers in time."""
    one, trained = cell(), train_cell()
    plan = make_plan([one, trained], objectives={"p99_ttft_seconds": 1e-6})
    study = study_of(tmp_path, plan, [(one, rates(100)), (trained, rates(100))])
    judgements = judge_objectives(study)
    found = recommend(study, cell_costs(study), judgements)
    assert {item.best.cell.workload.kind for item in found} == {"generate", "train"}
    assert not [item for item in found if "objectives" in item.goal.name]
    lines = open_questions(study, found, judgements)
    assert [line for line in lines if line.startswith("tiny: no cell is known to meet every objective")]


def test_cells_with_wrong_answers_are_on_no_front(tmp_path: Path) -> None:
    """A loss that is not finite is one: the larger batch would be best in both."""
    cells = [train_cell(batch=batch) for batch in (2, 4, 8)]
    run = write_run(tmp_path / "run", make_plan(cells, repeats=1, prices={"local": 0.36}))
    for one, seconds, loss in zip(cells, (3.0, 2.0, 1.0), (3.0, 3.0, float("nan")), strict=True):
        figures = {"measurement_seconds": 8.0, "cpu_seconds": 1.0, "tokens_per_step": 1024}
        write_record(run, one, 0, figures=figures, samples={"0/step_seconds": [seconds] * 4, "0/loss": [loss] * 4})
    (front,) = decision_context(load_run(run), Album())["fronts"]
    assert "1 of 2 cells is beaten by no other in both" in front.sentence, front

    generated = [cell(batch_size=size) for size in (1, 4)]
    study = study_of(tmp_path / "users", make_plan(generated), [(one, rates(100)) for one in generated])
    assert [len(front.points) for front in user_fronts(study)] == [2]
    (right,) = user_fronts(study, wrong={generated[1].key})
    assert [point.result.key for point in right.points] == [generated[0].key]


@pytest.mark.parametrize("repeats", [1, 10])
@pytest.mark.parametrize("priced", [False, True])
def test_the_parts_of_the_report(tmp_path: Path, repeats: int, priced: bool) -> None:
    """Whatever is known, every part renders, twice the same, and prints no unknown as a number."""
    named = PlannedModel(name="ti|ny <b>", identity=TINY.identity, manifest="")
    cells = [cell(batch_size=size) for size in (1, 4)]
    objectives = {"tokens_per_second": 100.0, "exposed_communication_share": 0.2, "p99_itl_seconds": 0.01}
    plan = make_plan(cells, repeats, {"local": 0.5} if priced else {}, objectives=objectives)
    run = write_run(tmp_path / "run", plan.model_copy(update={"models": (named,)}))
    for item in cells:
        write_measurements(run, item, rates(100 * item.workload.batch_size)[:repeats])
    texts = []
    for _ in range(2):
        album = Album()
        _, _, appendix = compose(load_run(run), album)
        assert all(f"plots/{name}" in appendix for name in album.images if name.endswith(".png"))
        texts.append(appendix.partition("\n## Prediction against measurement")[0])
    assert texts[0] == texts[1]
    assert "ti\\|ny &lt;b&gt;" in texts[0] and "<b>" not in texts[0]
    assert ("USD per million tokens" in texts[0]) is priced
    for never in ("None", "nan", "infinite", "not a number"):
        assert never not in texts[0]


def test_nothing_measured_recommends_nothing(tmp_path: Path) -> None:
    study = study_of(tmp_path, make_plan([cell()]), [])
    context = decision_context(study, Album())
    assert context["recommendations"] is None and context["savings"] is None and context["unit_costs"] is None
    assert "## Recommendations" not in compose(study, Album())[2]


def test_a_median_over_other_blocks_does_not_win_against_the_shared_ones(tmp_path: Path) -> None:
    """The machine was three times as fast in the blocks that the second cell has not."""
    one, two = cell(), cell(dp=2)
    few, many = [100.0 + repeat for repeat in range(8)], [90.0 + repeat for repeat in range(8)] + [300.0] * 12
    study = study_of(tmp_path, make_plan([one, two], repeats=20), [(one, few), (two, many)])
    found = by_goal(study)["throughput"]
    assert found.best.key == two.key and found.ratio is not None and found.ratio.bounds[1] < 1
    assert found.verdict == "loses in the blocks that both have"


@pytest.mark.parametrize(
    ("work", "figure"),
    [
        ({"items_per_step": 1000, "unit": "sample"}, "0.100 (0.100 to 0.100) USD per million samples"),
        ({"tokens_per_step": 1000}, "0.100 (0.100 to 0.100) USD per million tokens"),
        ({"measure": "wall"}, "100 (100 to 100) USD per million steps"),
    ],
)
def test_a_program_of_any_unit_costs_what_its_unit_says(tmp_path: Path, work: dict[str, Any], figure: str) -> None:
    """Ten steps a second for a tenth of a cent."""
    one = Cell(workload=ScriptWorkload(command=("t.py",), **work))
    run = write_run(tmp_path, make_plan([one], prices={"local": 3.6}))
    for repeat in range(10):
        write_record(run, one, repeat, samples={"0/step_seconds": [0.1] * 20}, figures={"steps": 20})
    table = recommendation_table(recommend(study := load_run(run), cell_costs(study)))
    assert table is not None
    assert [row[6] for row in table.rows if row[2] == "cost"] == [figure]


def test_the_fastest_is_not_called_the_cheapest_where_it_takes_more_nodes(tmp_path: Path) -> None:
    """Two nodes of one cluster gave 1.6 times the throughput of one, for twice the price: a dearer token."""
    one, two = cell(target="lab"), cell(target="lab", dp=2)
    for nodes, is_one in ((1, True), (2, False)):
        other = two.model_copy(update={"nodes": nodes})
        plan = make_plan([one, other], targets=[SlurmTarget(name="lab", nodes=2, ranks_per_node=2)])
        study = study_of(tmp_path / str(nodes), plan, [(one, rates(100)), (other, rates(160))])
        lines = open_questions(study, recommend(study, cell_costs(study)))
        (told,) = [line for line in lines if "cheapest in dollars is unknown" in line]
        assert ("the cheapest token is that of the highest throughput" in told) is is_one


def test_what_is_cheapest_is_told_in_the_unit_of_the_work(tmp_path: Path) -> None:
    """Of embeddings it was `the cheapest token`."""
    plan = made_studies.planned("workload: {kind: encode}\nexperiments: {one: {kind: sweep, over: {batch_size: [1]}}}")
    run = made_studies.write_plan(tmp_path / "run", plan)
    for one in plan.cells.values():
        made_studies.write_measurements(run, one, 1.0)
    study = load_run(run)
    assert (
        "the cheapest embedding is that of the highest"
        in open_questions(study, recommend(study, cell_costs(study)))[-1]
    )


def test_what_meets_the_objectives_without_a_price_is_named_as_the_fastest(tmp_path: Path) -> None:
    """The target with a price misses the objective; it was said that each cell misses one."""
    cells = [cell(target=name) for name in ("priced", "own")]
    targets = [LocalTarget(name="priced"), LocalTarget(name="own")]
    plan = make_plan(cells, prices={"priced": 0.36}, objectives={"tokens_per_second": 150.0}, targets=targets)
    study = study_of(tmp_path, plan, [(cells[0], rates(100)), (cells[1], rates(200))])
    judgements = judge_objectives(study)
    found = recommend(study, cell_costs(study), judgements)
    goals = {item.goal.name: item for item in found}
    assert goals["fastest that meets the objectives"].best.cell == cells[1]
    assert goals["fastest that meets the objectives"].verdict == "the only one"
    assert goals["cost"].best.cell == cells[0] and goals["cost"].verdict == "the only one with a price"
    lines = open_questions(study, found, judgements)
    assert lines == ["Not compared by cost, as their price is unknown: 1 cell."]


def test_an_objective_of_experiments_is_not_missed_by_each_cell(tmp_path: Path) -> None:
    cells = [cell(dp=ranks) for ranks in (1, 2)]
    plan = make_plan(cells, objectives={"speedup": 1.5}, experiments=[strong(cells)])
    study = study_of(tmp_path, plan, [(cells[0], rates(100)), (cells[1], rates(190))])
    judgements = judge_objectives(study)
    assert [item.word for item in judgements] == ["met"]
    found = recommend(study, cell_costs(study), judgements)
    assert {item.goal.name for item in found} == {"latency", "throughput"}
    assert not [line for line in open_questions(study, found, judgements) if "objective" in line]


def test_what_meets_the_objectives_with_wrong_answers_is_not_said_to_miss_one(tmp_path: Path) -> None:
    right, wrong = cell(batch_size=1), cell(batch_size=2)
    plan = make_plan([right, wrong], objectives={"tokens_per_second": 150.0})
    study = study_of(tmp_path, plan, [(right, rates(100)), (wrong, rates(200))])
    judgements = judge_objectives(study)
    found = recommend(study, cell_costs(study), judgements, {wrong.key})
    lines = open_questions(study, found, judgements, {wrong.key})
    assert "tiny: no cell is known to meet every objective; those that do have wrong answers." in lines


@pytest.mark.parametrize(
    ("priced", "wanted"), [({"a": 0.36}, "target b"), ({}, "the target"), ({"a": 0.36, "b": 0.4}, None)]
)
def test_targets_without_a_price_are_named(tmp_path: Path, priced: dict[str, float], wanted: str | None) -> None:
    """Of a lab beside three clouds, `give the target a price` did not say which of the four."""
    one, two = cell(target="a"), cell(target="b")
    targets = [LocalTarget(name="a"), LocalTarget(name="b")]
    run = write_run(tmp_path / "run", make_plan([one, two], prices=dict(priced), targets=targets))
    write_measurements(run, one, rates(100))
    write_measurements(run, two, rates(400))
    study = load_run(run)
    lines = next_lines(decide(study, cell_costs(study)), study.cells.values())
    told = [line for line in lines if line.startswith("Which choice is cheapest")]
    assert (
        told
        == [
            f"Which choice is cheapest: give {wanted} a price_usd_per_hour in the study and run it again; "
            "completed measurements are kept."
        ][: wanted is not None]
    )
