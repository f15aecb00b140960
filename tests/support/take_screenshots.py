"""Takes the pictures of Prefect's UI that the documents show.

    python -m tests.support.take_screenshots [FOLDER]
    python -m tests.support.take_screenshots [FOLDER] --cluster     # the graph of two Slurm nodes; as root

A team's server and Prefect worker are started, a real study is filled into the form and measured, and its
pages are kept as PNG in FOLDER (docs/images). It takes some minutes; the machine should be quiet.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import UUID

import httpx
from playwright.sync_api import Browser
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact

from flows.server.local import lease_server
from tests.support.browser import Field, chromium, opened
from tests.support.cluster.lab import lab_for_tests
from tests.support.run_folders.studies import RANKWISE, wait_until
from tests.support.servers.offline_team import OfflineTeam

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
_GRAPH_HEIGHT = 640
TWO_NODES = """
study: two-nodes
models: [{id: synthetic:llama-4m@0}]
workload: {kind: generate, prompt_tokens: 16, new_tokens: 8, num_prompts: 4, batch_size: 4}
targets: [{kind: slurm, name: lab, partition: link-1gbit, nodes: 2, ranks_per_node: 1, poll_seconds: 1}]
experiments: {strong: {kind: strong, grow: dp, to: 2}}
measuring: {repeats: 2, memory: false, min_seconds: 0.2}
"""


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


def keep_the_graph(browser: Browser, url: str, run: UUID | str, path: Path) -> None:
    """The graph of a run alone, in the whole window."""
    with opened(browser, url, height=_GRAPH_HEIGHT) as ui:
        ui.go(f"/runs/flow-run/{run}")
        ui.page.locator("canvas").first.wait_for()
        ui.page.get_by_title("Toggle fullscreen").click()
        ui.page.wait_for_timeout(_DRAWN_MILLISECONDS)
        ui.page.get_by_title("Recenter graph").click()
        ui.picture(path)


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
    keep_the_graph(browser, team.ui, run, images / "prefect-graph.png")
    with opened(browser, team.ui, height=1000) as ui:
        ui.go(f"/artifacts/artifact/{artifacts(team, run, 'report')[0].id}")
        ui.page.locator("img.markdown-renderer__image").first.wait_for()
        ui.picture(images / "prefect-report.png")


def keep_the_short_form(browser: Browser, team: OfflineTeam, images: Path) -> None:
    """The short form, and the graph of two hundred launches that are asked for in it, as YAML."""
    deployment = team.client.read_deployment_by_name("study in short/short").id
    with opened(browser, team.ui, height=1240) as ui:
        form = ui.form(deployment)
        form.field("Name").fill(LONG_STUDY)
        ui.picture(images / "prefect-short-form.png")
        form.field("YAML").fill(TWO_HUNDRED_LAUNCHES)
        run = ui.submit()
    assert team.wait_for(run, "COMPLETED", "FAILED", "CRASHED", seconds=_LIMIT_SECONDS) == "COMPLETED"
    keep_the_graph(browser, team.ui, run, images / "prefect-graph-200.png")


def keep_the_schedules(browser: Browser, team: OfflineTeam, images: Path) -> None:
    """The sweep's page with one schedule on, and the runs that it brings."""
    deployment = team.client.read_deployment_by_name("scheduled sweep/nightly").id
    with opened(browser, team.ui, height=900) as ui:
        ui.go(f"/deployments/deployment/{deployment}")
        ui.switch("nightly")
        ui.tab("Upcoming")
        ui.sees("Scheduled for")
        ui.picture(images / "prefect-schedules.png")


def take_those_of_a_cluster(images: Path) -> None:
    """The graph of a study on two nodes of a lab, which is brought up for it and taken down."""
    with tempfile.TemporaryDirectory(prefix="rankwise-") as scratch:
        folder = Path(scratch)
        os.environ |= {"RANKWISE_DATA": str(folder / "data"), "RANKWISE_CACHE": str(folder / "cache")}
        (folder / "two-nodes.yaml").write_text(TWO_NODES)
        with lease_server() as lease:
            lease.wait_until_healthy()
            with lab_for_tests(folder / "lab"):
                subprocess.run([RANKWISE, "run", "two-nodes.yaml"], cwd=folder, check=True, timeout=400)
            [run] = httpx.post(f"{lease.url}/flow_runs/filter", json={}, trust_env=False).json()
            with chromium() as browser:
                keep_the_graph(browser, lease.ui, run["id"], images / "prefect-graph-slurm.png")


def main() -> int:
    """Take them all, or those of a cluster alone."""
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "RANKWISE_"))]:
        del os.environ[name]  # settings of whoever runs this
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=IMAGES)
    parser.add_argument("--cluster", action="store_true", help="only the graph of two Slurm nodes; as root")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then, too
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (take_those_of_a_cluster if arguments.cluster else take_those_of_a_team)(arguments.folder)
    print(f"pictures: {arguments.folder}")
    return 0


def take_those_of_a_team(images: Path) -> None:
    """Forms, progress, graphs, report and schedules."""
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


if __name__ == "__main__":
    sys.exit(main())
