"""Savings: no number that nothing supports."""

import re
from pathlib import Path

import pytest

from configs.hardware.prices import Price, TargetPrices
from configs.spec.cell import Cell
from configs.spec.objectives import Purpose
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget, SlurmTarget
from reports.decisions.cost import cell_costs, cost_sentences
from reports.decisions.savings.estimates import savings
from reports.decisions.savings.saving import Saving, savings_table, unknown_savings
from reports.decisions.spending import study_costs
from reports.document.album import Album
from reports.reading.load import StudyResult, load_run
from reports.sections.decisions import decision_context
from tests.support.run_folders.priced_runs import (
    LARGE,
    TINY,
    as_prices,
    cell,
    make_plan,
    rates,
    study_of,
    train_cell,
    write_launch,
    write_measurements,
    write_record,
    write_run,
)


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
    assert saving.basis == "no batch above 1, the smallest measured, is known to be faster (1 rank, float32, local)"
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
