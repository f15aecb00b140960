"""Takes the pictures of Prefect's UI that the documents show: python -m tests.support.take_screenshots [FOLDER]

A team's server and Prefect worker are started, a real study is filled into the form and measured, and its
pages are kept as PNG in FOLDER (docs/images). It takes some minutes; the machine should be quiet.
"""

import os
import sys
import tempfile
from pathlib import Path
from uuid import UUID

from playwright.sync_api import Browser
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact

from tests.support.browser import Field, chromium, opened
from tests.support.servers.offline_team import OfflineTeam
from tests.support.studies import wait_until

IMAGES = Path(__file__).parents[2] / "docs" / "images"
STUDY = "batch-and-ranks"
LONG_STUDY = "two-hundred-launches"
TWO_HUNDRED_LAUNCHES = f"""
workload: {{kind: noop, seconds: 0.05}}
pack: false
experiments: {{grid: {{kind: sweep, over: {{label: {[f"c{cell:02}" for cell in range(20)]}}}}}}}
measuring: {{repeats: 10, memory: false}}
"""
_LIMIT_SECONDS = 1200.0
_DRAWN_MILLISECONDS = 6000
"""The graph is drawn on a canvas, which says nothing when it is done."""


def ask_for_the_study(browser: Browser, team: OfflineTeam, images: Path) -> UUID:
    """Fill in the form, as a person would, and send it."""
    deployment = team.client.read_deployment_by_name("study from the form/form").id
    with opened(browser, team.ui, height=1180) as ui:
        form = ui.form(deployment)
        form.field("Name").fill(STUDY)
        form.field("Models").field("Id").fill("synthetic:llama-40m@0")
        ui.picture(images / "prefect-form.png")
        form.field("Measuring").field("Repeats").fill("3")
        form.field("Measuring").field("Min Seconds").fill("0.5")
        sweep = form.field("Experiments").add_item()
        Field(sweep, "Name").fill("batch")
        Field(sweep, "Question").choose("Sweep")
        Field(sweep, "Question").field("Over").fill('{"batch_size": [1, 2, 4, 8]}')
        sweep.evaluate("item => item.scrollIntoView()")
        ui.picture(images / "prefect-experiments.png", height=840)
        return ui.submit()


def artifacts(team: OfflineTeam, run: UUID, kind: str) -> list[Artifact]:
    """The run's artifact of this kind, if it is there already: `progress` or `report`."""
    chosen = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[run]), key=ArtifactFilterKey(any_=[f"{kind}-{STUDY}"])
    )
    return team.client.read_artifacts(artifact_filter=chosen)


def half_way(team: OfflineTeam, run: UUID) -> bool:
    state = team.state(run)
    assert state in ("SCHEDULED", "PENDING", "RUNNING"), state
    return any(float(str(found.data)) >= 45 for found in artifacts(team, run, "progress"))


def keep_pages_of(browser: Browser, team: OfflineTeam, run: UUID, images: Path) -> None:
    """Progress half-way, then graph and report. In between no window takes from what is measured."""
    wait_until(lambda: half_way(team, run), _LIMIT_SECONDS, "half of the study")
    with opened(browser, team.ui, height=900) as ui:
        ui.go(f"/artifacts/artifact/{artifacts(team, run, 'progress')[0].id}")
        ui.sees("Progress: ")
        ui.picture(images / "prefect-progress.png", height=480)
    assert team.wait_for(run, "COMPLETED", "FAILED", "CRASHED", seconds=_LIMIT_SECONDS) == "COMPLETED"
    with opened(browser, team.ui, height=500) as ui:
        ui.go(f"/runs/flow-run/{run}")
        ui.page.locator("canvas").first.wait_for()
        ui.page.wait_for_timeout(_DRAWN_MILLISECONDS)
        ui.picture(images / "prefect-graph.png")
    with opened(browser, team.ui, height=1000) as ui:
        ui.go(f"/artifacts/artifact/{artifacts(team, run, 'report')[0].id}")
        ui.page.locator("img.markdown-renderer__image").first.wait_for()
        ui.picture(images / "prefect-report.png")


def keep_the_short_form(browser: Browser, team: OfflineTeam, images: Path) -> None:
    """The short form, and the graph of two hundred launches that are asked for in it, as YAML."""
    deployment = team.client.read_deployment_by_name("study in short/short").id
    with opened(browser, team.ui, height=1100) as ui:
        form = ui.form(deployment)
        form.field("Name").fill(LONG_STUDY)
        form.field("YAML").place.scroll_into_view_if_needed()
        ui.picture(images / "prefect-short-form.png")
        form.field("YAML").fill(TWO_HUNDRED_LAUNCHES)
        run = ui.submit()
    assert team.wait_for(run, "COMPLETED", "FAILED", "CRASHED", seconds=_LIMIT_SECONDS) == "COMPLETED"
    with opened(browser, team.ui, height=520) as ui:
        ui.go(f"/runs/flow-run/{run}")
        ui.page.locator("canvas").first.wait_for()
        ui.page.wait_for_timeout(_DRAWN_MILLISECONDS)
        ui.picture(images / "prefect-graph-200.png")


def keep_the_schedules(browser: Browser, team: OfflineTeam, images: Path) -> None:
    """The sweep's page with one schedule on, and the runs that it brings."""
    deployment = team.client.read_deployment_by_name("scheduled sweep/nightly").id
    with opened(browser, team.ui, height=900) as ui:
        ui.go(f"/deployments/deployment/{deployment}")
        ui.switch("nightly")
        ui.tab("Upcoming")
        ui.sees("Scheduled for")
        ui.picture(images / "prefect-schedules.png")


def main() -> int:
    """Take them all."""
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "RANKWISE_"))]:
        del os.environ[name]  # settings of whoever runs this
    images = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rankwise-") as folder:
        team = OfflineTeam(Path(folder))
        try:
            with team.inside():
                team.start_server()
                team.start_worker()
                with chromium() as browser:
                    run = ask_for_the_study(browser, team, images)
                    keep_pages_of(browser, team, run, images)
                    keep_the_short_form(browser, team, images)
                    keep_the_schedules(browser, team, images)
        finally:
            team.close()
    print(f"pictures: {images}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
