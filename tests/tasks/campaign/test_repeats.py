"""How often cells are measured: further repeats for what is not known well enough, and what ends them."""

import re
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.prices import Price, TargetPrices
from configs.plans.job import Job, JobEnd, Launcher, Measurement
from configs.plans.packing import Launch
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan
from configs.plans.rentals import RentalAttempt, Rentals, StudyRental
from configs.records.rates import Rates
from configs.records.record import Record, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.spec.study import StudyError, parse_study
from configs.targets.target import LocalTarget, SshTarget
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from flows.cluster_launches import SubmissionQueue, run_on_clusters
from reports.decisions.spending import study_costs
from reports.numbers.stopping import next_look
from reports.reading.load import CellResult, load_run
from reports.reading.read import Reading
from tasks.campaign.launch_prices import LaunchPrices
from tasks.campaign.launches.leftovers import collected_marker
from tasks.campaign.ledger import read_ledger, targets_to_measure
from tasks.campaign.progress import ProgressRow, RunProgress
from tasks.campaign.repeats import Budget, carried_on, launched_usd, planned_with_repeats, targets_to_rent
from tasks.campaign.retries import Retries
from tasks.checks.machine import check_resources
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_plan import make_plan
from tests.support.run_folders.made_studies import decoded, planned, write_plan, write_record

STEADY = [100.0, 100.2, 99.9, 100.1, 99.8, 100.0, 100.1, 99.9, 100.2, 99.8, 100.0, 100.1, 99.9, 100.0]
LOUD = [100.0, 140.0, 60.0, 120.0, 80.0, 150.0, 70.0, 110.0, 90.0, 130.0]


def plan_of(cells: dict[str, Cell], repeats: int, **rules: Any) -> Plan:
    return Plan(
        study="s", models=(), targets=(LocalTarget(),), pack=True, experiments=(), cells=cells,
        measuring=Measuring(repeats=10, target_interval=0.02, **rules), repeats=dict.fromkeys(cells, repeats),
    )  # fmt: skip


def measured(label: str, values: list[float | None], planned: int = 10) -> CellResult:
    """A cell whose repeats gave these items a second; None failed."""
    cell = Cell(workload=NoopWorkload(label=label))
    measurements = {}
    for repeat, value in enumerate(values):
        status = Status.FAILED if value is None else Status.COMPLETED
        record = Record(
            key=cell.key, cell=cell, repeat=repeat, attempt=1, status=status, job="j", position=0,
            started_at=None, finished_at=None,
        )  # fmt: skip
        measurements[repeat] = Reading(
            record, "p", True, None if value is None else Rates(1.0, 1, items_per_second=value)
        )
    return CellResult(cell.key, cell, label, "no model", planned, measurements, None)


def grown(result: CellResult, planned: int, ended_by: Any = None, **rules: Any) -> tuple[int, str | None]:
    plan = plan_of({result.key: result.cell}, planned, **rules)
    after = planned_with_repeats(plan, {result.key: result}, ended_by)
    return after.repeats[result.key], after.stopped.get(result.key)


def test_a_cell_goes_on_until_its_interval_is_within_the_target() -> None:
    assert grown(measured("steady", STEADY[:10]), 10) == (14, None), "met once, to be confirmed"
    assert grown(measured("steady", STEADY), 14) == (14, "target reached")
    look = next_look(LOUD, Measuring(repeats=10, target_interval=0.02))
    assert look is not None and grown(measured("loud", LOUD), 10) == (look, None)


def test_nothing_is_decided_while_repeats_are_missing() -> None:
    assert grown(measured("steady", STEADY[:7]), 10) == (10, None)


def test_failed_repeats_do_not_ask_for_more_of_them_for_ever() -> None:
    assert grown(measured("lost", [None] * 10), 10) == (10, None)
    some = [*LOUD, *[None] * 5]
    planned, ended = grown(measured("some", some), 15, max_repeats=20)
    assert (planned, ended) == (20, None)
    assert grown(measured("some", [*some, *[None] * 5]), 20, max_repeats=20) == (20, "most repeats")


def test_the_most_repeats_end_a_cell() -> None:
    assert grown(measured("loud", LOUD * 2), 20, max_repeats=20) == (20, "most repeats")


@pytest.mark.parametrize("ended_by", ["budget of time", "budget of money"])
def test_a_spent_budget_ends_what_was_not_promised(ended_by: str) -> None:
    """Fifteen were planned, twelve made: the plan is what was made. Of a promised ten none is dropped."""
    assert grown(measured("loud", [*LOUD, 100.0, 101.0]), 15, ended_by) == (12, ended_by)
    assert grown(measured("few", LOUD[:4]), 10, ended_by) == (10, ended_by)
    assert grown(measured("steady", STEADY), 14, ended_by) == (14, "target reached")


