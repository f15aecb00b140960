"""Each export, read back by the library that it is for."""

import json
from pathlib import Path

import pandas as pd
import pytest

from configs.plans.paths import RunPaths
from configs.records.record import Failure, Status
from reports.exports.writers import EXPORTS
from reports.reading.load import StudyResult, load_run
from tests.support.run_folders.made_studies import cells_of, planned, write_measurements, write_plan, write_record
from tests.support.run_folders.wandb_files import offline_records

HOSTILE = 'a"b\n{c="d"} \\ `e`: [f]'


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """Two cells of ten repeats and one that failed, of a model whose name is hostile."""
    plan = planned(
        "workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}\n"
        "experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2, 4]}}}"
    )
    named = plan.models[0].model_copy(update={"name": HOSTILE})
    run = write_plan(tmp_path_factory.mktemp("exports") / "run", plan.model_copy(update={"models": (named,)}))
    (_, one), (_, two), (_, lost) = cells_of(plan)
    write_measurements(run, one, 0.01, peak_mib=100)
    write_measurements(run, two, 0.02)
    write_record(run, lost, 0, status=Status.FAILED, failure=Failure(message="gone"))
    return load_run(run)


def measured(study: StudyResult) -> dict[str, dict[int, float]]:
    """tokens/s by cell and repeat."""
    return {key: cell.values("tokens_per_second") for key, cell in study.cells.items() if cell.completed}


def test_parquet(study: StudyResult, tmp_path: Path) -> None:
    records, _ = EXPORTS["parquet"](study, tmp_path)
    frame = pd.read_parquet(records)
    assert len(frame) == len(study.readings) and set(frame["key"]) == set(study.cells)


