"""Predictions kept in the plan, and what a finished run teaches: from studies on disk, without Prefect."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner.cells import made_up_calibration
from configs.common.execution import Layout
from configs.hardware.architectures import ARCHITECTURES
from configs.hardware.calibration import CalibratedFigure, Fingerprint, MeasuredLink, Spread, calibration_path
from configs.hardware.prices import Price, TargetPrices
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.plans.prediction import Prediction
from configs.plans.preflight import PairFigures, Preflight, TargetPreflight
from configs.spec.cell import Cell
from configs.targets.target import SlurmTarget
from configs.workloads.generate import GenerateWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.learning import experience_path, read_experiences
from engine.planner.local import LocalMachine, estimated_machine, this_fingerprint
from tasks.models.sources import resolve_model
from tasks.planning.predictions import Predictor, remember_run, with_predictions
from tasks.planning.target_machine import lab_node
from tests.support.run_folders.predicted_plans import NAME, measured_run, plan_of
from tests.support.run_folders.priced_runs import write_run


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache whose machine is calibrated with round figures."""
    path = calibration_path(tmp_path / "cache", this_fingerprint())
    path.parent.mkdir(parents=True)
    path.write_text(made_up_calibration().model_dump_json())
    return tmp_path / "cache"


def only(plan: Plan) -> Prediction:
    (said,) = plan.predictions.values()
    return said


def test_every_cell_has_a_prediction_and_the_plan_is_read_back(cache: Path, tmp_path: Path) -> None:
    plan = with_predictions(plan_of("generate"), tmp_path, cache)
    said = only(plan)
    assert said.tokens_per_second and said.peak_memory_bytes and said.fits and "measured here" in said.basis
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_an_old_plan_without_predictions_is_read() -> None:
    data = json.loads(plan_of("generate").model_dump_json())
    del data["predictions"]
    assert Plan.model_validate(data).predictions == {}


def test_without_a_calibration_the_estimate_is_told(tmp_path: Path) -> None:
    said = only(with_predictions(plan_of("generate"), tmp_path, tmp_path / "empty"))
    assert said.tokens_per_second and said.factor and said.factor >= 3 and "rough estimate" in said.basis


def test_ranks_that_share_memory_are_not_estimated_as_gloo() -> None:
    # Without a calibration a sum of two ranks of our engine counted 2 ms, of 50 us: tp=2 came out 16 times too slow.
    one = Cell(model="m", workload=GenerateWorkload(num_prompts=2))
    known = Fingerprint(cpu_model="a CPU", cores=2, torch=None)
    here = LocalMachine(known, None, estimated_machine(known))
    machines = {
        "shared memory": here.while_running(one.model_copy(update={"layout": Layout(tp=2)})),
        "training": here.while_running(Cell(model="m", workload=TrainWorkload(), layout=Layout(dp=2))),
        "more ranks than cores": here.while_running(one.model_copy(update={"layout": Layout(tp=4)})),
    }
    links = {name: machine.neighbour for name, machine in machines.items()}
    assert all(link is not None and link == machines[name].accelerator.link for name, link in links.items())
    seconds = {name: link.latency_seconds for name, link in links.items() if link is not None}
    assert seconds["shared memory"] < 1e-4 and seconds["training"] == seconds["more ranks than cores"] == 1e-3


def test_the_price_of_the_target_makes_dollars(cache: Path, tmp_path: Path) -> None:
    prices = {"local": TargetPrices(price=Price(usd_per_hour=3.6, source="a test"))}
    said = only(with_predictions(plan_of("generate").model_copy(update={"prices": prices}), tmp_path, cache))
    assert said.tokens_per_second
    assert said.usd_per_million_tokens == pytest.approx(1000 / said.tokens_per_second)


def test_lengths_of_prompts_come_from_the_file(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "abc.jsonl").write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (40, 80)))
    plan = plan_of("generate", prompts="abc")
    (cell,) = plan.cells.values()
    assert Predictor(plan, tmp_path, cache).prompt_lengths(cell) == [10, 20]
    assert only(with_predictions(plan, tmp_path, cache)).tokens_per_second
    lost = only(with_predictions(plan, tmp_path / "nowhere", cache))
    assert lost.tokens_per_second is None and "No such file" in (lost.reason or "")