class Stub:
    """What Budget reads of a session."""

    def __init__(self, plan: Plan, run: RunPaths) -> None:
        self.plan, self.run, self.run_progress = plan, run, RunProgress()


def launch(run: RunPaths, name: str, began: str, turn: str | None, ended: str) -> None:
    """A launch that reached no measurement: its job, its launcher and its end."""
    job = run.job(name)
    job.folder.mkdir(parents=True)
    measurements = (Measurement(cell=Cell(workload=NoopWorkload()), repeat=0, attempt=1),)
    made = Job(
        name=name,
        study="s",
        measuring_pass="timed",
        measuring=Measuring(),
        measurements=measurements,
        ranks_per_node=1,
        timeout_seconds=1,
        inputs="",
        cache="",
    )
    job.job.write_text(made.model_dump_json())
    launcher = Launcher(pid=1, pid_started=1, host="h", started_at=began, lock_acquired_at=turn)
    job.launcher.write_text(launcher.model_dump_json())
    job.end.write_text(JobEnd(status=Status.COMPLETED, return_code=0, finished_at=ended).model_dump_json())


def test_money_counts_every_launch_of_the_folder(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    plan = plan_of({}, 10, budget_usd=1.0).model_copy(
        update={"prices": {"local": TargetPrices(price=Price(usd_per_hour=2.0, source="study"))}}
    )
    run.plan.write_text(plan.model_dump_json())
    launch(run, "a", "2026-01-01T00:00:00+00:00", None, "2026-01-01T00:10:00+00:00")
    launch(run, "b", "2026-01-01T00:00:00+00:00", "2026-01-01T00:20:00+00:00", "2026-01-01T00:30:00+00:00")
    run.job("still going").folder.mkdir()
    run.job("torn").folder.mkdir()
    run.job("torn").launcher.write_text("{")
    run.job("torn").end.write_text("")
    assert launched_usd(plan, run) == pytest.approx(2.0 / 3)  # twice ten minutes
    assert Budget(Stub(plan, run)).spent() is None  # type: ignore[arg-type]  # 0.67 of 1 dollar
    dearer = plan.model_copy(update={"prices": {"local": TargetPrices(price=Price(usd_per_hour=3.1, source="study"))}})
    assert Budget(Stub(dearer, run)).spent() == "budget of money"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "target",
    [
        {"kind": "slurm", "name": "gpu"},
        {"kind": "pbs", "name": "gpu"},
        {"kind": "ssh", "name": "gpu", "hosts": ["gpu-a"]},
        {"kind": "aws", "name": "gpu", "instance": "g4dn.xlarge", "regions": ["us-east-1"]},
    ],
    ids=lambda target: target["kind"],
)
def test_a_targets_own_price_counts_towards_a_budget(tmp_path: Path, target: dict[str, object]) -> None:
    work = {"workload": {"kind": "noop"}, "experiments": {"one": {"kind": "sweep", "over": {"items": [1]}}}}
    priced = target | {"price_usd_per_hour": 3.6}
    study = parse_study({"study": "s", "targets": [priced], "measuring": {"budget_usd": 1.0}, **work})
    run = RunPaths(tmp_path)
    plan = make_plan(study, [], copy_inputs(study, run, tmp_path), run.inputs)
    run.plan.write_text(plan.model_dump_json())
    budget = Budget(Stub(plan, run))  # type: ignore[arg-type]
    budget.paid("gpu", 900)
    assert budget.spent(here=False) is None  # 0.90 of 1 dollar
    assert budget.spent([("gpu", 200.0)], here=False) == "budget of money"


def priced_study(target: str, **changes: Any) -> Any:
    """A study of this machine under a name, with a budget of one dollar."""
    data = {
        "study": "s", "workload": {"kind": "noop"}, "measuring": {"budget_usd": 1.0},
        "targets": [{"kind": "local", "name": target, "price_usd_per_hour": 3.6}],
        "experiments": {"one": {"kind": "sweep", "over": {"items": [1]}}},
    }  # fmt: skip
    return parse_study(data | changes)


