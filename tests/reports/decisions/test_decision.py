"""What a report decides: simulated studies whose right decision is known, and what it says of them."""

import re
from pathlib import Path

import pytest

from benchmarks.decisions import BAR, CLEAR, SEEDS, TIES, Scenario, Simulated, count, decided, is_right
from configs.plans.plan import read_plan
from configs.records.record import Status
from configs.targets.target import LocalTarget
from reports.decisions.choice import Candidate, choose_candidate
from reports.decisions.cost import cell_costs
from reports.decisions.decision import Decision, decide, decision_body, decision_lead
from reports.decisions.next_measurement import next_lines, repeats_to_decide
from reports.reading.load import load_run
from tests.support.run_folders.priced_runs import cell, make_plan, write_measurements, write_record, write_run


@pytest.mark.parametrize("name", CLEAR)
def test_clear_cases_are_decided_right(name: str) -> None:
    assert count(CLEAR[name], is_right(CLEAR[name])) >= BAR * SEEDS


@pytest.mark.parametrize("name", TIES)
def test_ties_are_not_won(name: str) -> None:
    assert count(TIES[name], is_right(TIES[name])) >= BAR * SEEDS


def test_equals_of_one_size_go_to_the_one_that_answers_first() -> None:
    rates = {repeat: 100.0 + repeat % 3 for repeat in range(8)}
    slow = Candidate("slow", 1, dict(rates), {repeat: 0.2 for repeat in rates})
    soon = Candidate("soon", 1, {repeat: rate * (0.99, 1.02)[repeat % 2] for repeat, rate in rates.items()},
                     {repeat: 0.1 for repeat in rates})  # fmt: skip
    assert choose_candidate([slow, soon]).chosen == 1
    faster = Candidate("faster", 1, {repeat: rate * 1.2 for repeat, rate in rates.items()}, slow.latency)
    assert choose_candidate([slow, soon, faster]).chosen == 2


def test_equals_that_answer_as_soon_go_to_the_simplest() -> None:
    """Training: the time of a step is the throughput once more, and noise must not choose."""
    noise = (1.0, 0.7, 1.3)
    plain = Candidate("plain", 2, {k: 100 * noise[k] for k in range(3)}, {k: 1 / noise[k] for k in range(3)})
    other = Candidate("other", 2, {k: 100 * noise[-k] for k in range(3)}, {k: 0.99 / noise[-k] for k in range(3)})
    assert choose_candidate([plain, other]).chosen == 0 and choose_candidate([other, plain]).chosen == 0
    larger_batch = Candidate("batch", 2, other.rates, other.latency, batch=4)
    assert choose_candidate([larger_batch, plain]).chosen == 1


def test_serving_goes_by_latency() -> None:
    repeats = range(8)
    noise = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]

    def one(ranks: int, rate: float, latency: float) -> Candidate:
        return Candidate(
            str(ranks), ranks, {k: rate * noise[k] for k in repeats}, {k: latency / noise[-k] for k in repeats}
        )

    halves, tie = [one(1, 100, 0.1), one(2, 120, 0.06)], [one(1, 100, 0.1), one(2, 120, 0.1)]
    assert choose_candidate(halves, by_latency=True).chosen == 1 and choose_candidate(halves).chosen == 0
    assert choose_candidate(tie, by_latency=True).chosen == 0


def test_the_sentence_says_what_the_larger_would_bring() -> None:
    found, _ = decided(CLEAR["not worth its ranks"], 1)
    assert decision_lead(found) == "Run cell 0"
    body = decision_body(found)
    assert "items/s" in body and "; cell 2 does 1.77 times (1.74 to 1.83" in body and "on 4 ranks instead of 1" in body
    assert body.endswith(", 44.2 % (43.6 to 45.7) as much per rank")
    few, _ = decided(CLEAR["three repeats are not"], 1)
    assert re.search(r"% \[[\d.]+ to [\d.]+\] as much per rank, which 6 repeats would confirm$", decision_body(few))


