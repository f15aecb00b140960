"""What a run that was killed while it tested nodes has left."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.plans.paths import RunPaths
from configs.targets.target import SlurmTarget, SshTarget
from tasks import preflight
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