def test_launches_on_a_target_that_was_renamed_still_cost_money(tmp_path: Path) -> None:
    """A study whose budget was spent had all of it again once its target had another name in the file."""
    run = RunPaths(tmp_path / "run")
    old = make_plan(priced_study("local"), [], copy_inputs(priced_study("local"), run, tmp_path), run.inputs)
    for name, minutes in (("a", 10), ("b", 12)):
        launch(run, name, "2026-01-01T00:00:00+00:00", None, f"2026-01-01T00:{minutes}:00+00:00")

    def planned_again(study: Any, before: Plan | None) -> Plan:
        plan = make_plan(study, [], copy_inputs(study, run, tmp_path), run.inputs, before=before)
        run.plan.write_text(plan.model_dump_json())
        return plan

    renamed = priced_study("here")
    plan = planned_again(renamed, old)
    plan = planned_again(renamed, plan)  # and by the plan after it
    assert launched_usd(plan, run) == pytest.approx(1.32) and launched_usd(plan, run, {"here"}) == 0
    assert Budget(Stub(plan, run)).spent() == "budget of money"  # type: ignore[arg-type]
    [cost] = study_costs(load_run(run))
    assert (cost.target, cost.usd) == ("local", pytest.approx(1.32)) and cost.seconds["idle"] == 0

    plan = planned_again(renamed, None)  # as where the earlier plan cannot be read
    with pytest.raises(StudyError, match=r"budget_usd: .*run has launches on local, which .* Name `target: local` in"):
        Budget(Stub(plan, run))  # type: ignore[arg-type]
    write_record(run, next(iter(old.cells.values())), 0, status=Status.FAILED)
    with pytest.raises(StudyError, match="launches on local"):
        targets_to_rent(plan, run, only_failed=False)  # before anything is started
    shutil.rmtree(run.records)
    (tmp_path / "prices.yaml").write_text("prices: [{target: lo*, usd_per_hour: 0.36}]\n")
    plan = planned_again(priced_study("here", prices="prices.yaml"), old)
    assert launched_usd(plan, run) == pytest.approx(0.132)


@pytest.mark.parametrize(("own", "usd"), [({}, 0.06 + 0.3), ({"price_usd_per_hour": 3.6}, 3.6 + 3.6)])
def test_jobs_on_rented_nodes_cost_what_these_were_rented_for(
    tmp_path: Path, own: dict[str, float], usd: float
) -> None:
    """At the price on demand of the first region, whatever the market and the place that gave the nodes."""
    target = {"kind": "aws", "name": "gpu", "instance": "g4dn.xlarge", "regions": ["us-east-1"], "market": "spot"}
    study = priced_study("", targets=[target | own])
    run = RunPaths(tmp_path)
    plan = make_plan(study, [], copy_inputs(study, run, tmp_path), run.inputs)
    run.plan.write_text(plan.model_dump_json())
    prices = LaunchPrices(plan, run)
    listed = plan.prices["gpu"].price
    assert listed is not None and prices.per_second("gpu") == listed.usd_per_hour / 3600  # nothing is rented yet
    refused, spot, dear = (
        RentalAttempt(at=f"2026-01-01T0{hour}:00:00+00:00", region=region, market=market, usd_per_hour=price,
                      problem=problem)
        for hour, region, market, price, problem in (
            (0, "us-east-1", "spot", 0.01, "capacity"),
            (1, "us-east-1", "spot", 0.06, None),
            (3, "us-west-2", "on_demand", 0.3, None),
        )
    )  # fmt: skip
    rental = StudyRental(
        target="gpu", provider="aws", instance="g4dn.xlarge", nodes=1, name="r", attempts=(refused, spot, dear)
    )
    run.rentals.write_text(Rentals(rentals=(rental,)).model_dump_json())
    early = datetime(2026, 1, 1, 2, tzinfo=UTC).timestamp()
    assert 3600 * ((prices.per_second("gpu", early) or 0) + (prices.per_second("gpu") or 0)) == pytest.approx(usd)
    budget = Budget(Stub(plan, run))  # type: ignore[arg-type]
    budget.paid("gpu", 3600)
    budget.spent([("gpu", 3600.0)], here=False)
    assert budget._progress.spent_usd == pytest.approx(2 * (3.6 if own else 0.3))


