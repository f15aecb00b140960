"""Recommendations and savings: who wins, whether that is sure, and no number that nothing supports."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.prices import Price, TargetPrices
from configs.plans.plan import Plan, PlannedModel
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.spec.objectives import Purpose
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget, SlurmTarget
from configs.workloads.script import ScriptWorkload
from reports.decisions.cost import cell_costs, cost_sentences
from reports.decisions.decision import decide
from reports.decisions.next_measurement import next_lines
from reports.decisions.objectives import judge_objectives
from reports.decisions.pareto import user_fronts
from reports.decisions.recommendation import Recommendation, open_questions, recommend, recommendation_table
from reports.decisions.savings.estimates import savings
from reports.decisions.savings.saving import Saving, savings_table, unknown_savings
from reports.decisions.spending import study_costs
from reports.document.album import Album
from reports.reading.load import StudyResult, load_run
from reports.render import compose
from reports.sections.decisions import decision_context
from tests.support.run_folders import made_studies
from tests.support.run_folders.priced_runs import (
    LARGE,
    TINY,
    as_prices,
    cell,
    make_plan,
    strong,
    train_cell,
    write_launch,
    write_measurements,
    write_record,
    write_run,
)

NOISE = [100.0, 98.0, 102.0, 99.0, 101.0, 100.5, 99.5, 103.0, 97.0, 100.0]
OTHER = [99.0, 101.0, 100.0, 103.0, 97.5, 98.0, 102.0, 100.2, 100.1, 99.7]

Measured = Sequence[tuple[Cell, list[float]]]


def rates(tokens_per_second: float, noise: list[float] = NOISE) -> list[float]:
    return [tokens_per_second * factor / 100 for factor in noise]


def study_of(folder: Path, plan: Plan, measured: Measured, **fields: Any) -> StudyResult:
    run = write_run(folder / "run", plan)
    for item, values in measured:
        write_measurements(run, item, values, **fields)
    return load_run(run)


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


def saved(study: StudyResult) -> list[Saving]:
    return savings(study, cell_costs(study), study_costs(study))


def effect(study: StudyResult, start: str) -> Saving:
    return next(item for item in saved(study) if item.name.startswith(start))


def offers(*prices: tuple[str, str | None, float]) -> TargetPrices:
    known = [
        Price.model_validate({"usd_per_hour": usd, "source": "list", "market": market, "region": region})
        for market, region, usd in prices
    ]
    return TargetPrices(price=known[0], others=tuple(known[1:]))


def test_markets_and_regions_from_known_prices(tmp_path: Path) -> None:
    one = cell()
    prices = offers(
        ("on_demand", "east", 1.0),
        ("spot", "east", 0.4),
        ("spot", "west", 0.1),
        ("on_demand", "west", 0.9),
        ("on_demand", "north", 1.5),
        ("reserved_1_year", "east", 0.65),
    )
    study = study_of(tmp_path, make_plan([one], prices={"local": prices}), [(one, rates(100))])
    spot = effect(study, "spot")
    # The region's own spot price counts, not the cheapest anywhere.
    assert spot.effect == "**60.0 %** less" and "$0.4000 an hour spot in east" in spot.basis
    region = effect(study, "a cheaper region")
    assert region.effect == "**10.0 %** less" and "the cheapest of 2 other regions known" in region.basis
    reserved = effect(study, "reserved")
    assert reserved.effect == "**35.0 %** less" and "pays from 65 % use on" in reserved.basis


def test_without_prices_nothing_is_promised(tmp_path: Path) -> None:
    one = cell()
    study = study_of(tmp_path, make_plan([one]), [(one, rates(100))], figures={})
    found = saved(study)
    assert {item.effect for item in found} == {"unknown"}
    assert not any("$" in item.basis for item in found)
    assert effect(study, "spot").basis == "the price of `local` is unknown"
    assert savings_table(found) is None
    told = unknown_savings(found)
    assert told is not None and all(item.name in told for item in found)


def test_a_dearer_spot_price_and_one_taken_already(tmp_path: Path) -> None:
    one = cell()
    dear = make_plan([one], prices={"local": offers(("on_demand", None, 1.0), ("spot", None, 1.2))})
    assert effect(study_of(tmp_path / "dear", dear, [(one, rates(100))]), "spot").effect == "20.0 % more"
    taken = make_plan([one], prices={"local": offers(("spot", None, 0.2))})
    assert effect(study_of(tmp_path / "taken", taken, [(one, rates(100))]), "spot").effect == "taken already"


def test_nodes_that_are_rented_as_spot_are_not_told_to_become_spot(tmp_path: Path) -> None:
    """Their cells are priced on demand, which is said, as is where their own cost stands."""
    one = cell(target="g5")
    wanted = {"kind": "aws", "name": "g5", "instance": "g5.xlarge", "regions": ["us-east-1"]}
    for market, told in (("spot", True), ("on_demand", False)):
        target = RentedTarget.model_validate({**wanted, "market": market})
        known = offers(("on_demand", "us-east-1", 1.0), ("spot", "us-east-1", 0.4))
        plan = make_plan([one], prices={"g5": known}, targets=[target])
        study = study_of(tmp_path / market, plan, [(one, rates(100))])
        assert effect(study, "spot").effect == ("taken already" if told else "**60.0 %** less")
        (sentence, *_) = cost_sentences(study, cell_costs(study), study_costs(study))
        assert ("its nodes are asked for as spot, and the section on rented nodes" in sentence) is told


@pytest.mark.parametrize(
    ("purpose", "has", "lacks"),
    [("batch", "spot", "caching"), ("serving", "caching", "spot"), ("hybrid", "preprocessing", None)],
)
def test_savings_of_a_purpose(tmp_path: Path, purpose: Purpose, has: str, lacks: str | None) -> None:
    one = cell()
    names = [item.name for item in saved(study_of(tmp_path, make_plan([one], purpose=purpose), [(one, rates(100))]))]
    assert any(name.startswith(has) for name in names)
    assert lacks is None or not any(name.startswith(lacks) for name in names)


def test_batch_size_saves_the_same_share_whatever_the_price(tmp_path: Path) -> None:
    cells = [cell(batch_size=size) for size in (1, 4)]
    measured = [(cells[0], rates(100)), (cells[1], rates(250))]
    study = study_of(tmp_path, make_plan(cells), measured)
    assert effect(study, "batch size").effect == "**60.0 %** less a token (60.0 % to 60.0 %)"
    priced = study_of(tmp_path / "priced", make_plan(cells, prices={"local": 0.36}), measured)
    saving = effect(priced, "batch size")
    assert "$0.400 instead of $1.00 per million tokens" in saving.basis
    assert "TPOT is 10.0 ms instead of 6.25 ms" in saving.basis


@pytest.mark.parametrize(
    ("repeats", "told"),
    [
        ([(100, 100), (101, 102)] * 5, r"^0.491 % less a token \(0 % to 0.980 %\), which may be noise$"),
        ([(100, 102), (100, 104)], r"^2\.\d+ % less a token \[1\.\d+ % to 3\.\d+ %\], which may be noise$"),
        ([(100, 102)], r"^1\.\d+ % less a token \(1 pair\), which may be noise$"),
    ],
)
def test_a_saving_that_may_be_noise_is_said_to_be(tmp_path: Path, repeats: list[tuple[int, int]], told: str) -> None:
    """`**0.726 %** less (-0.644 % to 2.09 %)` stood in bold as one that is known."""
    cells = [cell(batch_size=size) for size in (1, 4)]
    run = write_run(tmp_path / "run", make_plan(cells, repeats=len(repeats)))
    for place, one in enumerate(cells):
        write_measurements(run, one, [pair[place] for pair in repeats])
    assert re.match(told, effect(load_run(run), "batch size").effect)


def test_the_smallest_batch_may_be_the_fastest(tmp_path: Path) -> None:
    """It was said that no two batch sizes were measured."""
    cells = [cell(batch_size=size) for size in (1, 4, 8)]
    study = study_of(tmp_path, make_plan(cells), [(one, rates(400 - 10 * place)) for place, one in enumerate(cells)])
    saving = effect(study, "batch size (tiny")
    assert saving.effect == "nothing"
    assert saving.basis == "batch 1, the smallest measured, has the highest throughput (1 rank, float32, local)"
    run = write_run(tmp_path / "apart", make_plan(cells[:2], repeats=2))
    write_measurements(run, cells[0], [100.0])
    write_measurements(run, cells[1], [200.0, 200.0])
    run.record(cells[1].key, "timed", 0, 1).unlink()
    apart = effect(load_run(run), "batch size (tiny")
    assert (apart.effect, apart.basis) == ("unknown", "batch 4 against 1 (1 rank, float32, local) share no block")


def test_cells_with_wrong_answers_save_nothing(tmp_path: Path) -> None:
    cells = [cell(batch_size=size) for size in (1, 4, 8)]
    study = study_of(tmp_path, make_plan(cells), [(one, rates(100 * 2**place)) for place, one in enumerate(cells)])

    def told(*wrong: Cell) -> Saving:
        found = savings(study, cell_costs(study), [], wrong={one.key for one in wrong})
        return next(item for item in found if item.name.startswith("batch size"))

    assert told().effect.startswith("**75.0 %** less") and told(cells[2]).effect.startswith("**50.0 %** less")
    assert told(cells[2]).basis.startswith("batch 4 against 1 ")
    missing = "no two batch sizes of one layout were measured with right answers; sweep over `batch_size`"
    assert told(*cells[1:]).basis == missing


def test_a_batch_with_a_loss_that_is_not_finite_saves_nothing(tmp_path: Path) -> None:
    small, large = train_cell(batch=4), train_cell(batch=8)
    run = write_run(tmp_path / "run", make_plan([small, large], repeats=6))
    for one, seconds, loss in ((small, 2.0, 3.0), (large, 1.0, float("nan"))):
        figures = {"measurement_seconds": 8.0, "cpu_seconds": 1.0, "tokens_per_step": 1024}
        for repeat in range(6):
            samples = {"0/step_seconds": [seconds] * 4, "0/loss": [loss] * 4}
            write_record(run, one, repeat, figures=figures, samples=samples)
    context = decision_context(load_run(run), Album())
    assert context["savings"] is None or "batch size" not in str(context["savings"].markdown())
    assert "batch size (no two batch sizes of one layout were measured with right" in context["unknown_savings"]


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


def test_batches_of_one_size_are_not_held_against_each_other(tmp_path: Path) -> None:
    """Of one batch size more prompts were read too."""
    cells = [cell(batch_size=1, num_prompts=4), cell(batch_size=1, num_prompts=8), cell(batch_size=4, num_prompts=4)]
    study = study_of(
        tmp_path, make_plan(cells), [(cells[0], rates(100)), (cells[1], rates(120)), (cells[2], rates(80))]
    )
    assert effect(study, "batch size (tiny").effect == "nothing"


def test_a_smaller_model_costs_less_and_its_answers_are_not_guessed(tmp_path: Path) -> None:
    small, large = cell(TINY), cell(LARGE)
    run = write_run(tmp_path / "run", make_plan([small, large]))
    write_measurements(run, small, rates(400), figures={"model_parameters": 1e6})
    write_measurements(run, large, rates(100), figures={"model_parameters": 1e9})
    saving = effect(load_run(run), "a smaller")
    assert saving.effect.startswith("**75.0 %** less a token")
    assert "tiny (1,000,000 parameters) against large" in saving.basis
    assert "what it does to the answers is unknown" in saving.basis


def test_a_smaller_model_is_held_against_the_larger_one_for_as_many_nodes(tmp_path: Path) -> None:
    """Twice the nodes gave the larger model the higher throughput, so that the smaller one was said to save nothing."""
    small, large = cell(TINY, "lab", num_prompts=8), cell(LARGE, "lab", dp=2).model_copy(update={"nodes": 2})
    plan = make_plan([small, large], targets=[SlurmTarget(name="lab", nodes=2)])
    run = write_run(tmp_path / "run", plan)
    write_measurements(run, small, rates(100), figures={"model_parameters": 1e6})
    write_measurements(run, large, rates(120), figures={"model_parameters": 1e9})
    assert effect(load_run(run), "a smaller").effect.startswith("**40.0 %** less a token")  # 60 of each node


def test_caching_is_counted_in_the_recorded_prompts(tmp_path: Path) -> None:
    one = cell(prompts="f" * 64)
    run = write_run(tmp_path / "run", make_plan([one]))
    run.inputs.mkdir()
    lines = ['{"prompt": "a"}', '{"prompt": "b"}', '{"prompt": "a"}', '{"prompt": "a"}']
    (run.inputs / f"{'f' * 64}.jsonl").write_text("\n".join(lines))
    write_measurements(run, one, rates(100))
    saving = effect(load_run(run), "caching")
    assert saving.effect == "at most **50.0 %** of requests" and "2 of 4 prompts" in saving.basis


def test_idle_cores_preparation_start_up_and_the_cheaper_place(tmp_path: Path) -> None:
    one, two = cell(target="a"), cell(target="b")
    targets = [LocalTarget(name="a"), LocalTarget(name="b")]
    run = write_run(tmp_path / "run", make_plan([one, two], prices={"a": 0.36, "b": as_prices(0.36)}, targets=targets))
    figures = {"measurement_seconds": 3.0, "cpu_seconds": 2.4, "preprocess_seconds": 1.0}
    write_measurements(run, one, rates(100), figures=figures, began=12, job="j")
    write_measurements(run, two, rates(400), figures=figures, began=20, job="j")
    write_launch(run, "j", one, began=0, turn=10, ended=30)
    study = load_run(run)
    assert effect(study, "several models").effect == "at most 20 % of these cores"
    # Preparing is part of the measurement; the two were added up, as if it came before.
    assert effect(study, "preprocessing").effect == "at most 33.3 % of the time"
    scaling = effect(study, "auto-scaling").basis
    assert "a launch took 2.00 s until its first measurement (median of 1)" in scaling
    assert "beside the time to import the engine and to load the model" in scaling, "a node seemed to answer in 2 s"
    place = effect(study, "the cheaper place")
    assert place.effect == "**75.0 %** less a token" and "on `b` against `a`" in place.basis


def test_cores_of_training_say_nothing_of_those_of_generation(tmp_path: Path) -> None:
    """More tokens/s are learnt than generated, so only training was told of."""
    made, learnt = cell(), train_cell()
    run = write_run(tmp_path / "run", make_plan([made, learnt], repeats=1))
    write_measurements(run, made, [100.0], figures={"measurement_seconds": 2.0, "cpu_seconds": 0.5})
    busy = {"measurement_seconds": 2.0, "cpu_seconds": 2.0, "tokens_per_step": 1024}
    write_measurements(run, learnt, [1000.0], figures=busy)
    told = {item.effect: item.basis for item in saved(load_run(run)) if item.name.startswith("several models")}
    assert told.keys() == {"at most 75 % of these cores", "nothing: the cores are busy"}
    assert told["at most 75 % of these cores"].startswith("the fastest cell of tiny (generate) uses 25.0 %")


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


def test_an_equal_price_saves_nothing(tmp_path: Path) -> None:
    mine = Price(usd_per_hour=2.0, source="the study file")
    spot = Price(usd_per_hour=2.0, source="a file", market="spot")
    one = cell()
    plan = make_plan([one], prices={"local": TargetPrices(price=mine, others=(spot,))})
    study = study_of(tmp_path, plan, [(one, rates(100))])
    found = {saving.name: saving for saving in savings(study, cell_costs(study), [])}
    assert found["spot or preemptible machines (`local`)"].effect == "nothing"


def test_the_cheaper_place_compares_two_places(tmp_path: Path) -> None:
    """The cheapest and the dearest cell are on one target: the other target lies between them."""
    cells = [cell(target="a"), cell(target="a").model_copy(update={"cores_per_rank": 2}), cell(target="b")]
    plan = make_plan(cells, prices={"a": 1.0, "b": 1.0})
    study = study_of(tmp_path, plan, list(zip(cells, (rates(100), rates(400), rates(200)), strict=True)))
    found = next(item for item in savings(study, cell_costs(study), []) if item.name.startswith("the cheaper place"))
    assert "on `a` against `b`" in found.basis and found.effect == "**50.0 %** less a token"


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
