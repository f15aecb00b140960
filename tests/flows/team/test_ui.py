"""Studies as a person runs them in Prefect's own UI: a form filled in by hand, its run, its artifacts, a schedule.

A real Chromium drives the UI that `prefect server start` serves; no call of the API stands in for a click.
"""

import io
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import yaml
from PIL import Image
from playwright.sync_api import Browser, expect
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
from prefect.client.schemas.schedules import IntervalSchedule

from tests.support.browser import SLOW, Field, Ui, chromium, find_chromium, opened
from tests.support.run_folders.studies import status, wait_until, write_study
from tests.support.servers.offline_team import OfflineTeam
from tests.support.servers.stage_graph import stage_graph

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed on this machine"),
]

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
NIGHTLY = "scheduled sweep/nightly"


@pytest.fixture(scope="module")
def browser(team: OfflineTeam) -> Iterator[Browser]:
    with ExitStack() as stack:
        with team.inside():
            started = stack.enter_context(chromium())
        yield started


@pytest.fixture
def ui(browser: Browser, team: OfflineTeam) -> Iterator[Ui]:
    """A window of the UI; the test itself is on the team's network, too."""
    with team.inside(), opened(browser, team.ui) as window:
        yield window


@pytest.fixture(scope="module")
def by_hand(browser: Browser, team: OfflineTeam) -> FlowRun:
    """A run that was asked for in the form, and has ended."""
    with team.inside():
        with opened(browser, team.ui) as ui:
            form = open_form(ui, team)
            fill_in(form, "by-hand")
            experiment = form.field("Experiments")
            experiment.field("Name").fill("grid")
            experiment.field("Question").choose("Sweep")
            experiment.field("Question").field("Over").fill('{"label": ["left", "right"]}')
            run = ui.submit()
        assert team.wait_for(run, *FINAL, seconds=240) == "COMPLETED", team.logs()
        return team.flow_run(run)


def open_form(ui: Ui, team: OfflineTeam) -> Field:
    return ui.form(team.client.read_deployment_by_name("study from the form/form").id)


def fill_in(form: Field, name: str) -> None:
    """What every study here has: a name, a workload that takes no time and no model, one repeat."""
    form.field("Name").fill(name)
    form.field("Workload").choose("Noop")
    form.field("Workload").field("Seconds").fill("0.02")
    form.field("Measuring").field("Repeats").fill("1")
    form.field("Measuring").field("Memory").toggle()


def test_the_form_draws_every_choice(ui: Ui, team: OfflineTeam) -> None:
    form = open_form(ui, team)
    assert form.field("Workload").alternatives == ["Generate", "Sequence to sequence", "Encode", "Train", "Noop"]
    question = form.field("Experiments").field("Question")
    kinds = ["Strong scaling", "Weak scaling", "Sweep", "Optimization", "Correctness", "Compression", "Communication"]
    assert question.alternatives == kinds
    # What is there already is a study that can be run; a model's own name follows its id.
    assert form.field("Models").field("Id").value == "synthetic:llama-4m@0"
    assert form.field("Models").field("Name").value == ""
    assert question.field("To").value == "2"
    assert form.field("Target").field("Cores Per Rank").value == "1"
    assert form.field("Measuring").field("Repeats").value == "10"


def test_what_was_filled_in_is_measured(by_hand: FlowRun, team: OfflineTeam) -> None:
    run = team.work / "runs" / "by-hand"
    study = yaml.safe_load((run / "study.yaml").read_text())
    assert study["workload"] == {"seconds": 0.02, "kind": "noop"}
    assert study["experiments"] == {"grid": {"over": {"label": ["left", "right"]}, "kind": "sweep"}}
    assert study["measuring"] == {"repeats": 1, "memory": False}
    assert [row["status"] for row in status(run)] == ["completed", "completed"]
    assert "left" in (run / "report.md").read_text()
    assert by_hand.name == "by-hand"
    assert not by_hand.auto_scheduled


