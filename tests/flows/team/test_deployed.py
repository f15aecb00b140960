"""Studies run by a real Prefect worker of a real Prefect server, offline: forms, names, tags, secrets, limits."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import pytest
from prefect.client.schemas.actions import DeploymentUpdate, VariableCreate, VariableUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import State, TaskRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelling, Scheduled, Suspended

import flows.deployed
from configs.plans.paths import RunPaths
from configs.spec.study import StudyError
from flows.deployed import run_name, study_from_the_form
from flows.measuring import MAX_UNGROUPED
from slurm.launcher.machine_lock import launch_lock
from tasks.campaign.launches.staging import TargetAway
from tasks.campaign.run_lock import run_lock
from tasks.models.sources import TransientFetchError
from tests.support.run_folders.studies import processes_of, status, under_measurement, wait_until, write_study
from tests.support.servers.hub_server import Fault, HubServer, Repository, make_model
from tests.support.servers.offline_team import OfflineTeam, form

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
TOKEN = "hf_" + "Zq7" * 11
SAVE_SECRET = """
import json, sys
from prefect.blocks.system import Secret
Secret(value=json.load(sys.stdin)).save("rankwise-credentials", overwrite=True)
"""


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_the_teams_network(team: OfflineTeam) -> Iterator[None]:
    with team.inside():
        yield


def tasks_of(team: OfflineTeam, run: UUID) -> list[TaskRun]:
    """The tasks of a run that has ended, once the end of each is recorded, or after 30 s: names come with the ends."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    for _ in range(60):
        tasks = team.client.read_task_runs(flow_run_filter=only)
        if tasks and all(task.end_time is not None for task in tasks):
            break
        time.sleep(0.5)
    return tasks


def await_process(team: OfflineTeam, run: UUID) -> None:
    """Return when the process of a run is gone."""
    pid = team.flow_run(run).infrastructure_pid
    assert pid is not None, "the worker says which it is when it has started it"
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "the run's process to end")


def progress_of(team: OfflineTeam, run: UUID) -> list[str]:
    """The descriptions of the artifacts that say how far a run is."""
    artifacts = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    found = team.client.read_artifacts(artifact_filter=artifacts)
    return [artifact.description or "" for artifact in found if artifact.type == "progress"]


def lines_of_ended(team: OfflineTeam, run: UUID) -> list[str]:
    """The log of a run that has ended, once its process is gone: the last lines are sent when that exits."""
    await_process(team, run)
    logged = team.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])))
    assert logged, "each run says something at its beginning"
    return [line.message for line in logged]


@pytest.fixture(scope="module")
def from_the_form(team: OfflineTeam) -> UUID:
    """A run of two repeats of two cells, filled in as a form."""
    sweep = {"kind": "sweep", "over": {"seconds": [0.01, 0.02]}}
    measuring = {"repeats": 2, "memory": False, "cell_timeout_seconds": 60}
    models, experiments = [{"id": "synthetic:llama-1m@0"}], [{"name": "grid", "question": sweep}]
    with team.inside():
        run = team.run_form(form("from-the-ui", models=models, experiments=experiments, measuring=measuring))
        assert team.wait_for(run, *FINAL) == "COMPLETED"
    return run


def test_a_study_from_the_form(team: OfflineTeam, from_the_form: UUID) -> None:
    flow_run = team.flow_run(from_the_form)
    assert flow_run.name == "from-the-ui"
    assert set(flow_run.tags) == {"rankwise", "study", "model:llama-1m", "target:local"}
    assert (team.work / "runs" / "from-the-ui" / "report.md").exists()
    assert progress_of(team, from_the_form) == ["Study from-the-ui: completed, 4 of 4 measurements done"]
    assert all(not task.tags for task in tasks_of(team, from_the_form)), "a tag makes each task ask the API first"


