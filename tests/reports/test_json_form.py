"""The answers of a run as JSON: what the report says, with bounds and records; every field is documented."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.common.base import Frozen
from configs.common.files.project_files import ROOT
from configs.plans.paths import RunPaths
from configs.plans.plan import UnusableModel
from configs.records.record import Status
from flows.cli.main import app
from reports import json_form
from reports.json_form import ANSWERS_VERSION, OpeningAnswers, run_answers
from reports.reading.load import load_run
from tests.support.run_folders import report_runs
from tests.support.run_folders.priced_runs import LARGE, cell, make_plan, strong, write_measurements, write_record
from tests.support.run_folders.priced_runs import write_run as write_priced
from tests.support.run_folders.report_runs import generate, plan_of, write_plan

PAGE = ROOT / "docs" / "reference" / "report-json.md"
NOISE = [1.0, 0.98, 1.02, 0.99, 1.01, 1.005, 0.995, 1.03]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Two ranks do 1.5 times the work of one; a larger model ran out of memory."""
    one, two, lost = cell(num_prompts=8), cell(num_prompts=8, dp=2), cell(LARGE)
    made = write_priced(tmp_path / "run", make_plan([one, two, lost], 8, experiments=[strong([one, two])]))
    write_measurements(made, one, [100 * factor for factor in NOISE])
    write_measurements(made, two, [150 * factor for factor in NOISE])
    for repeat in range(8):
        write_record(made, lost, repeat, status=Status.OUT_OF_MEMORY)
    return made


def test_it_says_what_the_report_says(run: RunPaths) -> None:
    found = run_answers(load_run(run))
    (decision,) = found.decisions
    assert decision.chosen is not None and decision.chosen.ranks == 1 and decision.better_by == "rank"
    assert decision.chosen.throughput is not None and decision.chosen.throughput.bounds == "interval"
    assert decision.larger is not None and decision.larger.ranks == 2
    assert decision.larger_over_chosen is not None and decision.larger_over_chosen.value == pytest.approx(1.5)
    per_rank = decision.larger_over_chosen_per_size
    assert per_rank is not None and per_rank.value == pytest.approx(0.75) and per_rank.high < 1
    assert len(decision.chosen.records) == 8 and all((run.folder / path).is_file() for path in decision.chosen.records)
    (experiment,) = found.scaling
    assert [point.ranks for point in experiment.points] == [1, 2]
    assert experiment.points[1].efficiency is not None
    assert experiment.points[1].efficiency.value == pytest.approx(0.75)
    (missing,) = found.without_figure
    assert missing.status == "out_of_memory"


def test_failed_attempts_are_not_behind_a_figure(run: RunPaths) -> None:
    """Every record of the cell's folder was named, of attempts that failed and of repeats beyond the plan too."""
    one = next(iter(load_run(run).plan.cells.values()))
    write_measurements(run, one, [101.0], attempt=2)
    write_record(run, one, 3, status=Status.NODE_FAILED, attempt=2)
    write_record(run, one, 9, status=Status.TIMEOUT)
    (decision,) = run_answers(load_run(run)).decisions
    names = [] if decision.chosen is None else [Path(path).name for path in decision.chosen.records]
    assert names == [f"r{repeat}-a{2 if repeat == 0 else 1}.json" for repeat in range(8)]


def test_the_command_prints_it_and_writes_nothing(run: RunPaths) -> None:
    before = sorted(run.folder.rglob("*"))
    done = CliRunner().invoke(app, ["report", str(run.folder), "--format", "json"])
    assert done.exit_code == 3, "a cell has no figure"
    told = json.loads(done.stdout)
    assert told["version"] == ANSWERS_VERSION and OpeningAnswers.model_validate(told) == run_answers(load_run(run))
    assert sorted(run.folder.rglob("*")) == before


@pytest.mark.parametrize(("missing", "left_out", "code"), [(False, False, 0), (True, False, 3), (False, True, 3)])
def test_every_form_of_the_report_has_one_exit_code(tmp_path: Path, missing: bool, left_out: bool, code: int) -> None:
    """A repeat that failed of a cell with a figure, or a model that was left out: JSON and Markdown ended with 0."""
    one = generate()
    unusable = (UnusableModel(name="broken", reason="no config.json"),) if left_out else ()
    plan = plan_of([one], [], 2).model_copy(update={"unusable": unusable})
    made = write_plan(tmp_path / "run", plan)
    report_runs.write_measurements(made, one, [1.0] if missing else [1.0, 1.1], peak_mib=1.0)
    for form in ("md", "html", "json"):
        assert CliRunner().invoke(app, ["report", str(made.folder), "--format", form]).exit_code == code, form


def test_every_field_is_documented() -> None:
    models = [one for one in vars(json_form).values() if isinstance(one, type) and issubclass(one, Frozen)]
    page = PAGE.read_text()
    for model in models:
        if model.__module__ == json_form.__name__:
            part = page.partition(f"## {model.__name__}\n")[2].partition("\n## ")[0]
            told = {line.split("`")[1] for line in part.splitlines() if line.startswith("| `")}
            assert told == set(model.model_fields), model.__name__