def test_the_page_of_a_run_shows_the_stages(ui: Ui, by_hand: FlowRun) -> None:
    ui.go(f"/runs/flow-run/{by_hand.id}")
    ui.sees("by-hand")
    ui.sees("target:local")
    expect(ui.page.locator("canvas").first).to_be_visible(timeout=SLOW)  # the timeline
    ui.tab("Task Runs")
    for name in (
        "resolve by-hand",
        "submit noop",
        "wait for noop",
        "collect noop",
        "analyze",
        "render the report",
        "publish by-",
    ):
        ui.sees(name)


def test_the_report_has_its_figures(ui: Ui, by_hand: FlowRun) -> None:
    ui.artifact(by_hand.id, "report-by-hand")
    ui.sees("All measurements completed.")
    figure = ui.page.locator("img.markdown-renderer__image").first
    figure.wait_for()
    assert figure.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
    # The UI opens no files; what the report links to is told as text.
    assert ui.page.locator("article a:not([href^=http])").count() == 0


def test_cells_and_folder_are_artifacts(ui: Ui, by_hand: FlowRun, team: OfflineTeam) -> None:
    ui.artifact(by_hand.id, "cells-by-hand")
    table = ui.sees("items/s").locator("xpath=ancestor::table")
    header = table.locator("thead").inner_text().split()
    assert header == ["cell", "state", "items/s", "repeats", "experiments"]
    assert "1 of 1" in table.locator("tbody").inner_text()
    ui.artifact(by_hand.id, "folder-by-hand")
    ui.sees(str(team.work / "runs" / "by-hand"))


def test_progress_ends_at_all_of_it(ui: Ui, by_hand: FlowRun) -> None:
    ui.artifact(by_hand.id, "progress-by-hand")
    ui.sees("Study by-hand")
    ui.sees("Progress: 100%")


def test_a_form_that_makes_no_study_fails_with_the_field(ui: Ui, team: OfflineTeam) -> None:
    form = open_form(ui, team)
    fill_in(form, "nowhere-to-grow")
    # Strong scaling to no degree: the schema allows it, and so the server.
    form.field("Experiments").field("Question").field("To").choose("None")
    run = ui.submit()
    ui.sees("experiments.strong: expected either `to` (maximum degree) or `points` (a list of degrees)")
    assert team.wait_for(run, *FINAL) == "FAILED"
    assert not (team.work / "runs" / "nowhere-to-grow" / "jobs").exists()


@pytest.mark.nightly
def test_the_short_form_is_refused_at_a_field_mended_and_run(ui: Ui, team: OfflineTeam) -> None:
    """As a person does it: fill it in, read what is wrong, mend that, run, open the graph and the report."""
    form = ui.form(team.client.read_deployment_by_name("study in short/short").id)
    form.field("Name").fill("asked-in-short")
    form.field("Repeats").fill("2")
    form.field("Ranks").fill("0")
    form.field("Advanced").add_item()
    form.field("Advanced").fill("measuring.memory=false")
    ui.page.get_by_role("button", name="Submit", exact=True).click()
    ui.sees("Validation failed for field 'study.ranks'. Failure reason: 0 is less than the minimum of 1")
    form.field("Ranks").fill("2")
    run = ui.submit()
    assert team.wait_for(run, *FINAL, seconds=300) == "COMPLETED", team.logs()
    study = yaml.safe_load((team.work / "runs" / "asked-in-short" / "study.yaml").read_text())
    assert study["experiments"] == {"strong-scaling": {"grow": "dp", "to": 2, "kind": "strong"}}
    assert study["measuring"] == {"repeats": 2, "memory": False}
    # What the graph is drawn from. An answer to the page itself would be gone as soon as the page is left.
    for _ in range(60):
        before, ended = stage_graph(team.client, run)
        if ended and "render the report" in before:
            break
        time.sleep(0.5)
    assert before["render the report"] == {"analyze"} and before["provision"] == {"resolve asked-in-short"}
    assert sum(label.startswith("submit ") for label in before) == 4, "two layouts, twice"
    ui.go(f"/runs/flow-run/{run}")
    graph = ui.page.locator("canvas").first
    wait_until(lambda: bars_drawn(graph.screenshot()) > 500, 60, "the graph to be drawn")
    ui.tab("Task Runs")
    ui.sees("render the report")
    ui.artifact(run, "report-asked-in-short")
    ui.sees("All measurements completed.")