def test_how_many_repeats_would_decide() -> None:
    def needed(scenario: Scenario, seed: int = 1) -> int | None:
        return repeats_to_decide([decided(scenario, seed)[0]])

    assert needed(CLEAR["three repeats are not"]) == 6, "the fewest that give an interval"
    assert needed(TIES["linear, in noise"]) == 40, "four times as many halve the interval"
    assert needed(CLEAR["not worth its ranks"]) is None and needed(CLEAR["the larger batch"]) is None
    assert needed(CLEAR["two ranks do more than twice the work"]) is None


def test_what_was_left_out_is_said() -> None:
    found, _ = decided(CLEAR["the fastest answers wrongly"], 1)
    assert decision_body(found).endswith("(left out: 1 cell with wrong answers)")
    nothing, _ = decided(Scenario((Simulated(1, 100, objective="missed"),), ()), 1)
    assert decision_lead(nothing) == "No cell of the noop can be recommended"
    assert decision_body(nothing).startswith("1 cell missing an objective")


def test_a_cell_that_did_no_work_does_not_take_the_others_with_it() -> None:
    found, results = decided(Scenario((Simulated(1, 100), Simulated(2, 0)), ()), 1)
    assert found.choice is not None and found.chosen is results[0]
    assert decision_body(found).endswith("(left out: 1 cell with a throughput of 0)")


def test_with_prices_a_larger_choice_is_told_by_its_price_also_where_latency_decides(tmp_path: Path) -> None:
    soon, much = cell(target="a", batch_size=1), cell(target="b", batch_size=8)
    plan = make_plan([soon, much], purpose="serving", prices={"a": 1.0, "b": 3.0})
    run = write_run(tmp_path, plan)
    for item, rate in ((soon, 100.0), (much, 400.0)):
        write_measurements(run, item, [rate * (1 + 0.001 * repeat) for repeat in range(10)])
    study = load_run(run)
    (found,) = decide(study, cell_costs(study))
    assert found.basis == "latency" and found.chosen.key == soon.key
    assert decision_body(found).endswith("as much for 3.00 times the price")


def test_work_without_a_model_is_called_by_its_kind() -> None:
    (found, *_) = decided(CLEAR["two ranks do more than twice the work"], 1)
    lines = next_lines([found], found.members)
    assert lines[0] == "Whether more pays yet: 2 ranks, the most of the noop, won; measure 4."