def test_the_graph_of_a_run_is_its_dag(team: OfflineTeam, from_the_form: UUID) -> None:
    tasks = {task.id: task for task in tasks_of(team, from_the_form)}
    before = {
        task.name: {
            tasks[source.id].name for sources in task.task_inputs.values() for source in sources if source.id in tasks
        }
        for task in tasks.values()
    }
    launches = [f"noop float32 1 rank, noop 0.01 s and 1 more, block {block} of 2" for block in (1, 2)]
    chain = ["fetch llama-1m", "resolve from-the-ui", "provision", "adopt what an earlier run left", "test the nodes"]
    chain += [f"{stage} {launch}" for launch in launches for stage in ("submit", "wait for", "collect")]
    chain += ["analyze", "render the report", "publish from-the-ui"]
    assert [name for name in before if not before[name]] == ["fetch llama-1m"], before
    for upstream, name in itertools.pairwise(chain):
        assert upstream in before[name], (upstream, name, before)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (
            {
                "experiments": [{"name": "s", "question": {"kind": "strong", "grow": "dp"}}],
                "measuring": {"repeats": 1, "cell_timeout_seconds": 0.0},
                "surprise": 1,
            },
            [
                "experiments.s: expected either",
                "measuring.cell_timeout_seconds: input should",
                "surprise: unknown key",
            ],
        ),
        ({"models": [{"id": "./nowhere"}]}, ["models[0].id: ./nowhere: no such folder"]),
    ],
    ids=["form", "model"],
)
def test_what_the_server_lets_pass_is_refused_with_its_field(
    team: OfflineTeam, changes: dict[str, Any], fields: list[str]
) -> None:
    """The flow checks again, also where the server was told not to check."""
    deployment = team.client.read_deployment_by_name("study from the form/form")
    team.client.update_deployment(deployment.id, DeploymentUpdate(enforce_parameter_schema=False))
    run = team.run_form(form("refused", **changes))
    assert team.wait_for(run, *FINAL) == "FAILED"
    team.client.update_deployment(deployment.id, DeploymentUpdate(enforce_parameter_schema=True))
    state = team.flow_run(run).state
    assert state is not None and [field for field in fields if field not in (state.message or "")] == []
    assert not (team.work / "runs" / "refused").exists()


def test_a_parameter_that_the_flow_does_not_have_is_refused(team: OfflineTeam) -> None:
    with pytest.raises(PrefectHTTPStatusError, match="nope"):
        team.run_form(form("refused"), nope=1)


@pytest.mark.nightly
def test_deployed_again_everything_is_as_it_was(team: OfflineTeam) -> None:
    before = team.client.read_deployment_by_name("scheduled sweep/nightly")
    assert {(each.slug, each.active) for each in before.schedules} == {("nightly", False), ("weekly", False)}
    switched = team.rankwise("deploy-flows", "--folder", str(team.work), "--resume", "weekly")
    assert "weekly on" in switched and "nightly paused" in switched
    again = team.rankwise("deploy-flows", "--folder", str(team.work))
    assert "weekly on" in again, "a sweep that somebody switched on stays on"
    team.rankwise("deploy-flows", "--folder", str(team.work), "--pause", "weekly")
    after = team.client.read_deployment_by_name("scheduled sweep/nightly")
    assert after.id == before.id
    settings = [(each.slug, each.active, each.parameters, each.schedule) for each in before.schedules]
    assert sorted(settings, key=str) == sorted(
        [(each.slug, each.active, each.parameters, each.schedule) for each in after.schedules], key=str
    )
    assert after.concurrency_options is not None
    assert after.concurrency_options.collision_strategy.value == "ENQUEUE"


