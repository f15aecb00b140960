"""A study of load, from the file to the report: a real server of the shipped model, and an endpoint."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from configs.plans.paths import RunPaths
from configs.records.samples import DamagedSamplesError, read_archive
from configs.spec.study import StudyError, parse_study
from flows.cli.main import app
from reports.experiments.load.experiment import answers_of, load_experiment
from reports.load.records import runs_of
from reports.reading.load import load_run
from tests.support.servers.inference_server import TINY, running_server

STUDY = f"""
study: served
models: [{{id: {TINY}}}]
workload: {{kind: serve, rate: 10, prompt_tokens: 8, new_tokens: 4, duration_seconds: 5, judged_requests: 2,
           objectives: {{ttft_seconds: 30, tpot_seconds: 30}}}}
targets: [{{kind: local, device: cpu, price_usd_per_hour: 1}}]
measuring: {{repeats: 1}}
"""


def run_study(folder: Path, text: str) -> RunPaths:
    (folder / "study.yaml").write_text(text)
    result = CliRunner().invoke(app, ["run", str(folder / "study.yaml"), "--runs", str(folder / "runs")])
    assert result.exit_code == 0, result.output
    return RunPaths(folder / "runs" / "served")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    more = (
        "experiments:\n  curve: {kind: load, over: {users: [1, 2]}}\n  missing: {kind: load, base: {engine: sglang}}\n"
    )
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.yaml").write_text(STUDY + more)
    result = CliRunner().invoke(app, ["run", str(folder / "study.yaml"), "--runs", str(folder / "runs")])
    assert "unsupported" in result.output, result.output
    return RunPaths(folder / "runs" / "served")


def test_every_request_is_kept_and_judged(served: RunPaths) -> None:
    study = load_run(served)
    found = load_experiment(study, study.plan.experiments[0])
    assert [point.label for point in found.points] == ["users 1", "users 2"]
    for point in found.points:
        (one,) = point.repeats.values()
        assert one.figures.completed == one.figures.due > 3
        assert one.figures.lengths_held == 1 and {"ttft", "tpot", "itl", "e2e"} <= set(one.figures.latencies)
        assert point.answers is not None and (point.answers.compared, point.answers.equal) == (2, 2)
        command = point.figure("server_command")
        assert command is not None and command.startswith("rankwise serve --model folder:")
        assert "--group-timeout-seconds 60" in command
    assert found.axis == "users"


def test_an_engine_that_is_missing_leaves_a_record(served: RunPaths) -> None:
    study = load_run(served)
    (point,) = study.points(study.plan.experiments[1])
    assert point.status == "unsupported"
    (reading,) = point.measurements.values()
    assert reading.record.failure is not None and "Set engines.sglang.python" in reading.record.failure.message


def test_the_report_has_a_section_of_load(served: RunPaths) -> None:
    report, appendix = served.report.read_text(), (served.folder / "appendix.md").read_text()
    assert "## curve: tiny-stdlib" in report and "2 of 2 equal" in report
    assert "## Load" in appendix and "rankwise serve --model" in appendix
    study = load_run(served)
    # On a busy machine the generator is late, and no point is a result.
    valid = any(point.valid for point in load_experiment(study, study.plan.experiments[0]).points)
    assert ("Latencies under load" in appendix) is valid


def test_samples_that_do_not_add_up_are_refused(served: RunPaths) -> None:
    study = load_run(served)
    reading = next(iter(study.points(study.plan.experiments[0])[0].completed.values()))
    samples = read_archive((served.folder / reading.path).with_suffix(".npz"))
    assert len(list(runs_of(reading.record, samples, "here"))) == 1
    with pytest.raises(DamagedSamplesError, match="here: no column outcome"):
        next(runs_of(reading.record, {name: one for name, one in samples.items() if name != "0/outcome"}, "here"))
    with pytest.raises(DamagedSamplesError, match="do not belong"):
        next(runs_of(reading.record, samples | {"0/run_requests": np.array([1e9])}, "here"))


@pytest.mark.slow
def test_an_endpoint_is_measured_under_its_caps(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        text = f"""
study: served
workload: {{kind: serve, prompt_tokens: 8, new_tokens: 4, duration_seconds: 1.5, judged_requests: 0}}
targets: [{{kind: endpoint, url: "{server.url}", model: tiny, max_rate: 20}}]
measuring: {{repeats: 1}}
experiments:
  limit: {{kind: load, rate: 10, find: max_rate, objectives: {{ttft_seconds: 60}}, share: 0.5, max_runs: 2}}
"""
        study = load_run(run_study(tmp_path, text))
        (point,) = load_experiment(study, study.plan.experiments[0]).points
        (one,) = point.repeats.values()
        assert one.search is not None
        (reading,) = point.result.completed.values()
        samples = read_archive((study.folder / reading.path).with_suffix(".npz"))
        assert 1 <= len(samples["0/run_rate"]) <= 2 and samples["0/run_rate"].max() <= 20
        assert point.result.cell.engine == "endpoint" and point.figure("server_url") == server.url
        # The run's requests are the first that the server has: what it counts is known before them, too.
        assert reading.figure("preemptions") == 0 and (reading.figure("compute_seconds") or 0) > 0


def test_answers_that_differ_at_a_tie_are_noise() -> None:
    rows = np.array([[8, 8, np.nan], [8, 3, 0.05], [8, 3, 2.0], [8, 3, np.nan]])
    found = answers_of(rows, "bfloat16")
    assert found is not None and (found.equal, found.ties, found.different, found.untold) == (1, 1, 1, 1)
    strict = answers_of(rows, "float32")
    assert (
        strict is not None and (strict.different, strict.untold) == (2, 1) and answers_of(rows[:0], "float32") is None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": {"kind": "serve", "rate": 1, "users": 2}}, "users: rate is given too"),
        ({"workload": {"kind": "serve", "find": "max_rate"}}, "objectives: expected bounds"),
        ({"experiments": {"a": {"kind": "load", "share": 0.9}}}, "share: expected objectives"),
        ({"experiments": {"a": {"kind": "load", "objectives": {"p99": 1}}}}, "p99"),
        ({"targets": [{"kind": "endpoint", "url": "ftp://x", "model": "m"}]}, "expected http"),
        ({"targets": [{"kind": "endpoint", "model": "m"}]}, "url: is missing"),
        ({"engines": {"vlm": {}}}, "engines"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], message: str) -> None:
    base = {
        "study": "s",
        "models": [{"id": "m"}],
        "workload": {"kind": "serve"},
        "experiments": {"a": {"kind": "load"}},
    }
    with pytest.raises(StudyError, match=message):
        parse_study(base | change)