def test_what_this_machine_cost_counts_while_jobs_run_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With further repeats the clusters' turn comes again, after this machine's: its dollars were not counted then."""
    targets = [{"kind": "local", "price_usd_per_hour": 3.6}, {"kind": "slurm", "price_usd_per_hour": 3.6}]
    study = parse_study(
        {
            "study": "s",
            "workload": {"kind": "noop"},
            "experiments": {"one": {"kind": "sweep", "over": {"items": [1]}}},
            "targets": targets,
            "measuring": {"budget_usd": 1.0},
        }
    )
    run = RunPaths(tmp_path)
    plan = make_plan(study, [], copy_inputs(study, run, tmp_path), run.inputs)
    run.plan.write_text(plan.model_dump_json())
    session = Stub(plan, run)
    budget = Budget(session)  # type: ignore[arg-type]
    ended: list[str | None] = []
    monkeypatch.setattr(SubmissionQueue, "run", lambda queue: ended.append(queue._spent()))
    launch = Launch("timed", (Measurement(cell=next(iter(plan.cells.values())), repeat=0, attempt=1),))
    made = [(launch, ProgressRow("", 1, 1, 1))]

    run_on_clusters(session, made, Retries(), budget)  # type: ignore[arg-type]
    budget.elsewhere(-900)  # this machine's turn: 0.90 dollars
    run_on_clusters(session, made, Retries(), budget)  # type: ignore[arg-type]
    assert session.run_progress.spent_usd == pytest.approx(0.9, abs=0.01)
    budget.elsewhere(-200)
    run_on_clusters(session, made, Retries(), budget)  # type: ignore[arg-type]
    assert ended == [None, None, "budget of money"]


def test_what_an_earlier_run_had_grown_to_is_kept() -> None:
    """A run that is refused after its plan was written must not take repeats out of the report."""
    cell = Cell(workload=NoopWorkload(label="steady"))
    before = plan_of({cell.key: cell}, 14).model_copy(update={"stopped": {cell.key: "target reached", "gone": "x"}})
    fresh = plan_of({cell.key: cell}, 10)
    assert carried_on(fresh, before).repeats == {cell.key: 14}
    assert carried_on(fresh, before).stopped == {cell.key: "target reached"}
    without = fresh.model_copy(update={"measuring": Measuring(repeats=10)})
    assert carried_on(without, before) == without


def test_an_earlier_run_does_not_outvote_a_lower_maximum() -> None:
    cell = Cell(workload=NoopWorkload(label="loud"))
    before = plan_of({cell.key: cell}, 45)
    for most, repeats in ((20, 20), (45, 45), (60, 45), (5, 10)):
        assert carried_on(plan_of({cell.key: cell}, 10, max_repeats=most), before).repeats == {cell.key: repeats}


def test_time_in_which_others_had_the_machine_is_not_paid_for(tmp_path: Path) -> None:
    session = Stub(plan_of({}, 10, budget_minutes=0.0001), RunPaths(tmp_path))
    budget = Budget(session)  # type: ignore[arg-type]
    time.sleep(0.02)
    assert budget.spent() == "budget of time" and session.run_progress.spent_seconds >= 0.02
    budget.waited(60)
    assert budget.spent() is None


def test_a_budget_that_is_nearly_used_up_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    session = Stub(plan_of({}, 10, budget_minutes=1.0), RunPaths(tmp_path))
    budget = Budget(session, told.append)  # type: ignore[arg-type]
    assert budget.spent() is None and told == []
    budget.waited(-50)
    assert budget.spent() is None and budget.spent() is None
    assert told == ["0.8 of 1 minutes of the budget are used"]


def test_both_budgets_are_told_and_one_that_is_passed_at_once_too(tmp_path: Path) -> None:
    told: list[str] = []
    plan = plan_of({}, 10, budget_minutes=1.0, budget_usd=100.0).model_copy(
        update={"prices": {"local": TargetPrices(price=Price(usd_per_hour=3600.0, source="study"))}}
    )
    run = RunPaths(tmp_path)
    run.plan.write_text(plan.model_dump_json())
    budget = Budget(Stub(plan, run), told.append)  # type: ignore[arg-type]
    budget.elsewhere(-90)
    assert budget.spent() is None
    budget.waited(-80)
    assert budget.spent() == "budget of money"
    assert told[0].startswith("9") and told[0].endswith(" of 100 USD of the budget are used")
    budget.elsewhere(80)
    assert budget.spent() == "budget of time"
    assert told[1:] == ["1.3 of 1 minutes of the budget are used"]


def test_what_is_left_to_pay_follows_from_what_was_paid_for(tmp_path: Path) -> None:
    plan = plan_of({}, 10).model_copy(
        update={"prices": {"local": TargetPrices(price=Price(usd_per_hour=3600.0, source="study"))}}
    )
    session = Stub(plan, RunPaths(tmp_path))
    budget, progress = Budget(session), session.run_progress  # type: ignore[arg-type]
    budget.elsewhere(-10)
    assert budget.spent() is None
    assert progress.spent_usd == pytest.approx(10, abs=1)
    progress.total, progress.done, progress.already = 10, 6, 1
    progress.started -= 10
    progress.rows.append(ProgressRow("", 5, 1, 1, attempt=2))
    progress.study, progress.stage = "s", "measuring"
    assert progress.remaining_usd == pytest.approx(8, abs=1)
    assert re.fullmatch(
        r"Study s: measuring, 6 of 10 measurements done, 1 launch tried again, about 10 s to go and [78]\.\d\d USD",
        progress.description,
    )


def test_a_budget_of_money_needs_a_price(tmp_path: Path) -> None:
    plan = plan_of({}, 10, budget_usd=1.0)
    told = "measuring.budget_usd: requires a price for every target, and local has none. Set "
    with pytest.raises(StudyError, match=f"^{told}targets"):
        check_resources(plan, tmp_path)
    [here] = plan.targets
    somewhere = plan.model_copy(update={"targets": (here.model_copy(update={"machine": "aws/p4d.24xlarge"}),)})
    with pytest.raises(StudyError, match=f"^{told}a region in "):
        check_resources(somewhere, tmp_path)


def test_answers_are_asked_for_once() -> None:
    result = measured("steady", STEADY[:1], planned=1)
    plan = plan_of({result.key: result.cell}, 1)
    kept = replace(result, cell=Cell(model="m", workload=GenerateWorkload(answers=True)))
    assert planned_with_repeats(plan, {result.key: kept}, None) == plan


RENTED = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}
targets: [{kind: aws, instance: c7i.xlarge, regions: [us-east-1]}]
experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2]}}}
measuring: {repeats: 6, target_interval: 0.0000001, max_repeats: 12, memory: false}
"""