@pytest.mark.parametrize("lost", ["failed", "wrong", None])
def test_more_ranks_are_not_suggested_where_they_were_tried(tmp_path: Path, lost: str | None) -> None:
    cells = [cell(dp=dp, batch_size=8 // dp, num_prompts=8) for dp in (1, 2, 4)]
    run = write_run(tmp_path, make_plan(cells if lost else cells[:2]))
    for item, rate in zip(cells[:2], (100.0, 250.0), strict=True):
        write_measurements(run, item, [rate * (1 + 0.001 * repeat) for repeat in range(10)])
    if lost == "failed":
        write_record(run, cells[2], 0, status=Status.OUT_OF_MEMORY)
    elif lost == "wrong":
        write_measurements(run, cells[2], [500.0] * 10)
    study = load_run(run)
    (found,) = decide(study, cell_costs(study), wrong={cells[2].key})
    assert found.chosen.key == cells[1].key
    told = [line for line in next_lines([found], found.members) if line.startswith("Whether more pays yet")]
    assert told == ([] if lost else ["Whether more pays yet: 2 ranks, the most of tiny, won; measure 4."])


@pytest.mark.parametrize(
    ("price", "rate", "times"), [(1.1, 33.3, 3), (1.33, 87.7, 3), (2.39, 67.6, 5), (0.28, 41.3, 6)]
)
def test_as_much_for_the_money_without_any_noise_stays_with_the_smaller(price: float, rate: float, times: int) -> None:
    small = Candidate("small", price, dict.fromkeys(range(8), rate))
    large = Candidate("large", round(price * times, 2), dict.fromkeys(range(8), rate * times))
    assert choose_candidate([small, large]).chosen == 0


def test_what_more_repeats_cost_is_told_only_where_all_prices_are_known(tmp_path: Path) -> None:
    """Three repeats of linear scaling settle nothing; of the larger one's target no price is known."""
    small, large = cell(target="a", batch_size=8), cell(target="b", dp=2, batch_size=4)
    targets = [LocalTarget(name="a"), LocalTarget(name="b")]
    for name, prices in (("some", {"a": 360.0}), ("all", {"a": 360.0, "b": 720.0})):
        run = write_run(tmp_path / name, make_plan([small, large], 3, prices=prices, targets=targets))
        for item, rate in ((small, 100.0), (large, 220.0)):
            write_measurements(run, item, [rate] * 3)
        study = load_run(run)
        (found,) = decide(study, cell_costs(study))
        told = next_lines([found], study.cells.values())
        (line,) = [each for each in told if each.startswith("Whether") and "repeats" in each]
        assert re.search(r", about [\d.]+ s of measuring(\.|, \$)", line) and ("$" in line) is (name == "all"), line


def test_what_more_repeats_take_is_told_of_all_cells_that_they_measure(tmp_path: Path) -> None:
    compared = [cell(batch_size=8), cell(dp=2, batch_size=4)]
    run = write_run(tmp_path, make_plan([*compared, *(cell(batch_size=size) for size in (1, 2, 4))], 3))
    for number, item in enumerate(read_plan(run.plan).cells.values()):
        if number != 4:  # of the last one nothing was measured
            write_measurements(run, item, [220.0 if item.layout.dp == 2 else 100.0] * 3)
    study = load_run(run)
    lines = next_lines(decide(study, cell_costs(study)), study.cells.values())
    told = " (--set measuring.repeats=7), about 16 s of measuring all 4 cells"  # four more of 1 s each
    assert [told in line for line in lines if "repeats instead of" in line] == [True], lines


def served(folder: Path, rates: dict[int, list[float]]) -> Decision:
    """What is decided by latency, without prices, of layouts that do the same work at these rates."""
    cells = {dp: cell(dp=dp, batch_size=4 // dp, num_prompts=4) for dp in rates}
    plan = make_plan(list(cells.values()), repeats=len(rates[1]), purpose="serving")
    run = write_run(folder, plan)
    for dp, values in rates.items():
        write_measurements(run, cells[dp], values)
    study = load_run(run)
    (found,) = decide(study, cell_costs(study))
    assert found.basis == "latency"
    return found


def test_by_latency_more_repeats_are_asked_for_only_where_they_may_tell_who_answers_sooner(tmp_path: Path) -> None:
    noise = [0.99, 1.01, 1.0, 1.02, 0.98, 1.0, 1.03, 0.97]
    late = served(tmp_path / "late", {1: [100.0] * 8, 2: [200.0 * each for each in noise]})
    assert late.chosen.cell.layout.ranks == 2, "half the time for a token is clear"
    same = served(tmp_path / "same", {1: [100.0] * 8, 2: [100.0 * each for each in noise]})
    assert same.chosen.cell.layout.ranks == 1 and repeats_to_decide([same]) == 32
    (line,) = next_lines([same], same.members)
    assert line.startswith("Whether dp=2") and " answers sooner than 1 rank" in line and "dollar" not in line
    few = served(tmp_path / "few", {1: [100.0] * 3, 2: [200.0] * 3})
    assert few.chosen.cell.layout.ranks == 1 and repeats_to_decide([few]) == 6
    slower = served(tmp_path / "slower", {1: [100.0] * 8, 2: [90.0] * 8})
    assert repeats_to_decide([slower]) is None and next_lines([slower], slower.members) == []