def test_the_config_comes_from_the_manifest_then_from_the_catalog(cache: Path, tmp_path: Path) -> None:
    manifest = resolve_model(NAME, None, cache, tmp_path)
    path = next(cache.glob("models/*/manifest.json"))
    fetched = PlannedModel(name="m", identity=manifest.identity, manifest=str(path))
    assert only(with_predictions(plan_of("generate", fetched), tmp_path, cache)).tokens_per_second
    strange = PlannedModel(name="m", identity="nobody/nothing@0123", manifest="")
    said = only(with_predictions(plan_of("generate", strange), tmp_path, cache))
    assert said.tokens_per_second is None and said.reason and said.reason.startswith("m: ")
    gone = PlannedModel(name="m", identity=NAME, manifest=str(tmp_path / "gone.json"))
    assert "gone.json" in (only(with_predictions(plan_of("generate", gone), tmp_path, cache)).reason or "")


def test_a_planner_that_breaks_stops_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tasks.planning.predictions.predict_cell", lambda *_: 1 / 0)
    said = only(with_predictions(plan_of("generate"), tmp_path, cache))
    assert said.throughput is None and "the planner failed: division by zero" in (said.reason or "")
    assert "no predictions" in caplog.text


def test_a_rerun_keeps_what_was_said_before(cache: Path, tmp_path: Path) -> None:
    plan = plan_of("generate")
    (key,) = plan.cells
    before = Prediction(tokens_per_second=42.0)
    assert only(with_predictions(plan, tmp_path, cache, {key: before, "other": before})) == before
    unknown = {key: Prediction(reason="nothing known")}
    assert only(with_predictions(plan, tmp_path, cache, unknown)).tokens_per_second


def test_noop_needs_neither_calibration_nor_model(tmp_path: Path) -> None:
    assert only(with_predictions(plan_of("noop"), tmp_path, tmp_path / "empty")).items_per_second == pytest.approx(2.0)


def fetched_plan(cache: Path, base: Path) -> Plan:
    manifest = resolve_model(NAME, None, cache, base)
    path = next(cache.glob("models/*/manifest.json"))
    return plan_of("generate", PlannedModel(name="m", identity=manifest.identity, manifest=str(path)))


def test_a_finished_run_teaches_the_next_prediction(cache: Path, tmp_path: Path) -> None:
    plan = fetched_plan(cache, tmp_path)
    before = only(with_predictions(plan, tmp_path, cache))
    assert before.tokens_per_second and before.correction is None
    run = measured_run(tmp_path / "run", plan, before.tokens_per_second / 2)
    assert remember_run(run, cache) == 1
    assert remember_run(run, cache) == 0, "the same records teach once"
    after = only(with_predictions(plan, tmp_path, cache))
    assert after.tokens_per_second and after.learnt_from == 1
    assert before.tokens_per_second / 2 <= after.tokens_per_second < before.tokens_per_second
    kept = read_experiences(experience_path(cache, this_fingerprint()))
    assert kept.experiences[0].tokens_per_second == pytest.approx(before.tokens_per_second / 2)
    assert list(kept.configs.values()) == [ARCHITECTURES["llama-1m"]]


