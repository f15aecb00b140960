"""What an earlier run that tested nodes has left."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.common.base import utc_now
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.plans.preflight import NodeFigures, Preflight, TargetPreflight
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget, SshTarget
from tasks import preflight
from tasks.campaign.progress import RunProgress
from tasks.campaign.session import Session
from tasks.checks.node_checks import settings_of
from tests.support.cluster.slurm_jobs import made


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
