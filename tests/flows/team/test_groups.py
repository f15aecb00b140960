"""Blocks of a long study are groups of its graph; a group that Prefect does not take is measured all the same."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.sorting import FlowRunSort

from configs.records.record import MeasuringPass
from flows.measuring import MAX_GROUP, MAX_UNGROUPED, Made, in_groups
from flows.server.local import ApiLease, prefect_api
from tasks.campaign.progress import ProgressRow
from tests.support.run_folders.studies import RANKWISE, status, write_study
from tests.support.servers.migrated_database import put_database
from tests.support.servers.stage_graph import Graph, stage_graph

BROKEN_SUBFLOWS = """
import sys
import flows.measuring
import prefect.flow_engine as engine
from flows.cli.main import app
from slurm.forking import parents
made = engine.FlowRunEngine.create_flow_run
start = parents._submit
flows.measuring.MAX_GROUP = 3

def counted(folder):
    print("a parent of launches started")
    return start(folder)

def create(self, client):
    if self.flow.name == "launches":
        raise ConnectionError("503 Service Unavailable")
    return made(self, client)

engine.FlowRunEngine.create_flow_run = create
parents._submit = counted
sys.argv[0] = "rankwise"
app()
"""

STAGES = """
from prefect import flow
from flows.server.local import prefect_api
from tasks.prefect_api.stages import stage

@stage("make", "make")
def make():
    return {"cores": 2}

@stage("use", "use {number}")
def use(number, given):
    return given["cores"]

@flow(name="two stages", flow_run_name="two stages")
def two_stages():
    made, done = make.after()()
    assert use(1, made) == 2
    assert use.after(done)(2, made)[0] == 2

with prefect_api():
    two_stages()
"""


class FakeLaunch:
    """The two fields of a launch by which it is grouped."""

    def __init__(self, block: int, measuring_pass: MeasuringPass = "timed") -> None:
        self.block, self.measuring_pass = block, measuring_pass


def made(block: int, measuring_pass: MeasuringPass = "timed") -> Any:
    row = ProgressRow("tiny  bfloat16  dp=2", 1, block + 1, 3, measuring_pass)
    return FakeLaunch(block, measuring_pass), row


def test_groups_are_blocks_and_passes_in_order() -> None:
    rows: list[Made] = [made(0), made(0), made(1), made(2), made(0, "memory"), made(0, "memory")]
    groups = [(title, len(group)) for title, group in in_groups(rows)]
    assert groups == [("block 1 of 3", 2), ("block 2 of 3", 1), ("block 3 of 3", 1), ("memory pass", 2)]


def test_a_long_block_has_parts_of_alike_size() -> None:
    rows: list[Made] = [made(0) for _ in range(2 * MAX_GROUP + 2)]
    groups = list(in_groups(rows))
    assert [title for title, _ in groups] == [f"block 1 of 3, part {part} of 3" for part in (1, 2, 3)]
    assert [launch for _, group in groups for launch in group] == rows
    assert max(len(group) for _, group in groups) <= MAX_GROUP


def long_study(folder: Path, name: str) -> Path:
    """More launches than a graph shows side by side."""
    labels = [f"l{number}" for number in range(MAX_UNGROUPED // 2 + 1)]
    experiments = {"grid": {"kind": "sweep", "over": {"label": labels}}}
    measuring = {"repeats": 2, "memory": False, "cell_timeout_seconds": 60}
    return write_study(folder, name, experiments=experiments, measuring=measuring, pack=False)


def latest_run(client: SyncPrefectClient, name: str) -> UUID:
    named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    [run, *_] = client.read_flow_runs(flow_run_filter=named, sort=FlowRunSort.START_TIME_DESC)
    return run.id


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the test's own, which other tests beside may let wait: no stage may be lost for that."""
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    put_database(tmp_path / "data" / "prefect" / "prefect.db")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_API_REQUEST_TIMEOUT", "60")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "5")


def graphs_in_full(client: SyncPrefectClient, api: ApiLease, command: list[str], stages: dict[str, int]) -> list[Graph]:
    """The graphs of the flow runs that a command makes, once the ends of all their stages are recorded.

    stages: how many each run has, by its name.

    Prefect's server may lose what it heard of a task last where the run ends soon after, which is none of this test's
    business: the run is then made again, twice at most.
    """
    assert api.home is not None
    for attempt in range(3):
        folder = api.home / f"attempt {attempt}"
        folder.mkdir()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        for _ in range(120):  # the server records task runs with a delay
            found = [stage_graph(client, latest_run(client, name)) for name in stages]
            if [(len(graph), ended) for graph, ended in found] == [(count, True) for count in stages.values()]:
                return [graph for graph, _ in found]
            time.sleep(0.5)
    log = (api.home / "server.log").read_text()
    raise AssertionError(f"{stages} expected, recorded are {found}; the server said:\n{log[-4000:]}")


@pytest.mark.nightly
def test_blocks_are_groups_of_the_graph(tmp_path: Path, patient: None) -> None:
    study = long_study(tmp_path, "long")
    with prefect_api() as api, SyncPrefectClient(api.url) as client:
        chain = ["test the nodes", "launches / block 1 of 2", "launches / block 2 of 2", "analyze", "render the report"]
        stages = {"long": len(chain) + 4, "block 2 of 2": 3 * (MAX_UNGROUPED // 2 + 1)}
        before, of_a_block = graphs_in_full(client, api, [RANKWISE, "run", str(study)], stages)
        for upstream, name in itertools.pairwise(chain):
            assert before[name] == {upstream}, before
        assert sum(not parents for parents in of_a_block.values()) == 1, "a chain"


@pytest.mark.slow
def test_edges_are_those_that_the_study_draws(tmp_path: Path, patient: None) -> None:
    """Prefect by itself draws one to whatever has the `id()` that a result once had."""
    with prefect_api() as api, SyncPrefectClient(api.url) as client:
        [edges] = graphs_in_full(client, api, [sys.executable, "-c", STAGES], {"two stages": 3})
        assert edges == {"make": set(), "use 1": set(), "use 2": {"make"}}


@pytest.mark.slow
def test_a_group_that_the_api_does_not_take_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    put_database(tmp_path / "data" / "prefect" / "prefect.db")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    study = long_study(tmp_path, "ungrouped")
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_SUBFLOWS, "run", str(study)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = [row["status"] for row in status(tmp_path / "runs" / "ungrouped")]
    assert statuses == ["completed"] * (2 * (MAX_UNGROUPED // 2 + 1)), json.dumps(statuses)
    parents = done.stdout.count("a parent of launches started")
    assert parents == 2, "one for each repeat: the three parts of a block share one"