@pytest.mark.parametrize("changes", [{"torch": "1.0"}, {"cpu_model": "another"}, {"share": 0.5}])
def test_other_hardware_and_busy_machines_teach_nothing(cache: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = fetched_plan(cache, tmp_path)
    assert remember_run(measured_run(tmp_path / "run", plan, 100.0, **changes), cache) == 0


def test_a_cluster_teaches_nothing_of_this_machine_and_learns_nothing_from_it(cache: Path, tmp_path: Path) -> None:
    """Its nodes may be like this machine; its links and what its price is of are not."""
    local = fetched_plan(cache, tmp_path)
    assert remember_run(measured_run(tmp_path / "local", local, 10.0), cache) == 1
    target = SlurmTarget(name="lab", machine="aws/g4dn.xlarge")
    cell = next(iter(local.cells.values())).model_copy(update={"target": "lab"})
    changes = {"targets": (target,), "cells": {cell.key: cell}, "repeats": {cell.key: 3}}
    plan = local.model_copy(update=changes)
    assert remember_run(measured_run(tmp_path / "lab", plan, 100.0), cache) == 0
    said = only(with_predictions(plan, tmp_path, cache))
    assert said.tokens_per_second is not None and said.correction is None


def test_what_cannot_be_learnt_from_is_passed_over(cache: Path, tmp_path: Path) -> None:
    assert remember_run(RunPaths(tmp_path / "none"), cache) == 0
    assert remember_run(write_run(tmp_path / "noop", plan_of("noop")), cache) == 0


LINK = {"latency_seconds": 1e-4, "bytes_per_second": 119e6}
FOUND = TargetPreflight(
    target="slurm", settings="", at="2026-01-01T00:00:00+00:00", ranks_per_node=1,
    pairs=(PairFigures(nodes=("a", "b"), latency_seconds=6e-4, bytes_per_second=50e6),),
)  # fmt: skip


def lab_plan(**target: Any) -> Plan:
    """Two ranks that train on two nodes of a lab."""
    plan = plan_of("generate")
    cell = Cell(
        model=NAME, workload=TrainWorkload(global_batch_size=4, sequence_length=32), layout=Layout(dp=2),
        target="slurm", nodes=2,
    )  # fmt: skip
    lab = SlurmTarget(nodes=2, on_this_machine=True, **target)
    return plan.model_copy(update={"targets": (lab,), "cells": {cell.key: cell}, "repeats": {cell.key: 3}})


def test_a_lab_is_predicted_from_this_machine_s_cores_and_its_link(tmp_path: Path, cache: Path) -> None:
    unknown = only(with_predictions(lab_plan(), tmp_path, cache))
    assert unknown.throughput is None and "until preflight checks measure it" in (unknown.reason or "")
    told = only(with_predictions(lab_plan(link=LINK), tmp_path, cache))
    assert told.step_seconds and told.network_bytes_per_step


def test_what_preflight_found_predicts_what_could_not_be_before(tmp_path: Path, cache: Path) -> None:
    plan = with_predictions(lab_plan(), tmp_path, cache)
    found = Preflight(targets=(FOUND,))
    slow = only(with_predictions(plan, tmp_path, cache, plan.predictions, found))
    told = only(with_predictions(lab_plan(link=LINK), tmp_path, cache, None, found))  # the target's own word counts
    assert slow.step_seconds and told.step_seconds and slow.step_seconds > told.step_seconds
    (cell,) = plan.cells.values()
    link = Predictor(plan, tmp_path, cache, preflight=found).machine(cell).between
    # Two ranks sum in two messages; the bus's rate is that of all of a node's ranks.
    assert link and link.latency_seconds == pytest.approx((6e-4 - 1024 / 50e6) / 2) and link.message_seconds is None
    assert link.bytes_per_second == 50e6
    (pair,) = FOUND.pairs
    pair = pair.model_copy(update={"sum_seconds": 8e-4, "message_seconds": 1e-4})  # what a step has counts
    found = Preflight(targets=(FOUND.model_copy(update={"pairs": (pair,)}),))
    link = Predictor(plan, tmp_path, cache, preflight=found).machine(cell).between
    assert link and link.latency_seconds == pytest.approx((8e-4 - 1024 / 50e6) / 2)
    assert link.message_seconds == pytest.approx(1e-4 - 1024 / 50e6)


@pytest.mark.parametrize(
    ("layout", "batch", "computing"),
    [(Layout(tp=2), 4, 2), (Layout(pp=2), 1, 1), (Layout(pp=2), 4, 2), (Layout(), 4, 1)],
)
def test_ranks_of_one_lab_node_share_memory_and_stages_take_turns(layout: Layout, batch: int, computing: int) -> None:
    def spread(seconds: float) -> Spread:
        return Spread(median=seconds, low=seconds, high=seconds, rounds=1)

    made = made_up_calibration()
    link = {"ranks": 2, "seconds": {4096: 1e-4}, "latency_seconds": 1e-4, "bytes_per_second": 1e9, "error": 0}
    two = made.model_copy(
        update={
            "fingerprint": made.fingerprint.model_copy(update={"cores": 2}),
            "ranks": 2,
            "figures": made.figures | {"read": CalibratedFigure(alone=spread(1e-10), together=spread(2e-10))},
            "links": tuple(
                MeasuredLink.model_validate(link | {"transport": way, "sum_seconds": took, "message_seconds": took / 4})
                for way, took in (("gloo", 4e-4), ("shared memory", 2e-5))
            ),
        }
    )
    here = LocalMachine(two.fingerprint, two, estimated_machine(two.fingerprint))
    target = SlurmTarget(nodes=1, ranks_per_node=2, on_this_machine=True)
    work = GenerateWorkload(batch_size=batch, num_prompts=batch)
    node = lab_node(target, Cell(model=NAME, workload=work, layout=layout, target="slurm"), here, None)
    assert node.accelerator.bytes_per_second == pytest.approx(1e10 / computing)
    assert node.inside and (node.inside.latency_seconds, node.inside.message_seconds) == pytest.approx((1e-5, 5e-6))
