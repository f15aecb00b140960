"""What an earlier run that tested nodes has left."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.common.base import utc_now
from configs.common.execution import Layout
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.plans.preflight import NodeFigures, Preflight, TargetPreflight
from configs.records.record import Failure, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.rented import RentedTarget
from configs.targets.target import SlurmTarget, SshTarget
from configs.workloads.generate import GenerateWorkload
from slurm.staging.packages import run_digest
from tasks import preflight
from tasks.campaign.progress import RunProgress
from tasks.campaign.run_lock import run_lock
from tasks.campaign.session import Session
from tasks.checks.node_checks import settings_of
from tests.support.cluster.slurm_jobs import made
from tests.support.run_folders.made_studies import decoded, write_record


def test_a_job_that_tested_nodes_is_ended_by_the_adapter_of_its_own_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several targets are tested in one folder, one after the other."""
    run, ended = RunPaths(tmp_path), list[tuple[str, str]]()
    for number, target in enumerate((SlurmTarget(), SlurmTarget(allocation="current")), start=1):
        made(run.folder, number, under=target)
    made(run.folder, 3, under=SshTarget.model_validate({"hosts": ["a"]}))
    (run.jobs / "0004-timed").mkdir()  # killed before it wrote the job
    made(run.folder, 5).end.write_text("{}")

    def adapter_for(name: str) -> SimpleNamespace:
        return SimpleNamespace(cancel=lambda folder: ended.append((name, folder.name)))

    monkeypatch.setattr(preflight, "adapter_for", adapter_for)
    preflight._end_earlier(run)
    assert ended == [("slurm", "0001-timed"), ("steps", "0002-timed"), ("ssh", "0003-timed")]


def test_nodes_that_an_earlier_test_excluded_get_jobs_of_a_target_that_goes_without_tests(tmp_path: Path) -> None:
    """They were left out as before: `preflight: false` took effect in another run folder alone."""
    run = RunPaths(tmp_path)
    slow, other = SlurmTarget(name="slow", preflight=True), SlurmTarget(name="other")
    found = [
        TargetPreflight(
            target=target.name,
            settings=settings_of(target),
            at=utc_now(),
            ranks_per_node=1,
            nodes=(NodeFigures(node="n1", verdict="slow"), NodeFigures(node="n2")),
        )
        for target in (slow, other, SlurmTarget(name="gone"))
    ]
    run.preflight.write_text(Preflight(targets=tuple(found)).model_dump_json())

    def excluded(*targets: SlurmTarget) -> dict[str, frozenset[str]]:
        plan = Plan(
            study="s", models=(), targets=targets, measuring=Measuring(), pack=True, experiments=(), cells={},
            repeats={},
        )  # fmt: skip
        session = Session(run, plan, tmp_path, RunProgress(), SimpleNamespace(check=lambda: None))
        preflight.preflight(session)
        return session.excluded

    assert excluded(slow, other) == {"slow": frozenset({"n1"}), "other": frozenset({"n1"})}
    assert excluded(slow.model_copy(update={"preflight": False}), other) == {"other": frozenset({"n1"})}


def test_nodes_are_tested_before_what_failed_on_them_is_measured_again(tmp_path: Path) -> None:
    """Each cell has a record: a later run took the test of days ago, or none, for the nodes that it used."""
    slurm = SlurmTarget(nodes=2)
    rented = RentedTarget.model_validate({"kind": "aws", "instance": "c7i.xlarge", "regions": ["r"], "nodes": 2})
    work = GenerateWorkload(num_prompts=2, prompt_tokens=8, new_tokens=3)
    cells = [Cell(workload=work, layout=Layout(dp=2), target=one.name, nodes=2) for one in (slurm, rented)]
    run = RunPaths(tmp_path)
    plan = Plan(
        study="s", models=(), targets=(slurm, rented), measuring=Measuring(memory=False), pack=True, experiments=(),
        cells={cell.key: cell for cell in cells}, repeats={cell.key: 1 for cell in cells},
    )  # fmt: skip
    session = Session(run, plan, tmp_path, RunProgress(), SimpleNamespace(check=lambda: None))

    def wanted(only_failed: bool = False) -> list[str]:
        return [target.name for target in preflight.wanted(session, only_failed)]

    assert wanted() == ["slurm"], "nothing is rented where only failed repeats are measured"
    assert wanted(only_failed=True) == [], "nodes were tested, or away, of which this run measures nothing"
    write_record(run, cells[0], 0, status=Status.NODE_FAILED, failure=Failure(message="a node failed"))
    assert wanted() == wanted(only_failed=True) == ["slurm"]
    write_record(run, cells[0], 0, samples=decoded(cells[0], 0.01), figures={"num_prompts": 2})
    assert wanted() == []


def test_tests_of_nodes_in_containers_with_equal_paths_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster that both submit to, each cleared the jobs of the other's tests."""
    target = SlurmTarget(nodes=2)
    work = GenerateWorkload(num_prompts=2, prompt_tokens=8, new_tokens=3)
    cell = Cell(workload=work, layout=Layout(dp=2), target=target.name, nodes=2)
    plan = Plan(
        study="s", models=(), targets=(target,), measuring=Measuring(memory=False), pack=True, experiments=(),
        cells={cell.key: cell}, repeats={cell.key: 1},
    )  # fmt: skip
    run, known_as = RunPaths(tmp_path / "s"), list[str]()

    def check_nodes(checked: SlurmTarget, _: Plan, nodes: RunPaths, *__: object) -> TargetPreflight:
        known_as.append(run_digest(nodes.folder))
        return TargetPreflight(target=checked.name, settings=settings_of(checked), at=utc_now(), ranks_per_node=1)

    monkeypatch.setattr(preflight, "check_nodes", check_nodes)
    for container in ("one", "another"):
        with run_lock(run):
            for _ in range(2):  # nodes of which nothing was found are tested anew
                preflight.preflight(Session(run, plan, tmp_path, RunProgress(), SimpleNamespace(check=lambda: None)))
        run.folder.rename(tmp_path / container)
    assert known_as[0] == known_as[1] != known_as[2] == known_as[3]


def test_a_test_of_the_future_does_not_hold(tmp_path: Path) -> None:
    """After a clock was set back it was taken for the one of today until that time had come again."""
    target = SlurmTarget(nodes=2)
    nodes = (NodeFigures(node="n1"), NodeFigures(node="n2"))
    found = TargetPreflight(target="slurm", settings=settings_of(target), at=utc_now(), ranks_per_node=1, nodes=nodes)
    assert preflight._holds(found, target)
    for days in (-30, 30):
        other = (datetime.now(UTC) + timedelta(days=days)).isoformat()
        assert not preflight._holds(found.model_copy(update={"at": other}), target)
