"""Dollars of cells and of the study, and the Pareto fronts: every figure is known beforehand."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.hardware.prices import Price
from configs.plans.job import Launcher, Submission
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from configs.records.record import Accounting, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget, SlurmTarget
from configs.workloads.script import ScriptWorkload
from reports.answer import answer
from reports.decisions.cost import (
    cell_costs,
    cost_sentences,
    inverse,
    phase_table,
    study_cost_sentence,
    study_cost_table,
)
from reports.decisions.cost import unit_cost_table as unit_table
from reports.decisions.decision import decide
from reports.decisions.pareto import cost_fronts, on_front, pareto_sentence, pareto_table, user_fronts
from reports.decisions.spending import launch_times, study_costs
from reports.document.album import Album
from reports.export import cells_csv
from reports.numbers.statistics import CONFIDENCE, Estimate, estimate
from reports.numbers.stopping import confidence
from reports.plots.decisions.cost import cost_height, draw_costs
from reports.plots.decisions.pareto import draw_pareto, pareto_height
from reports.plots.style import drawn
from reports.reading.load import StudyResult, load_run
from reports.render import analyze_run, appendix_text
from reports.sections.decisions import decision_context
from tests.support.run_folders.priced_runs import (
    LARGE,
    START,
    as_prices,
    at,
    cell,
    make_plan,
    train_cell,
    write_launch,
    write_measurements,
    write_record,
    write_run,
)

RATES = [100.0, 98.0, 102.0, 99.0, 101.0, 100.5, 99.5, 103.0, 97.0, 100.0]


def test_dollars_per_million_tokens_carry_the_interval(tmp_path: Path) -> None:
    one = cell()
    run = write_run(tmp_path / "run", make_plan([one], prices={"local": 0.36}))
    write_measurements(run, one, RATES)
    study = load_run(run)
    (cost,) = cell_costs(study)
    rate, usd = study.cells[one.key].estimate("tokens_per_second"), cost.usd_per_million_tokens
    assert rate is not None and usd is not None and rate.interval is not None and usd.interval is not None
    # 0.36 dollars an hour are 1e-4 a second: 1e6 tokens at 100 tokens/s take 1e4 s, a dollar.
    assert usd.median == pytest.approx(1.0)
    assert usd.interval == pytest.approx((100 / rate.interval[1], 100 / rate.interval[0]))
    assert (usd.low, usd.high) == pytest.approx((100 / 103, 100 / 97))
    # A prompt has 5 tokens: a thousand prompts are 5,000 tokens.
    assert cost.usd_per_thousand_items is not None
    assert cost.usd_per_thousand_items.median == pytest.approx(0.005)
    assert "| tiny | 1 rank, float32, batch 4, 5 tokens | local | 1 | 0.360 | 1.00 (" in str(
        unit_table([cost]).markdown()
    )


def test_the_opening_and_the_table_of_cells_say_what_the_best_costs(tmp_path: Path) -> None:
    one = cell()
    run = write_run(tmp_path / "run", make_plan([one], prices={"local": 0.36}))
    write_measurements(run, one, RATES)
    study = load_run(run)
    best = answer(study, [], decide(study, cell_costs(study)))[0]
    assert " 10 repeats) at " in best.body and best.body.endswith(", $1.00 per million tokens.")
    (line,) = csv.DictReader(io.StringIO(cells_csv(study)))
    assert (line["usd_per_hour"], float(line["usd_per_million_tokens_median"])) == ("0.36", pytest.approx(1.0))
    assert float(line["usd_per_million_tokens_low"]) < 1.0 < float(line["usd_per_million_tokens_high"])


def test_dollars_per_thousand_steps(tmp_path: Path) -> None:
    one = train_cell()
    run = write_run(tmp_path / "run", make_plan([one], prices={"local": 3.6}))
    write_measurements(run, one, [1024.0] * 10)
    (cost,) = cell_costs(load_run(run))
    assert cost.usd_per_thousand_steps is not None and cost.usd_per_million_tokens is not None
    assert cost.usd_per_thousand_steps.median == pytest.approx(1.0)
    assert cost.usd_per_million_tokens.median == pytest.approx(1e6 / 1024 * 1e-3)


def test_slow_steps_are_paid_for(tmp_path: Path) -> None:
    """The median step left out what a slow one costs: a thousand steps cost less than their tokens did."""
    one = train_cell()
    run = write_run(tmp_path / "run", make_plan([one], prices={"local": 3.6}))
    for repeat in range(6):
        write_record(run, one, repeat, figures={"tokens_per_step": 1024}, samples={"0/step_seconds": [1.0] * 9 + [6.0]})
    (cost,) = cell_costs(load_run(run))
    assert cost.usd_per_thousand_steps is not None and cost.usd_per_million_tokens is not None
    assert cost.usd_per_thousand_steps.median == pytest.approx(1.5)
    assert cost.usd_per_million_tokens.median * 1024 * 1000 / 1e6 == pytest.approx(1.5)


def test_without_a_price_there_are_no_dollars(tmp_path: Path) -> None:
    one = cell()
    run = write_run(tmp_path / "run", make_plan([one]))
    write_measurements(run, one, RATES)
    write_launch(run, "job-timed-0", one, -5, -5, 10)
    study = load_run(run)
    costs, targets = cell_costs(study), study_costs(study)
    assert unit_table(costs) is None and targets[0].usd is None and cost_fronts(costs) == []
    sentences = cost_sentences(study, costs, targets)
    assert sentences[0].startswith("No cost in dollars for `local`: the price of an hour is not known; set")
    assert "targets[].price_usd_per_hour" in sentences[0]
    texts = [*sentences, str(study_cost_sentence(targets)), str(study_cost_table(targets)), str(phase_table(targets))]
    assert not any("$" in text or "| 0 |" in text for text in texts)
    assert "What that cost is unknown: `local` has no price." in texts[-3]


def test_energy_where_it_was_measured(tmp_path: Path) -> None:
    one = cell(dp=2)
    run = write_run(tmp_path / "run", make_plan([one], repeats=1, prices={"local": 0.36}))
    figures = {"measurement_seconds": 2.0, "gpu_energy_joules": 150.0}
    write_measurements(run, one, [100.0], figures=figures)
    (cost,) = cell_costs(load_run(run))
    # 150 J on each of two ranks in 2 s are 150 W, at 100 tokens/s.
    assert cost.joules_per_token is not None and cost.joules_per_token.median == pytest.approx(1.5)
    assert "energy, J a token" in unit_table([cost]).columns


def test_the_interval_of_energy_is_widened_where_one_looked_before_stopping(tmp_path: Path) -> None:
    one = cell()
    rules = Measuring(repeats=10, max_repeats=40, target_interval=0.01)
    run = write_run(tmp_path / "run", make_plan([one]).model_copy(update={"measuring": rules}))
    figures = {"measurement_seconds": 2.0, "gpu_energy_joules": 150.0}
    write_measurements(run, one, RATES, figures=figures)
    (cost,) = cell_costs(load_run(run))
    assert cost.joules_per_token is not None and confidence(rules) > CONFIDENCE
    wide = estimate([75 / rate for rate in RATES], confidence(rules))
    assert wide is not None and cost.joules_per_token.interval == pytest.approx(wide.interval)


def test_energy_is_that_of_all_nodes(tmp_path: Path) -> None:
    """Two ranks on each of two nodes; where one of them has no counter, the sum of the others is not the energy."""
    one = cell(dp=4)
    run = write_run(tmp_path / "run", make_plan([one], repeats=1, prices={"local": 0.36}))
    figures = {"measurement_seconds": 2.0, "gpu_energy_joules": 150.0}
    for joules, expected in (([150.0, 50.0, 100.0, 300.0], 3.0), ([150.0, 50.0, None, 300.0], None)):
        by_rank = {"gpu_energy_joules": joules}
        write_measurements(run, one, [100.0], figures=figures, rank_figures=by_rank, hosts=["a", "a", "b", "b"])
        study = load_run(run)
        (cost,) = cell_costs(study)
        found = cost.joules_per_token and cost.joules_per_token.median
        assert found == (pytest.approx(expected) if expected is not None else None)
        told = " ".join(cost_sentences(study, [cost], study_costs(study)))
        assert ("over all nodes" in told) == (expected is not None)


@pytest.mark.parametrize(("measure", "expected"), [("probe", 6.0), ("wall", 1.5)])
def test_energy_of_a_script_is_that_of_its_steps(measure: str, expected: float, tmp_path: Path) -> None:
    """300 W on each of two GPUs while they work at 100 tokens/s; and idle for most of the time until the first step.

    A mark of the script's is of a step, and of nothing that a rank has used in all.
    """
    work = ScriptWorkload(command=("train.py",), measure=measure, tokens_per_step=1024)
    one = Cell(model=cell().model, workload=work, layout=cell(dp=2).layout)
    run = write_run(tmp_path / "run", make_plan([one], repeats=1, prices={"local": 0.36}))
    figures = {"measurement_seconds": 2.0, "gpu_energy_joules": 150.0, "gpu_power_watts": 300.0}
    figures |= {"mark_step_joules": 9.0} if measure == "probe" else {}
    write_measurements(run, one, [100.0], figures=figures)
    (cost,) = cell_costs(load_run(run))
    assert cost.joules_per_token is not None and cost.joules_per_token.median == pytest.approx(expected)


@pytest.fixture
def spent(tmp_path: Path) -> StudyResult:
    """Two launches of 100 s with a gap of 30 s, one after a pause that never reached a measurement, one given up."""
    one = cell()
    target = LocalTarget(machine="aws/g4dn.xlarge/us-east-1")
    run = write_run(tmp_path / "run", make_plan([one], repeats=3, prices={"local": 3.6}, targets=[target]))
    write_launch(run, "a", one, began=0, turn=20, ended=120)
    write_record(run, one, 0, began=40, seconds=50, job="a", status=Status.FAILED)
    write_record(run, one, 0, began=95, seconds=15, job="a", attempt=2, measuring_pass="memory")
    write_launch(run, "b", one, began=100, turn=150, ended=250)
    write_measurements(run, one, [100.0], began=160, seconds=60, job="b", attempt=2)
    write_launch(run, "c", one, began=5000, turn=5000, ended=5010)
    write_launch(run, "given-up", one, began=0, turn=None, ended=None)
    return load_run(run)


def test_where_the_time_of_a_study_goes(spent: StudyResult) -> None:
    (cost,) = study_costs(spent)
    assert cost.seconds == {
        "start-up": 20 + 10,
        "measuring": 60,
        "memory pass": 15,
        "profile pass": 0,
        "perf pass": 0,
        "nsys pass": 0,
        "failed attempts": 50 + 10,
        "between and after measurements": 5 + 10 + 30,
        "idle": 30,
    }
    assert (cost.launches, cost.without_times, cost.pause_seconds) == (3, 1, 5000 - 250)
    assert sorted(cost.startups) == [10, 20]
    assert cost.total_seconds == 240 and cost.usd == pytest.approx(0.24)
    table = study_cost_table([cost])
    assert table is not None and table.rows[0] == ("AWS", "local", "0.240", "0.0667", "3.600", "on demand", "3")
    phases = phase_table([cost])
    assert phases is not None and phases.rows[0] == ("start-up", "30.0", "12.5 %", "0.0300")
    assert study_cost_sentence([cost]) == (
        "The study cost $0.240: 0.0667 h of machine time, 31.2 % of it measuring (memory passes included) "
        "and 25.0 % in failed attempts."
    )
    both = replace(cost, node_seconds=cost.node_seconds | {"perf pass": 12.0})
    assert "34.5 % of it measuring (memory passes and perf passes included) and" in str(study_cost_sentence([both]))
    alone = replace(cost, node_seconds=cost.node_seconds | {"memory pass": 0.0})
    assert "26.7 % of it measuring and" in str(study_cost_sentence([alone]))
    free = [replace(cost, target=name, price=None) for name in ("one", "two")]
    assert str(study_cost_sentence(free)).endswith("What that cost is unknown: `one` and `two` have no price.")
    text = " ".join(cost_sentences(spent, cell_costs(spent), [cost]))
    assert "1.32 h lie in pauses" in text and "start-up of 1 launch is unknown" in text


@pytest.mark.parametrize("price", [None, 3.6])
def test_a_start_up_that_nothing_tells_is_not_zero(price: float | None, tmp_path: Path) -> None:
    """As of jobs of a cluster without accounting, beside the line that says that it is unknown."""
    run = write_run(tmp_path / "run", make_plan([cell()], repeats=1, prices={"local": price} if price else {}))
    write_measurements(run, cell(), [100.0])
    study = load_run(run)
    targets = study_costs(study)
    assert "start-up of 1 launch is unknown" in " ".join(cost_sentences(study, cell_costs(study), targets))
    phases = phase_table(targets)
    assert phases is not None and phases.rows[0] == ("start-up", *["–"] * (3 if price else 2))
    assert phases.rows[1][1] != "–"


def test_a_price_is_stale_by_the_day_of_measuring(tmp_path: Path) -> None:
    one = cell()
    for as_of, stale in (("2025-12-02", False), ("2025-12-01", True), (None, False)):
        price = Price(usd_per_hour=0.5, source="list", as_of=as_of, region="us-east-1")
        run = write_run(tmp_path / str(as_of), make_plan([one], repeats=1, prices={"local": price}))
        write_measurements(run, one, [100.0])
        study = load_run(run)
        text = cost_sentences(study, cell_costs(study), [])[0]
        assert ("**stale**: 31 days old" in text) is stale
        assert ("without a date" in text) is (as_of is None)
        assert "$0.5000 (on demand in us-east-1; source: list" in text


def test_a_part_of_a_machine_costs_the_whole(tmp_path: Path) -> None:
    one, two = cell(), cell(dp=2)
    run = write_run(tmp_path / "run", make_plan([one, two], prices={"local": 1.0}))
    for item in (one, two):
        write_measurements(run, item, RATES)
    study = load_run(run)
    text = " ".join(cost_sentences(study, cell_costs(study), []))
    assert "1 of 2 cells uses less of it than the largest" in text and "at least 60 s" in text


def test_inverse_of_nothing_and_of_zero() -> None:
    assert inverse(None, 1.0) is None
    assert inverse(Estimate(1.0, 0.0, 2.0, 3), 1.0) is None


POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30)


@given(POINTS, st.booleans())
def test_a_front_is_what_nothing_dominates(points: list[tuple[int, int]], more_x: bool) -> None:
    def dominates(first: tuple[int, int], second: tuple[int, int]) -> bool:
        at_least = (first[0] >= second[0] if more_x else first[0] <= second[0]) and first[1] >= second[1]
        return at_least and first != second

    expected = [not any(dominates(other, point) for other in points) for point in points]
    assert on_front([(float(x), float(y)) for x, y in points], more_x) == expected


def test_fronts_of_a_study_and_their_figures(tmp_path: Path) -> None:
    """Batch 4 is slower for a user and faster in all than batch 1; batch 2 is beaten by both."""
    cells = [cell(batch_size=1), cell(batch_size=2), cell(batch_size=4)]
    run = write_run(tmp_path / "run", make_plan(cells, prices={"local": 0.36}))
    for item, rate in zip(cells, (100.0, 60.0, 200.0), strict=True):
        write_measurements(run, item, [rate * factor / 100 for factor in RATES])
    study = load_run(run)
    (user,), (cost,) = user_fronts(study), cost_fronts(cell_costs(study))
    assert [point.result.cell.workload.batch_size for point in user.front] == [4, 1]
    assert "2 of 3 cells are beaten by no other in both; the rest is drawn faint" in pareto_sentence(user)
    assert "With one price for all, the fastest is the cheapest." in pareto_sentence(cost)
    assert [row[0] for row in pareto_table(user).rows] == ["1", "2"]
    for front in (user, cost):
        images = drawn(lambda figure, front=front: draw_pareto(figure, front), pareto_height(front))
        assert images["png"].startswith(b"\x89PNG") and b"<svg" in images["svg"]
    costs = cell_costs(study)
    first, second = (drawn(lambda figure: draw_costs(figure, costs), cost_height(costs)) for _ in range(2))
    assert first == second


def test_equal_cells_of_a_front_trade_nothing(tmp_path: Path) -> None:
    """Of two equal cells "a user gets 1.00 times the speed, and a rank gives 1.00 times fewer tokens"."""
    cells = [cell(), cell().model_copy(update={"dtype": "bfloat16"})]
    told = {}
    for name, faster in (("equal", 1.0), ("apart", 1.5)):
        run = write_run(tmp_path / name, make_plan(cells, prices={"local": 0.36}))
        for item in cells:
            write_measurements(run, item, RATES)
        study = load_run(run)
        for front in (*user_fronts(study), *cost_fronts(cell_costs(study))):
            slow, fast = front.points
            fast = replace(fast, x=fast.x.scaled(faster))
            told[name, front.more_x] = pareto_sentence(replace(front, points=(slow, fast)))
    for more_x in (True, False):
        assert told["equal", more_x].endswith(" They are equal in both to three digits, median against median.")
    assert told["apart", True].endswith("a user gets 1.50 times the speed, and a rank gives as many tokens.")
    assert told["apart", False].endswith("throughput is the same, and a token costs 1.50 times as much.")


def test_a_front_holds_cells_of_the_same_work_only(tmp_path: Path) -> None:
    """A short prompt that is faster than a long one beats nothing."""
    short = [cell(batch_size=size, prompt_tokens=16) for size in (1, 4)]
    long = [cell(batch_size=size, prompt_tokens=2048) for size in (1, 4)]
    cells = [*short, *long, train_cell()]
    run = write_run(tmp_path / "run", make_plan(cells, prices={"local": 0.36}))
    for item, rate in zip(cells, (100.0, 200.0, 20.0, 40.0, 50.0), strict=True):
        write_measurements(run, item, [rate * factor / 100 for factor in RATES])
    study = load_run(run)
    users, priced = user_fronts(study), cost_fronts(cell_costs(study))
    for fronts, title in ((users, "Speed for one user against throughput"), (priced, "Throughput against cost")):
        works = [
            {point.result.cell.workload.model_dump().get("prompt_tokens") for point in one.points} for one in fronts
        ]
        assert works[:2] == [{16}, {2048}]
        assert [one.title for one in fronts[:2]] == [
            f"{title}: tiny, generate, prompt tokens {tokens}, new tokens 5" for tokens in (16, 2048)
        ]
    assert [one.title for one in priced[2:]] == ["Throughput against cost: tiny, train"]
    assert all(any(point.front for point in front.points) for front in (*users, *priced))


def test_of_too_many_fronts_those_of_the_most_cells_are_shown(tmp_path: Path) -> None:
    works = {tokens: [cell(batch_size=size, prompt_tokens=tokens) for size in (1, 4)] for tokens in range(1, 10)}
    works[9].append(cell(batch_size=8, prompt_tokens=9))
    cells = [one for members in works.values() for one in members]
    run = write_run(tmp_path / "run", make_plan(cells))
    for one in cells:
        write_measurements(run, one, RATES)
    context = decision_context(load_run(run), Album(draws=False))
    shown = context["fronts"]
    assert context["fronts_sentence"].startswith("The 8 trade-offs of the most cells are shown, of 9; ")
    assert context["fronts_sentence"] in appendix_text(analyze_run(run, draws=False).context)
    assert [section.title.split("prompt tokens ")[1][0] for section in shown] == [*"1234567", "9"]


def test_a_name_in_signs_that_the_font_has_not_draws_without_a_warning(tmp_path: Path) -> None:
    model = PlannedModel(name="模型", identity="folder:zh", manifest="")
    cells = [cell(model, batch_size=size) for size in (1, 2)]
    run = write_run(tmp_path / "run", make_plan(cells, prices={"local": 1.0}).model_copy(update={"models": (model,)}))
    for item in cells:
        write_measurements(run, item, RATES)
    costs = cell_costs(load_run(run))
    assert drawn(lambda figure: draw_costs(figure, costs), cost_height(costs))["png"].startswith(b"\x89PNG")


def test_targets_of_different_prices(tmp_path: Path) -> None:
    cells = [cell(LARGE, target=name) for name in ("a", "b")]
    targets = [LocalTarget(name="a"), LocalTarget(name="b")]
    run = write_run(tmp_path / "run", make_plan(cells, prices={"a": 1.0, "b": as_prices(3.0)}, targets=targets))
    for item, rate in zip(cells, (100.0, 200.0), strict=True):
        write_measurements(run, item, [rate * factor / 100 for factor in RATES])
    costs = cell_costs(load_run(run))
    ratio = [cost.usd_per_million_tokens.median for cost in costs if cost.usd_per_million_tokens]
    assert ratio[1] / ratio[0] == pytest.approx(1.5)
    (front,) = cost_fronts(costs)
    assert [point.front for point in front.points] == [True, True] and front.prices == 2


def test_a_cell_pays_for_all_its_nodes(tmp_path: Path) -> None:
    one = cell(target="lab")
    two = cell(target="lab", dp=2, batch_size=4).model_copy(update={"nodes": 2})
    plan = make_plan([one, two], prices={"lab": 3.6}, targets=[SlurmTarget(name="lab", nodes=2)])
    run = write_run(tmp_path, plan)
    for each in (one, two):
        write_measurements(run, each, [100.0] * 10)
    study = load_run(run)
    costs = {cost.result.cell.nodes: cost for cost in cell_costs(study)}
    assert (costs[1].usd_per_hour, costs[2].usd_per_hour) == (3.6, 7.2)
    for nodes, cost in costs.items():
        rate = cost.result.estimate("tokens_per_second")
        assert rate is not None and cost.usd_per_million_tokens is not None
        assert cost.usd_per_million_tokens.median == pytest.approx(0.001 * nodes / rate.median * 1e6)
    assert plan.usd_per_hour == 7.2
    lines = cost_sentences(study, cell_costs(study), [])
    assert lines[0].startswith("An hour of a node of target `lab` costs $3.600")
    assert "on a cluster it is of one node, and a cell pays for all its nodes" in lines[1]


def test_jobs_of_a_cluster_are_paid_from_start_to_end_on_each_node(tmp_path: Path) -> None:
    """The queue is not paid for, nor what lies between jobs; accounts are believed where there are any."""
    two = cell(target="lab", dp=2).model_copy(update={"nodes": 2})
    plan = make_plan([two], prices={"lab": 3.6}, targets=[SlurmTarget(name="lab", nodes=2)])
    run = write_run(tmp_path, plan)
    write_cluster_job(
        run, "j0", two, accounts=Accounting(job_id="1", state="COMPLETED", queued_seconds=100, elapsed_seconds=50)
    )
    write_cluster_job(run, "j1", two, began=400, ended=440)
    launches = launch_times(load_run(run))
    assert [(launch.began - START.timestamp(), launch.ended - launch.began) for launch in launches] == [
        (100, 50),
        (400, 40),
    ]
    assert [(launch.nodes, launch.node_seconds) for launch in launches] == [(2, 100), (2, 80)]
    (cost,) = study_costs(load_run(run))
    assert (cost.total_seconds, cost.total_node_seconds, cost.seconds["idle"]) == (90, 180, 0)
    assert cost.usd == pytest.approx(0.18)
    table = study_cost_table([cost])
    assert table is not None and table.columns[3:5] == ("duration, hours", "node hours")
    assert table.rows[0][2:5] == ("0.180", "0.0250", "0.0500")


def write_cluster_job(
    run: RunPaths, name: str, of: Cell, accounts: Accounting | None = None, began: float = 0.0, ended: float = 500.0
) -> None:
    """The files of a job under a scheduler, submitted at 0, that reached no measurement."""
    write_launch(run, name, of, began, None, ended)
    paths = run.job(name)
    for node in range(of.nodes):
        launcher = Launcher(node_rank=node, pid=1, pid_started=1, host="h", started_at=at(began + node))
        paths.node_launcher(node).write_text(launcher.model_dump_json())
    paths.launcher.unlink()
    paths.submission.write_text(Submission(job_id="1", submitted_at=at(0)).model_dump_json())
    if accounts is not None:
        paths.accounting.write_text(accounts.model_dump_json())
