"""Objectives: met, missed or undecided, and why."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.common.execution import Layout
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.workloads.noop import NoopWorkload
from reports.decisions.objectives import (
    MOST_ROWS,
    Judgement,
    judge_objectives,
    objectives_sentences,
    objectives_summary,
    objectives_table,
)
from reports.experiments.scaling import scaling
from reports.reading.load import load_run
from tests.support.run_folders.priced_runs import (
    NOISE,
    cell,
    make_plan,
    strong,
    train_cell,
    write_measurements,
    write_record,
    write_run,
)

Measured = Sequence[tuple[Cell, list[float]]]


def rates(tokens_per_second: float, repeats: int = 10) -> list[float]:
    return [tokens_per_second * noise / 100 for noise in NOISE[:repeats]]


def judged(folder: Path, plan: Plan, measured: Measured, passes: int = 4) -> list[Judgement]:
    run = write_run(folder / "run", plan)
    for item, values in measured:
        write_measurements(run, item, values, passes)
    return judge_objectives(load_run(run))


@pytest.mark.parametrize(
    ("bound", "repeats", "word", "reason"),
    [
        (90.0, 10, "met", "the whole interval is within the bound"),
        (110.0, 10, "missed", "the whole interval is beyond the bound"),
        (100.0, 10, "undecided", "the bound lies in the interval"),
        (90.0, 5, "undecided", "5 repeats give no interval, 6 do; the figure itself is within the bound"),
        (110.0, 1, "undecided", "1 repeat gives no interval, 6 do; the figure itself is beyond the bound"),
    ],
)
def test_only_a_whole_interval_decides(tmp_path: Path, bound: float, repeats: int, word: str, reason: str) -> None:
    one = cell()
    plan = make_plan([one], repeats, objectives={"tokens_per_second": bound})
    (found,) = judged(tmp_path, plan, [(one, rates(100, repeats))])
    assert (found.word, found.reason) == (word, reason)
    assert found.value == pytest.approx(100, rel=0.02)


def test_latencies_and_prices_are_to_stay_below(tmp_path: Path) -> None:
    one = cell()
    objectives = {"usd_per_million_tokens": 1.5, "p99_latency_seconds": 0.1}
    plan = make_plan([one], prices={"local": 0.36}, objectives=objectives)
    # 1,200 passes of one request of 0.2 s: enough for a P99 of each repeat.
    latency, usd = judged(tmp_path, plan, [(one, rates(100))], passes=1200)
    assert (usd.objective.field, usd.word) == ("usd_per_million_tokens", "met")
    assert (latency.word, latency.reason) == ("missed", "the whole interval is beyond the bound")
    assert latency.value == pytest.approx(0.2, rel=0.05) and latency.interval is not None


def test_a_p99_of_few_samples_has_no_interval_and_says_so(tmp_path: Path) -> None:
    one = cell()
    (found,) = judged(tmp_path, make_plan([one], objectives={"p99_itl_seconds": 1.0}), [(one, rates(100))])
    assert found.word == "undecided" and found.interval is None
    assert "repeats too short for a P99 each" in found.reason and "P99 from 160 samples only" in found.reason


def test_what_is_not_known_is_undecided_with_the_reason(tmp_path: Path) -> None:
    one, lost = cell(), cell(batch_size=8)
    objectives = {"usd_per_million_tokens": 1.0, "exposed_communication_share": 0.1, "tokens_per_second": 1.0}
    run = write_run(tmp_path / "run", make_plan([one, lost], 1, objectives=objectives))
    write_measurements(run, one, [100.0])
    write_record(run, lost, status=Status.OUT_OF_MEMORY)
    found = {(item.objective.field, item.subject): item for item in judge_objectives(load_run(run))}
    assert {item.word for item in found.values()} == {"undecided"}
    reasons = [item.reason for item in found.values()]
    assert "price unknown" in reasons and "not measured: out of memory" in reasons
    share = found["exposed_communication_share", "every cell"]
    assert share.reason == "no cell that could be profiled has several ranks"


def test_a_cell_with_a_repeat_without_throughput_was_measured(tmp_path: Path) -> None:
    """Its tokens have no cost, which is no want of a measurement."""
    one = train_cell()
    plan = make_plan([one], 2, prices={"local": 0.36}, objectives={"usd_per_million_tokens": 1.0})
    run = write_run(tmp_path / "run", plan)
    write_measurements(run, one, [100.0])
    figures = {"measurement_seconds": 2.0, "cpu_seconds": 1.0, "tokens_per_step": 0}
    write_record(run, one, 1, figures=figures, samples={"0/step_seconds": [1.0] * 4})
    (found,) = judge_objectives(load_run(run))
    assert (found.word, found.reason) == ("undecided", "no cost: a repeat has a throughput of 0")


def test_why_there_is_no_exposed_communication(tmp_path: Path) -> None:
    """A pass that was asked for and failed is not one that the study should ask for."""
    two, lost, unasked = cell(dp=2), cell(dp=2, batch_size=8), cell(dp=2, batch_size=16)
    for asked, cells, reasons in (
        (True, [two, lost], ["profile pass out of memory", "timeout"]),
        (True, [unasked], ["profile pass missing"]),
        (False, [unasked], ["no profile pass (measuring.profile: true asks for one)"]),
    ):
        plan = make_plan(cells, 1, objectives={"exposed_communication_share": 0.1})
        plan = plan.model_copy(update={"measuring": plan.measuring.model_copy(update={"profile": asked})})
        run = write_run(tmp_path / f"run-{len(reasons)}-{asked}", plan)
        for one in cells:
            if one is lost:
                write_record(run, one, status=Status.TIMEOUT)
            else:
                write_measurements(run, one, [100.0])
        if two in cells:
            write_record(run, two, status=Status.OUT_OF_MEMORY, measuring_pass="profile")
        found = judge_objectives(load_run(run))
        assert [item.reason for item in found] == [f"not measured: {reason}" for reason in reasons]


def test_speedup_is_of_the_largest_point_block_by_block(tmp_path: Path) -> None:
    one, two = cell(num_prompts=8), cell(dp=2, num_prompts=8)
    plan = make_plan([one, two], objectives={"speedup": 1.8}, experiments=[strong([one, two])])
    (found,) = judged(tmp_path, plan, [(one, rates(100)), (two, rates(190))])
    # Every block has the same noise, so that each pair's ratio is exact.
    assert found.word == "met" and found.value == pytest.approx(1.9)
    assert found.subject == "strong, 2 ranks over 1"
    assert "speed-up at least 1.80 times is met" in objectives_sentences([found])[0]


def test_why_a_speedup_has_another_interval_than_in_the_table_of_its_experiment(tmp_path: Path) -> None:
    """There it is corrected for all points; both are called a 95 % interval."""
    cells = [cell(dp=ranks, num_prompts=16) for ranks in (1, 2, 4)]
    plan = make_plan(cells, objectives={"speedup": 1.8}, experiments=[strong(cells)])
    noise = [0, 3, -4, 2, -1, 5, -3, 1, -2, 4]
    measured = [(cells[0], [100.0 + each for each in noise]), (cells[1], rates(190)), (cells[2], rates(370))]
    (found,) = judged(tmp_path, plan, measured)
    point = scaling(load_run(RunPaths(tmp_path / "run")), plan.experiments[0]).points[-1]
    assert point.speedup is not None and point.speedup.interval is not None and found.interval is not None
    assert point.speedup.interval[0] < found.interval[0] and found.interval[1] < point.speedup.interval[1]
    assert found.reason.endswith("of this point alone; the table of the experiment corrects its intervals for 2 points")


def test_speedup_of_a_lost_point(tmp_path: Path) -> None:
    one, two = cell(num_prompts=8), cell(dp=2, num_prompts=8)
    run = write_run(
        tmp_path / "run", make_plan([one, two], 1, objectives={"speedup": 1.8}, experiments=[strong([one, two])])
    )
    write_measurements(run, one, [100.0])
    write_record(run, two, status=Status.TIMEOUT)
    (found,) = judge_objectives(load_run(run))
    assert (found.word, found.reason, found.value) == ("undecided", "not measured: timeout", None)


def test_objectives_are_of_cells_that_have_such_a_figure(tmp_path: Path) -> None:
    one, train = cell(), train_cell()
    answers = cell(answers=True)
    plan = make_plan([one, train, answers], objectives={"p99_ttft_seconds": 1.0})
    found = judged(tmp_path, plan, [(one, rates(100)), (train, rates(100))])
    assert [item.result.cell for item in found if item.result] == [one]


def test_the_largest_batch_that_holds(tmp_path: Path) -> None:
    """Requests take 40, 80 and 160 ms: a quarter of what 1,200 requests need."""
    cells = [cell(batch_size=size) for size in (1, 2, 4)]
    plan = make_plan(cells, objectives={"p99_latency_seconds": 0.1})
    found = judged(tmp_path, plan, [(item, rates(125)) for item in cells], passes=1200)
    assert [item.word for item in found] == ["met", "met", "missed"]
    (sentence,) = objectives_sentences(found)
    assert sentence == (
        "tiny (generate): Under 100 ms (P99 latency), "
        "batch 2 is the largest that holds the objective (1 rank, float32, local)."
    )
    (warned,) = objectives_sentences(found, {cells[1].key, cells[2].key})
    assert warned.startswith(sentence + " These have wrong answers: ") and "batch 2" in warned.removeprefix(sentence)
    assert "batch 4" not in warned, "it holds nothing"


def test_tables_hold_every_objective_and_say_what_is_left_out(tmp_path: Path) -> None:
    cells = [cell(batch_size=size) for size in range(1, 41)]
    plan = make_plan(cells, objectives={"tokens_per_second": 50.0, "p99_ttft_seconds": 1.0})
    run: RunPaths = write_run(tmp_path / "run", plan)
    for item in cells:
        write_measurements(run, item, rates(100))
    found = judge_objectives(load_run(run))
    table, summary = objectives_table(found), objectives_summary(found)
    assert table is not None and summary is not None
    assert len(table.rows) == MOST_ROWS and len({row[0] for row in table.rows}) == 2
    assert summary.rows[1] == ("throughput at least 50.0 tokens/s", "40", "0", "0", "0")
    assert objectives_sentences(found)[-1] == "20 more judgements are left out of the table."


def test_no_objectives_no_tables(tmp_path: Path) -> None:
    one = cell()
    assert judged(tmp_path, make_plan([one]), [(one, rates(100))]) == []
    assert objectives_table([]) is None and objectives_summary([]) is None and objectives_sentences([]) == []


@pytest.mark.parametrize(("field", "bound"), [("tokens_per_second", 100.0), ("p99_latency_seconds", 0.2)])
def test_a_figure_at_its_bound_is_within_it(tmp_path: Path, field: str, bound: float) -> None:
    one = cell()
    (found,) = judged(tmp_path, make_plan([one], 1, objectives={field: bound}), [(one, [100.0])])
    assert found.value == bound and "the figure itself is within the bound" in found.reason


def test_an_objective_without_a_figure_shows_no_dash_for_one(tmp_path: Path) -> None:
    cells = [cell(), cell(dp=2)]
    plan = make_plan(cells, 1, objectives={"speedup": 1.5}, experiments=[strong(cells)])
    (line,) = objectives_sentences(judged(tmp_path, plan, [(cells[0], [100.0])]))
    assert line.endswith("is undecided (not measured: missing).")


def test_one_judgement_left_out_is_one(tmp_path: Path) -> None:
    cells = [cell(batch_size=size) for size in range(1, MOST_ROWS + 2)]
    found = judged(tmp_path, make_plan(cells, 1, objectives={"tokens_per_second": 1.0}), [])
    assert objectives_sentences(found)[-1] == "1 more judgement is left out of the table."


def test_a_speed_up_is_of_more_ranks_than_the_baseline_has(tmp_path: Path) -> None:
    cells = [cell(dp=2), cell()]
    plan = make_plan(cells, objectives={"speedup": 1.5}, experiments=[strong(cells)])
    found = judged(tmp_path, plan, [(cells[0], rates(200)), (cells[1], rates(100))])
    assert [(one.word, one.value, one.reason) for one in found] == [
        ("undecided", None, "no point has more ranks than the baseline")
    ]
    assert objectives_sentences(found) == [
        "tiny, strong: speed-up at least 1.50 times is undecided (no point has more ranks than the baseline)."
    ]


def test_work_without_a_model_is_judged_without_naming_one(tmp_path: Path) -> None:
    cells = [Cell(workload=NoopWorkload(items=1), layout=Layout(dp=ranks)) for ranks in (1, 2)]
    experiment = strong(cells).model_copy(update={"model": None})
    plan = make_plan(cells, objectives={"speedup": 1.5}, experiments=[experiment])
    (line,) = objectives_sentences(judge_objectives(load_run(write_run(tmp_path, plan))))
    assert line.startswith("strong, 2 ranks over 1: speed-up at least 1.50 times is undecided")
