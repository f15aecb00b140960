"""Studies on nodes that see neither our code nor the run folder: what they need is brought to a shared folder.

What is hidden is hidden by an empty file system over it, in the nodes' own mount namespaces.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.common.files.project_files import ROOT
from configs.records.record import Record, Status
from slurm.staging.version import code_version
from slurm.staging.wheel import PACKAGES
from tests.support.cluster.lab import Lab
from tests.support.run_folders.studies import RANKWISE, rankwise, status, write_study

pytestmark = pytest.mark.slurm

Hide = Callable[[Path], None]
TINY = str(ROOT / "configs" / "models" / "tiny-stdlib")


@pytest.fixture
def hide(lab: Lab) -> Iterator[Hide]:
    """Make a folder empty for all nodes until the test ends."""
    hidden: list[tuple[str, Path]] = []

    def hide_on_all(folder: Path) -> None:
        for node in lab.plan.node_names:
            done = lab.on_node(node, "mount", "-t", "tmpfs", "none", str(folder))
            assert done.returncode == 0, done.stderr
            hidden.append((node, folder))
            assert lab.on_node(node, "ls", "-A", str(folder)).stdout == ""

    yield hide_on_all
    for node, folder in hidden:
        lab.on_node(node, "umount", "--lazy", str(folder))


@pytest.fixture
def shared(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """A folder that all nodes see, of this test only; its path is not a friendly one."""
    folder = lab.plan.folder / "shared" / f"{request.node.name} $HOME 'x'"
    folder.mkdir(parents=True)
    return folder


def cluster(shared: Path | None, **fields: Any) -> dict[str, Any]:
    """A target of the lab, with this interpreter's libraries and, where shared, our code brought there."""
    target = {"kind": "slurm", "name": "cluster", "partition": "lab", "nodes": 2, "poll_seconds": 1.0, "retries": 0}
    return target | {"python": sys.executable, "shared": str(shared) if shared else None, "preflight": False} | fields


def records(run: Path) -> list[Record]:
    return [Record.model_validate_json(path.read_bytes()) for path in sorted(run.glob("records/*/*.json"))]


def test_a_study_runs_where_nodes_see_the_shared_folder_only(
    lab: Lab, hide: Hide, shared: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "import os"}\n')
    study = write_study(
        tmp_path,
        targets=[cluster(shared)],
        models=[{"id": TINY}],
        workload={"kind": "generate", "prompts": "p.jsonl", "new_tokens": 4},
        experiments={"s": {"kind": "strong", "grow": "tp", "to": 2}},
        measuring={"min_seconds": 0.1},
    )
    for folder in (*(ROOT / package for package in PACKAGES), tmp_path):
        hide(folder)
    done = rankwise("run", study, cwd=tmp_path)
    run = tmp_path / "runs" / "s"
    assert done.returncode == 0, done.stdout + done.stderr
    made = records(run)
    assert {record.status for record in made} == {Status.COMPLETED}
    assert {len(set(record.hosts)) for record in made} == {1, 2}
    for path in run.glob("environments/*.json"):
        assert json.loads(path.read_bytes())["commit"] == code_version()["RANKWISE_COMMIT"]
    jobs = list(run.glob("jobs/[0-9]*-*"))
    assert jobs and not [job for job in jobs if job.is_symlink()]
    assert list(shared.glob("runs/*/jobs/[0-9]*")) == [] and lab.queue() == []
    shown = rankwise("logs", run, cwd=tmp_path).stdout
    assert "/launcher_1: " in shown or "/rank_1: " in shown
    assert "completed in" in shown
    again = rankwise("push", "cluster", "--study", study, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "up to date: code, libraries, 1 model (verified by hash)" in again.stdout  # none is copied again


def test_without_a_shared_folder_the_failure_is_named(lab: Lab, hide: Hide, tmp_path: Path) -> None:
    study = write_study(tmp_path, targets=[cluster(None)])
    hide(tmp_path)
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    rows = status(tmp_path / "runs" / "s")
    assert len(rows) == 2 and all("targets[].shared" in (row["failure"] or "") for row in rows), rows
    assert lab.queue() == []


def test_a_container_with_the_libraries_runs_our_code(lab: Lab, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").symlink_to(Path(__file__).parents[2] / "support" / "stand_in_apptainer")
    (tmp_path / "engine.sif").touch()
    container = {"image": str(tmp_path / "engine.sif"), "python": sys.executable}
    study = write_study(tmp_path, targets=[cluster(shared, python=None, container=container)])
    done = rankwise(
        "run",
        study,
        cwd=tmp_path,
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        STAND_IN_IMAGE=f"{sys.prefix}:{sys.base_prefix}",  # our code, installed from its checkout, is not in it
        STAND_IN_SAID=str(tmp_path / "said.jsonl"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "said.jsonl").read_text().splitlines()[0])
    assert str(shared) in said and str(tmp_path / "runs") not in " ".join(said)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nodes_that_have_nothing_get_their_libraries(lab: Lab, hide: Hide, shared: Path, tmp_path: Path) -> None:
    """Fetches PyTorch: minutes, so `make test-slurm` leaves it out. Run by `make test-slurm-slow`."""
    study = write_study(tmp_path, targets=[cluster(shared, python=None)])
    hide(ROOT)
    hide(tmp_path)
    command = [RANKWISE, "push", "cluster", "--study", str(study)]
    pushed = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert pushed.returncode == 0, pushed.stderr
    assert "libraries: installing into" in pushed.stdout
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
