"""The report of a load experiment whose server gave no result."""

import csv
import io

import numpy as np
import pytest

from configs.load.samples import RequestOutcome
from configs.plans.paths import RunPaths
from configs.plans.prediction import Prediction
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.workloads.serve import ServeWorkload
from engine.workloads.serve import errors_text
from reports.experiments.load.experiment import load_experiment
from reports.export import cells_csv
from reports.planning.accuracy import judge, unjudged
from reports.reading.load import load_run
from reports.render import ReportSummary, render_page, render_report
from reports.tables import cpu_use
from tests.support.run_folders.load_runs import made_run, samples_of
from tests.support.run_folders.report_runs import MODEL, experiment, plan_of, write_plan, write_record
from tests.support.run_folders.reports import whole_report

SAID = "HTTP 404: model_not_found <b>"


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, ReportSummary]:
    """A server that refused every request, with its own words for it."""
    cell = Cell(model=MODEL.identity, workload=ServeWorkload(rate=2))
    points = [(cell, {"workload.rate": 2}, "rate 2")]
    plan = plan_of([cell], [experiment("load", "load", points)], repeats=1)
    run = write_plan(tmp_path_factory.mktemp("load") / "refused", plan)
    made = made_run(np.arange(40) / 2, ttft=np.nan, tokens=0, outcome=float(RequestOutcome.REFUSED), ended_seconds=0.5)
    figures = {"errors": errors_text({SAID: 40})}
    write_record(run, cell, status=Status.COMPLETED, samples=samples_of([made]), figures=figures)
    return run, render_report(run)


def test_the_opening_says_that_there_is_no_result_and_why(refused: tuple[RunPaths, ReportSummary]) -> None:
    """It said that all measurements completed, and the short form gave no reason."""
    _, summary = refused
    assert summary.sentences[0] == f"tiny under load: No point has a result (no answers: {SAID})."


def test_words_of_a_server_are_escaped_once(refused: tuple[RunPaths, ReportSummary]) -> None:
    run, _ = refused
    assert "model\\_not\\_found &lt;b&gt;" in whole_report(run)
    assert "\\\\" not in whole_report(run) and "&amp;lt;" not in whole_report(run)
    page = render_page(run)
    assert "model_not_found &lt;b&gt;" in page and "model\\_not" not in page


def test_there_are_no_tables_without_a_row(refused: tuple[RunPaths, ReportSummary]) -> None:
    text = whole_report(refused[0])
    assert "Servers" not in text and "Latencies under load" not in text and "no answers" in text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A server on one core that answered, for 20 s; it and the load generator took 9 s of CPU, the measurement 1."""
    cell = Cell(model=MODEL.identity, workload=ServeWorkload(rate=2))
    plan = plan_of([cell], [experiment("load", "load", [(cell, {"workload.rate": 2}, "rate 2")])], repeats=1)
    reason = "load on a server is not predicted"
    plan = plan.model_copy(update={"predictions": {cell.key: Prediction(reason=reason)}})
    run = write_plan(tmp_path_factory.mktemp("load") / "served", plan)
    figures = {"measurement_seconds": 20.0, "cpu_seconds": 1.0, "children_cpu_seconds": 9.0}
    made = made_run(np.arange(40) / 2, ttft=0.1)
    write_record(run, cell, status=Status.COMPLETED, samples=samples_of([made]), figures=figures, hosts=["h"])
    return run


def test_the_length_of_a_run_is_no_latency_of_a_server(served: RunPaths) -> None:
    """cells.csv had the seconds of the whole load run as `latency_seconds` and as percentiles of a pass."""
    study = load_run(served)
    (line,) = csv.DictReader(io.StringIO(cells_csv(study)))
    assert not [name for name, value in line.items() if value and name.startswith(("latency_", "pass_"))]
    (result,) = study.cells.values()
    assert result.completed and result.estimate("latency_seconds") is None and result.percentiles("pass") is None


def test_served_figures_are_in_the_csv(served: RunPaths) -> None:
    """They were in the appendix and in the JSON form alone."""
    study = load_run(served)
    (line,) = csv.DictReader(io.StringIO(cells_csv(study)))
    assert (line["served_results"], line["served_steady"]) == ("1", "True")
    assert float(line["served_ttft_p99_seconds_median"]) == pytest.approx(0.1)
    assert line["served_ttft_p99_seconds_low"] == "" and line["served_goodput_share_median"] == ""  # one repeat, no bar
    (planned,) = study.plan.experiments
    (point,) = load_experiment(study, planned).points
    for column, figure in (("achieved_requests", "achieved"), ("tokens", "tokens"), ("offered_requests", "offered")):
        value = point.value(figure)
        assert value is not None and float(line[f"served_{column}_per_second_median"]) == pytest.approx(value.median)


def test_refused_requests_are_no_figures_of_the_csv(refused: tuple[RunPaths, ReportSummary]) -> None:
    (line,) = csv.DictReader(io.StringIO(refused[0].cells_csv.read_text()))
    assert line["served_results"] == "0" and line["served_steady"] == ""
    assert not [
        name for name, value in line.items() if name.startswith("served_") and name.endswith("median") and value
    ]


def test_cores_of_a_server_are_used_by_the_server(served: RunPaths) -> None:
    """Its own cores seemed idle: only the process that measures was counted."""
    (result,) = load_run(served).cells.values()
    assert cpu_use(result) == pytest.approx(0.5)


def test_why_a_server_was_not_predicted(served: RunPaths) -> None:
    """The report said that answers are kept, which no cell of a load experiment does."""
    study = load_run(served)
    assert dict(unjudged(study, judge(study))) == {"load on a server is not predicted": 1}