def test_prometheus(study: StudyResult, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    (path,) = EXPORTS["prometheus"](study, tmp_path)
    samples = [one for family in text_string_to_metric_families(path.read_text()) for one in family.samples]
    medians = {
        one.labels["key"]: one.value
        for one in samples
        if one.name == "rankwise_tokens_per_second" and one.labels["stat"] == "median"
    }
    estimates = {key: study.cells[key].estimate("tokens_per_second") for key in measured(study)}
    assert medians == {key: found.median for key, found in estimates.items() if found is not None}
    assert {one.labels["status"] for one in samples if one.name == "rankwise_cell_status"} == {"completed", "failed"}


def test_tensorboard(study: StudyResult, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = EXPORTS["tensorboard"](study, tmp_path)
    EXPORTS["tensorboard"](study, tmp_path)  # again: nothing is there twice
    for folder in folders:
        read = EventAccumulator(str(folder)).Reload()  # type: ignore[no-untyped-call]
        found = {each.step: each.value for each in read.Scalars("tokens_per_second")}
        assert found == pytest.approx(measured(study)[folder.name], rel=1e-6)
    assert {folder.name for folder in folders} == measured(study).keys()


@pytest.mark.slow
def test_mlflow(study: StudyResult, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    (path,) = EXPORTS["mlflow"](study, tmp_path)
    EXPORTS["mlflow"](study, tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    experiment = client.get_experiment_by_name("made")
    assert experiment is not None
    runs = {run.data.tags["key"]: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == study.cells.keys()
    for key, values in measured(study).items():
        history = client.get_metric_history(runs[key].info.run_id, "tokens_per_second")
        assert {each.step: each.value for each in history} == values and len(history) == len(values)
    assert sorted(run.info.status for run in runs.values()) == ["FAILED", "FINISHED", "FINISHED"]


@pytest.mark.slow
def test_what_was_measured_since_is_added_in_mlflow_and_another_run_stands_beside_it(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    plan = planned(
        "workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}\n"
        "experiments: {sizes: {kind: sweep, over: {batch_size: [1]}}}"
    )
    ((_, cell),), (key,) = cells_of(plan), plan.cells
    first, second = (write_plan(tmp_path / name, plan) for name in ("it's first", "second"))
    write_record(first, cell, 0, status=Status.FAILED, failure=Failure(message="gone"))
    (path,) = EXPORTS["mlflow"](load_run(first), tmp_path / "out")
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    experiment = client.get_experiment_by_name("made")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.metrics, run.data.tags["status"]) == ("FAILED", {}, "failed")
    write_measurements(first, cell, 0.01)
    write_measurements(second, cell, 0.02)
    for folder in (first, second):
        study = load_run(folder)
        EXPORTS["mlflow"](study, tmp_path / "out")
        found = client.search_runs([experiment.experiment_id], f"tags.key = '{key}'")
        (run,) = [one for one in found if one.data.tags["run"] == folder.folder.name]
        assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "completed")
        history = client.get_metric_history(run.info.run_id, "tokens_per_second")
        assert {each.step: each.value for each in history} == study.cells[key].values("tokens_per_second") != {}
    assert len(found) == 2


@pytest.mark.slow
def test_two_runs_of_a_study_are_not_one_in_mlflow(tmp_path: Path) -> None:
    """Their folders have the study's name, whatever --runs is: the repeats of both were one series."""
    from mlflow.tracking import MlflowClient

    plan = planned(
        "workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}\n"
        "experiments: {sizes: {kind: sweep, over: {batch_size: [1]}}}"
    )
    ((_, cell),), rates = cells_of(plan), []
    for place, day in (("main", "01"), ("change", "02"), ("main", "01")):
        run = RunPaths(tmp_path / place / "made")
        if not run.folder.exists():
            write_plan(run.folder, plan)
            write_measurements(run, cell, 0.01 if place == "main" else 0.02)
            for record in run.records.glob("*/*.json"):
                record.write_text(record.read_text().replace("2026-01-01", f"2026-01-{day}"))
        study = load_run(run)
        (path,) = EXPORTS["mlflow"](study, tmp_path / "out")
        rates.append(study.cells[cell.key].values("tokens_per_second"))
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    experiment = client.get_experiment_by_name("made")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["tags.began"])
    found = [client.get_metric_history(run.info.run_id, "tokens_per_second") for run in runs]
    assert [{each.step: each.value for each in history} for history in found] == rates[:2]
    assert [len(history) for history in found] == [len(rates[0]), len(rates[1])], "the third is the first once more"


@pytest.mark.slow
def test_wandb(study: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    found: dict[str, list[float]] = {}
    for folder in EXPORTS["wandb"](study, tmp_path):
        key, rates = "", []
        for record in offline_records(next(folder.glob("run-*.wandb"))):
            items = {item.key: item.value_json for item in record.run.config.update}
            key = json.loads(items["key"]) if "key" in items else key
            for item in record.history.item:
                if "tokens_per_second" in (item.key, *item.nested_key):
                    rates.append(json.loads(item.value_json))
        found[key] = rates
    assert found == {key: list(measured(study).get(key, {}).values()) for key in study.cells}


def test_huggingface(study: StudyResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    EXPORTS["huggingface"](study, tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == len(study.readings) and set(loaded["key"]) == set(study.cells)
    hub = pytest.importorskip("huggingface_hub")
    card = hub.DatasetCard.load(tmp_path / "out" / "README.md")
    assert card.data.pretty_name == "made" and card.data.tags == ["benchmark", "rankwise"]


def test_optimum(study: StudyResult, tmp_path: Path) -> None:
    """By optimum-benchmark itself where it is installed; the numbers in any case."""
    paths = EXPORTS["optimum"](study, tmp_path)
    assert {path.parent.name for path in paths} == measured(study).keys()
    for path in paths:
        raw = json.loads(path.read_text())
        values = study.cells[path.parent.name].values("ttft_seconds")
        assert raw["prefill"]["latency"]["values"] == list(values.values())
    report = pytest.importorskip("optimum_benchmark.benchmark.report").BenchmarkReport
    for path in paths:
        read = report.from_json(str(path))
        rate = study.cells[path.parent.name].estimate("tokens_per_second")
        assert rate is not None and read.per_token.throughput.value == rate.median
        assert read.prefill.latency.p50 > 0


def test_memory_of_a_gpu_is_no_memory_of_the_host(tmp_path: Path) -> None:
    """What torch allocated on the GPU stood under `max_ram`, and the GPU seemed to need nothing."""
    plan = planned(
        "workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}\n"
        "experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2]}}}"
    )
    run = write_plan(tmp_path / "run", plan)
    (_, gpu), (_, cpu) = cells_of(plan)
    for cell, host in ((gpu, {"peak_host_memory_bytes": 3_000_000}), (cpu, {})):
        write_measurements(run, cell, 0.01)
        figures = {"peak_memory_bytes": 80_000_000, **host}
        write_record(run, cell, 0, measuring_pass="memory", figures=figures)
    EXPORTS["optimum"](load_run(run), tmp_path)
    found = [json.loads((tmp_path / cell.key / "benchmark_report.json").read_text()) for cell in (gpu, cpu)]
    known = [{name: value for name, value in one["prefill"]["memory"].items() if value is not None} for one in found]
    assert known == [{"unit": "MB", "max_ram": 3.0, "max_allocated": 80.0}, {"unit": "MB", "max_ram": 80.0}]


def test_fields_are_numbers_and_none_vanishes_at_its_default(study: StudyResult, tmp_path: Path) -> None:
    """They were texts, by which Weights & Biases neither draws nor sorts, and a batch of 1 had no batch size."""
    EXPORTS["optimum"](study, tmp_path)
    files = tmp_path.glob("*/benchmark_config.json")
    found = {json.loads(file.read_text())["workload.batch_size"] for file in files}
    assert found == {1, 2} and type(min(found)) is int