def test_nodes_are_rented_for_repeats_that_an_interval_asks_for(tmp_path: Path) -> None:
    """All that was planned is measured, and the interval is too wide: jobs were handed to nodes that nobody rented."""
    plan = planned(RENTED)
    run = write_plan(tmp_path / "run", plan)
    assert targets_to_rent(plan, run, only_failed=False) == {"aws"} and targets_to_rent(plan, run, True) == set()
    for cell in plan.cells.values():
        for repeat in range(6):
            samples = decoded(cell, 0.01 * (1 + 0.1 * repeat))
            write_record(run, cell, repeat, samples=samples, figures={"num_prompts": 1, "prompt_tokens": 8})
    assert targets_to_measure(plan, read_ledger(run), False) == set()
    assert targets_to_rent(plan, run, only_failed=False) == {"aws"}
    assert targets_to_rent(plan, run, only_failed=True) == set(), "it measures no new ones"
    wide = plan.measuring.model_copy(update={"max_repeats": 6})
    assert targets_to_rent(plan.model_copy(update={"measuring": wide}), run, only_failed=False) == set()


def left_job(run: RunPaths, plan: Plan) -> JobPaths:
    """A job on rented hosts that a killed run left."""
    launch(run, "0001-timed-a", "2026-01-01T00:00:00+00:00", None, "2026-01-01T00:10:00+00:00")
    paths = run.job("0001-timed-a")
    host = SshTarget.model_validate({"kind": "ssh", "name": plan.targets[0].name, "hosts": ["10.0.0.1"]})
    job = Job.model_validate_json(paths.job.read_bytes()).model_copy(update={"target": host})
    paths.job.write_text(job.model_dump_json())
    paths.end.unlink()
    return paths


def test_nodes_on_which_a_killed_run_left_a_job_are_rented_for_what_failed_too(tmp_path: Path) -> None:
    """It was adopted without them, and tried again on nodes that nobody had rented when they had gone."""
    plan = planned(RENTED)
    run = write_plan(tmp_path / "run", plan)
    paths = left_job(run, plan)
    assert targets_to_rent(plan, run, only_failed=True) == {"aws"}
    collected_marker(run, paths.folder.name).touch()
    assert targets_to_rent(plan, run, only_failed=True) == set()


def test_nothing_is_rented_once_the_money_is_spent(tmp_path: Path) -> None:
    """Nodes came up, were paid for, and no launch was begun on them."""
    prices = {"aws": TargetPrices(price=Price(usd_per_hour=120.0, source="a test"))}
    plan = planned(RENTED).model_copy(update={"prices": prices})
    run = write_plan(tmp_path / "run", plan)
    write_record(run, next(iter(plan.cells.values())), 0, status=Status.FAILED)  # 30 seconds

    def rented(usd: float) -> set[str]:
        rules = plan.measuring.model_copy(update={"budget_usd": usd})
        return targets_to_rent(plan.model_copy(update={"measuring": rules}), run, only_failed=False)

    assert rented(1.5) == {"aws"} and rented(0.5) == set()
    left_job(run, plan)  # of a killed run, which may go on
    assert rented(0.5) == {"aws"}