def bars_drawn(picture: bytes) -> int:
    """Pixels of completed stages in a graph; the line of the run itself, at its lower edge, left out."""
    with Image.open(io.BytesIO(picture)) as image:
        graph = image.convert("RGB").crop((0, 0, image.width, image.height - 40))
    colors: list[tuple[int, tuple[int, int, int]]] = graph.getcolors(2**24) or []
    return sum(count for count, (red, green, blue) in colors if red < 70 and green > 110 and blue < 110)


def schedules(team: OfflineTeam) -> dict[str, DeploymentSchedule]:
    deployment = team.client.read_deployment_by_name(NIGHTLY)
    return {schedule.slug or "": schedule for schedule in deployment.schedules}


def test_a_schedule_is_switched_on_and_off(ui: Ui, team: OfflineTeam) -> None:
    deployment, before = team.client.read_deployment_by_name(NIGHTLY).id, schedules(team)
    assert not any(schedule.active for schedule in before.values())
    ui.go(f"/deployments/deployment/{deployment}")
    try:
        ui.busy_once("/schedules/")
        ui.switch("nightly")
        wait_until(
            lambda: scheduled_runs(team, deployment, "SCHEDULED"), 180, "the runs to come"
        )  # the scheduler looks once a minute
        assert not schedules(team)["weekly"].active
        for run in scheduled_runs(team, deployment, "SCHEDULED"):
            assert run.parameters == {"study": "quickstart", "assignments": ["measuring.repeats=3"]}
    finally:
        if schedules(team)["nightly"].active:
            ui.switch("nightly")
        wait_until(lambda: not schedules(team)["nightly"].active, 180, "the schedule's end")
    after = {slug: (schedule.active, schedule.parameters) for slug, schedule in schedules(team).items()}
    assert after == {slug: (schedule.active, schedule.parameters) for slug, schedule in before.items()}
    assert not scheduled_runs(team, deployment, "SCHEDULED")


@pytest.fixture
def every_half_minute(team: OfflineTeam) -> Iterator[str]:
    """A schedule that starts a small study soon; its name. Nothing of it is left behind."""
    path = write_study(team.folder, "on-time")
    with team.inside():
        deployment = team.client.read_deployment_by_name(NIGHTLY).id
        soon = datetime.now(UTC) + timedelta(seconds=10)
        schedule = DeploymentScheduleCreate(
            schedule=IntervalSchedule(interval=timedelta(seconds=30), anchor_date=soon),
            parameters={"study": str(path)},
            slug="on-time",
        )
        [made] = team.client.create_deployment_schedules(deployment, [schedule])
        try:
            yield "on-time"
        finally:
            # Those that are to come go with the schedule; one that has begun is waited for.
            team.client.delete_deployment_schedule(deployment, made.id)
            for run in scheduled_runs(team, deployment, "PENDING", "RUNNING"):
                team.wait_for(run.id, *FINAL)


def scheduled_runs(team: OfflineTeam, deployment: UUID, *states: str) -> list[FlowRun]:
    """The runs that a schedule of the deployment started or will start, of these types of state."""
    ours = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    runs = team.client.read_flow_runs(deployment_filter=ours)
    return [run for run in runs if run.auto_scheduled and run.state is not None and run.state.type.value in states]


def test_a_scheduled_run_writes_a_folder_of_its_own(ui: Ui, team: OfflineTeam, every_half_minute: str) -> None:
    deployment = team.client.read_deployment_by_name(NIGHTLY).id
    wait_until(lambda: scheduled_runs(team, deployment, "COMPLETED"), 240, "a scheduled run")
    run = scheduled_runs(team, deployment, "COMPLETED")[0]
    assert run.name == every_half_minute
    assert "auto-scheduled" in run.tags
    assert run.expected_start_time is not None
    folder = team.work / "runs" / run.expected_start_time.strftime("%Y-%m-%dT%H-%M-%SZ") / "on-time"
    assert (folder / "report.md").is_file()
    ui.go(f"/runs/flow-run/{run.id}")
    ui.sees("auto-scheduled")
    ui.sees("Completed")