def test_transient_faults_are_retried_and_secrets_stay_secret(team: OfflineTeam, tmp_path: Path) -> None:
    """A hub that fails twice; its address is in a Variable, its token in a Secret block."""
    team.client.create_variable(VariableCreate(name="rankwise_environment", value={}))
    repository = Repository(make_model(tmp_path / "model"), token=TOKEN, private=True)
    with HubServer({"acme/tiny": repository}) as hub:
        hub.add_fault(Fault(r"GET /api/models/acme/tiny", times=2, status=503))
        team.client.update_variable(VariableUpdate(name="rankwise_environment", value={"HF_ENDPOINT": hub.endpoint}))
        secret = subprocess.run(
            [sys.executable, "-c", SAVE_SECRET], env=team.environment, input=json.dumps({"HF_TOKEN": TOKEN}), text=True
        )
        assert secret.returncode == 0
        model = {"id": "acme/tiny", "revision": repository.commit}
        run = team.run_form(form("from-the-hub", models=[model]))
        assert team.wait_for(run, *FINAL) == "COMPLETED", team.flow_run(run).state
        served = [request for request in hub.requests if request.status == 200]
        assert served and all(
            request.authorization == f"Bearer {TOKEN}" for request in served if request.origin == "hub"
        )
        fetch = next(task for task in tasks_of(team, run) if task.name == "fetch tiny")
        states = [state.name for state in team.client.read_task_run_states(fetch.id)]
        assert states.count("AwaitingRetry") == 2 and states.count("Retrying") == 2 and fetch.run_count == 3

        # Permanent: a revision that does not exist.
        lost = team.run_form(form("from-the-hub-lost", models=[{"id": "acme/tiny", "revision": "0" * 40}]))
        assert team.wait_for(lost, *FINAL) == "FAILED"
        fetch = next(task for task in tasks_of(team, lost) if task.name == "fetch tiny")
        assert fetch.run_count == 1
        assert [state.name for state in team.client.read_task_run_states(fetch.id)][-1] == "Failed"
    team.client.delete_variable_by_name("rankwise_environment")
    lines = lines_of_ended(team, run) + lines_of_ended(team, lost)
    assert not [line for line in lines if TOKEN in line]
    assert any("HF_ENDPOINT, HF_TOKEN" in line for line in lines), "the names, not the values, are logged"
    leaks = [path for path in team.folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert not leaks


@pytest.mark.nightly
def test_two_studies_on_one_machine_do_not_overlap(team: OfflineTeam) -> None:
    """One through the worker, one from the command line, each with launches of its own."""
    # Long enough for the command line to start beside it, on a busy machine too.
    sweep = {"kind": "sweep", "over": {"seconds": [15.0, 15.1, 15.2, 15.3, 15.4, 15.5, 15.6]}}
    short = {"kind": "sweep", "over": {"seconds": [1.0]}}
    study = write_study(team.work, "beside", experiments={"grid": short}, pack=False)
    run = team.run_form(form("shared", experiments=[{"name": "grid", "question": sweep}], pack=False))
    wait_until(lambda: under_measurement(team.work / "runs" / "shared"), what="a measurement")
    team.rankwise("run", str(study))
    assert team.wait_for(run, *FINAL) == "COMPLETED"
    spans = []
    for name in ("shared", "beside"):
        for end in (team.work / "runs" / name).glob("jobs/*/end.json"):
            launcher = json.loads((end.parent / "launcher.json").read_text())
            spans.append((launcher["lock_acquired_at"], json.loads(end.read_text())["finished_at"], name))
    spans.sort()
    assert len(spans) == 8
    names = [name for _, _, name in spans]
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans)), spans
    assert names[-1] == "shared", "the short study had its turn before the long one was through"


def test_a_run_that_waits_for_the_machine_says_for_whom_and_can_be_cancelled(team: OfflineTeam) -> None:
    with launch_lock(give_up=lambda: False):
        run = team.run_form(form("closed"))
        team.wait_for(run, "RUNNING")
        jobs = team.work / "runs" / "closed" / "jobs"
        wait_until(lambda: bool(list(jobs.glob("*/launcher.json"))), what="the launcher")
        holder = f"waiting for another launch on this machine: pid {os.getpid()} of user "
        wait_until(
            lambda: any(holder in description for description in progress_of(team, run)),
            what="the progress to say who has the machine",
        )
        assert not [path for path in jobs.glob("*/launcher.json") if json.loads(path.read_text())["lock_acquired_at"]]
        team.client.set_flow_run_state(run, Cancelling())
        team.wait_for(run, "CANCELLED")
        assert not processes_of(team.work / "runs" / "closed")
        assert not any("Traceback" in line for line in lines_of_ended(team, run))
    [ended] = progress_of(team, run)
    assert ended.startswith("Study closed: cancelled, ") and "waiting" not in ended


def test_a_suspended_run_ends_its_launches_and_goes_on_when_it_is_resumed(team: OfflineTeam) -> None:
    """So many launches that they are a group of the graph, which the second try makes again."""
    sweep = {"kind": "sweep", "over": {"seconds": [0.8 + number / 100 for number in range(MAX_UNGROUPED + 1)]}}
    run = team.run_form(form("suspended", experiments=[{"name": "grid", "question": sweep}], pack=False))
    folder = team.work / "runs" / "suspended"
    wait_until(lambda: len(list(folder.glob("records/*/*.json"))) >= 2, 120, "two measurements")
    team.client.set_flow_run_state(run, Suspended(timeout_seconds=600))
    await_process(team, run)  # between two launches no process is of the run's folder
    assert not processes_of(folder)
    kept = {path: path.stat().st_mtime for path in folder.glob("records/*/*.json")}
    assert team.state(run) == "PAUSED" and 2 <= len(kept) <= MAX_UNGROUPED
    assert not any("Traceback" in line for line in lines_of_ended(team, run))
    of_run = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    groups = team.client.read_flow_runs(flow_run_filter=of_run)
    assert [group.state_name for group in groups] == ["Cancelled"], "none runs on"
    team.client.resume_flow_run(run)
    assert team.wait_for(run, *FINAL) == "COMPLETED", team.flow_run(run).state
    again = {path: path.stat().st_mtime for path in folder.glob("records/*/*.json")}
    assert kept.items() <= again.items(), "nothing is measured twice"
    assert [row["status"] for row in status(folder)] == ["completed"] * (MAX_UNGROUPED + 1)


def test_a_failed_run_is_tagged_and_retried_in_its_folder(team: OfflineTeam) -> None:
    """Retry in the UI sets the state to be scheduled again: what was missing the first time is there the second."""
    run = team.run_form(form("retried", models=[{"id": "./late-model"}]))
    assert team.wait_for(run, *FINAL) == "FAILED"
    assert {"model:late-model", "target:local", "refused"} <= set(team.flow_run(run).tags)
    make_model(team.work / "late-model")
    team.client.set_flow_run_state(run, Scheduled(name="AwaitingRetry"), force=True)
    wait_until(lambda: team.state(run) == "COMPLETED", 120, "the second try")
    assert team.flow_run(run).run_count == 2 and team.flow_run(run).name == "retried"
    assert "refused" not in team.flow_run(run).tags
    assert (team.work / "runs" / "retried" / "report.md").exists()


@pytest.mark.parametrize("given", [None, "", "fervent-void", "rho4-malindi-band", "beta-canis-majoris", "xi22-izar-a"])
def test_names_that_prefect_makes_up_are_those_of_the_study(given: str | None) -> None:
    assert run_name("my-study", given) == "my-study"
    assert run_name("my-study", "before the update") == "before the update"


def test_a_run_name_that_somebody_wrote_is_kept(team: OfflineTeam) -> None:
    deployment = team.client.read_deployment_by_name("study in short/short")
    wrong = {"study": {"name": "named", "yaml": "workload: {kind: nop}"}}
    run = team.client.create_flow_run_from_deployment(deployment.id, parameters=wrong, name="July, after the update").id
    assert team.wait_for(run, *FINAL) == "FAILED"
    ended = team.flow_run(run)
    assert ended.name == "July, after the update" and "refused" in ended.tags
    assert ended.state is not None and "workload: kind: unknown value 'nop'" in (ended.state.message or "")
    lines = lines_of_ended(team, run)
    assert any("Finished in state Failed(" in line for line in lines), lines
    assert not any("Traceback" in line for line in lines), lines


def test_what_a_person_can_correct_is_the_message_of_the_state(team: OfflineTeam) -> None:
    """Without Prefect's words, and without a traceback in the log; the study itself is no wrong one."""
    folder = RunPaths(team.work / "runs" / "taken")
    with run_lock(folder):
        run = team.run_form(form("taken"))
        assert team.wait_for(run, *FINAL) == "FAILED"
    ended = team.flow_run(run)
    assert ended.state is not None and "refused" not in ended.tags
    assert (ended.state.message or "").startswith(f"{folder.folder}: run folder is in use (process {os.getpid()} on ")
    lines = lines_of_ended(team, run)
    assert any("run folder is in use" in line for line in lines), lines
    assert not any("Traceback" in line for line in lines), lines


@pytest.mark.parametrize(
    ("error", "message", "refused"),
    [
        (StudyError(["models[0].id: no such folder"]), "models[0].id: no such folder", True),
        (TargetAway(["targets[0]: host a: cannot be reached"]), "targets[0]: host a: cannot be reached", False),
        (TransientFetchError("https://hub returned HTTP 503"), "https://hub returned HTTP 503", False),
        (OSError(28, "No space left on device", "/r/plan.json"), "/r/plan.json: No space left on device. ", False),
    ],
)
def test_only_a_wrong_study_is_tagged_as_refused(
    error: Exception, message: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags: set[str] = set()
    monkeypatch.setattr(flows.deployed, "tag_run", lambda _, new: tags.update(new))

    def fails(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(flows.deployed, "study_of_form", fails)
    state = study_from_the_form.fn()
    assert isinstance(state, State) and state.is_failed() and (state.message or "").startswith(message)
    assert tags == ({"refused"} if refused else set())


def test_a_target_that_is_not_stored_is_refused_at_its_field(team: OfflineTeam) -> None:
    lab = {"lab": {"kind": "slurm", "partition": "gpu", "nodes": 2}}
    team.client.create_variable(VariableCreate(name="rankwise_targets", value=lab))
    try:
        told = team.rankwise("deploy-flows", "--folder", str(team.work))
        assert "targets of the short form: local, lab" in told
        deployment = team.client.read_deployment_by_name("study in short/short")
        assert deployment.version and {"rankwise", "study"} == set(deployment.tags) and deployment.description
        with pytest.raises(PrefectHTTPStatusError, match=r"study\.target"):
            team.client.create_flow_run_from_deployment(deployment.id, parameters={"study": {"target": "lbo"}})
    finally:
        team.client.delete_variable_by_name("rankwise_targets")  # its name stays in the form, where nobody selects it
