"""Job folders in a cluster's shared folder, from the placing to the way home, and `rankwise push`."""

import os
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.common.files.project_files import ROOT
from configs.plans.job import Job
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.spec.measuring import Measuring
from configs.spec.study import StudyError
from configs.targets.resources import Container
from configs.targets.target import LocalTarget, PbsTarget, SlurmTarget, SshTarget, Target
from slurm.staging.packages import run_root
from tasks.campaign.launches.leftovers import bring_rest_home, mark_collected, resolve_leftovers
from tasks.campaign.launches.staging import TargetAway, bring_home, placed_job, stage_target, stage_targets
from tasks.campaign.progress import RunProgress
from tasks.campaign.session import Session
from tasks.models.model_cache import manifest_path
from tasks.models.sources import resolve_model
from tests.support.cluster.launches import noop_measurement
from tests.support.run_folders.studies import rankwise, rankwise_here, write_study


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that nodes see. Our code is brought once: each test has a run and models of its own."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run folder with a file of prompts."""
    paths = RunPaths(tmp_path / "runs" / "s")
    paths.inputs.mkdir(parents=True)
    (paths.inputs / "ab.jsonl").write_text("{}\n")
    return paths


def cluster(shared: Path, **fields: object) -> SlurmTarget:
    """A target whose nodes have the libraries in this very interpreter."""
    return SlurmTarget.model_validate({"shared": str(shared), "python": sys.executable} | fields)


def job_of(run: RunPaths, target: Target, manifest: Path | None = None) -> Job:
    return Job(
        name="0001-timed-ab",
        study="s",
        measuring_pass="timed",
        measuring=Measuring(),
        target=target,
        measurements=(noop_measurement("a"),),
        ranks_per_node=1,
        timeout_seconds=60,
        manifest=str(manifest) if manifest else None,
        inputs=str(run.inputs),
        cache=str(run.folder / "cache"),
    )


def test_without_a_shared_folder_all_stays_where_it_is(run: RunPaths) -> None:
    for target in (LocalTarget(), SlurmTarget()):
        job = job_of(run, target)
        assert placed_job(job, run) == job
        assert run.job(job.name).parts.is_dir() and not run.job(job.name).folder.is_symlink()
        shutil.rmtree(run.jobs)


@pytest.mark.slow
def test_a_job_is_told_paths_that_its_nodes_see(run: RunPaths, shared: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model = resolve_model(str(ROOT / "configs" / "models" / "tiny-stdlib"), None, cache, tmp_path)
    job = placed_job(job_of(run, cluster(shared), manifest_path(model.identity, cache)), run)
    assert isinstance(job.target, SlurmTarget)
    for path in (job.inputs, job.cache, job.manifest, job.target.python):
        assert path is not None and Path(path).exists() and Path(path).is_relative_to(shared)
    assert (Path(job.inputs) / "ab.jsonl").exists()
    assert Path(ModelManifest.model_validate_json(Path(str(job.manifest)).read_bytes()).folder).is_relative_to(shared)
    link = run.job(job.name).folder
    assert link.is_symlink() and link.resolve() == run_root(shared, run.folder) / "jobs" / job.name
    assert (link / "parts").is_dir()


def test_all_that_a_job_has_in_the_shared_folder_is_in_the_page_of_staging(run: RunPaths, shared: Path) -> None:
    """It said that the folder of a run there can go, and not that checkpoints and live streams are nowhere else."""
    given = job_of(run, cluster(shared)).model_copy(update={"checkpoints": str(run.checkpoints)})
    job, root = placed_job(given, run), run_root(shared, run.folder)
    paths = JobPaths(run.job(job.name).folder.resolve())
    made = (paths.folder, Path(job.inputs), Path(job.cache), Path(str(job.checkpoints)), paths.live)
    names = {path.relative_to(root).parts[0] for path in made}
    assert names == {"jobs", "inputs", "cache", "checkpoints", "live"}
    tree = (ROOT / "docs" / "how-to" / "clusters" / "staging.md").read_text().split("```")[3]
    assert {name for name in names if f"{name}/" not in tree.partition("runs/<study>")[2]} == set()


@pytest.mark.nightly
def test_the_code_goes_into_a_container_too(run: RunPaths, shared: Path) -> None:
    target = cluster(shared, python=None, container=Container(image="a.sif", python="/usr/bin/python3"))
    job = placed_job(job_of(run, target), run)
    assert isinstance(job.target, SlurmTarget) and job.target.container
    script = Path(job.target.container.python)
    assert script.is_relative_to(shared) and "\npython=/usr/bin/python3\n" in script.read_text()


def test_an_image_under_pbs_runs_our_code_too(run: RunPaths, shared: Path) -> None:
    """The image's own was run, or none, for only a container of Slurm was told the staged interpreter."""
    fields = {"shared": str(shared), "container": {"image": "a.sif", "python": sys.executable}}
    job = placed_job(job_of(run, PbsTarget.model_validate(fields)), run)
    assert isinstance(job.target, PbsTarget) and job.target.container
    script = Path(job.target.container.python)
    assert script.is_relative_to(shared) and f"\npython={sys.executable}\n" in script.read_text()


def test_a_folder_of_an_earlier_run_at_the_same_path_is_left_alone(run: RunPaths, shared: Path) -> None:
    first = placed_job(job_of(run, cluster(shared)), run)
    link = run.job(first.name).folder
    (link / "end.json").write_text("of the run before")
    link.unlink()  # the user removed the run folder and begins anew
    placed_job(job_of(run, cluster(shared)), run)
    assert not (link / "end.json").exists() and (link / "parts").is_dir()


def test_what_is_left_of_a_job_comes_home(run: RunPaths, shared: Path) -> None:
    job = placed_job(job_of(run, cluster(shared)), run)
    link = run.job(job.name).folder
    away = link.resolve()
    (link / "rank_0.log").write_text("hello\n")
    (away.parent / "submitit").mkdir()
    (away.parent / "submitit" / "1_0_log.out").write_text("x")
    (link / "slurm_0.log").symlink_to("../submitit/1_0_log.out")
    (link / "slurm_1.log").symlink_to("../submitit/1_1_log.out")  # that node never wrote
    for _ in range(2):
        bring_home(run, job.name)
        assert not link.is_symlink() and (link / "rank_0.log").read_text() == "hello\n"
        assert (link / "slurm_0.log").read_text() == "x" and not away.exists()
    assert [entry.name for entry in run.jobs.iterdir()] == [job.name]


def test_a_job_whose_launcher_was_killed_with_a_script_comes_home(run: RunPaths, shared: Path) -> None:
    """Its pipes cannot be copied, so it never did; and all that its links led to was copied each time."""
    job = placed_job(job_of(run, cluster(shared)), run)
    paths = run.job(job.name)
    for node_rank in (0, 1):
        (paths.script("a", node_rank) / "work").mkdir(parents=True)
        os.mkfifo(paths.script("a", node_rank) / "out_0")
        (paths.script("a", node_rank) / "work" / "data").symlink_to(shared)
    (shared / "weights.bin").write_text("not the script's")
    mark_collected(run, job.name)
    assert not paths.folder.is_symlink() and paths.scripts() == []
    assert sorted(path.name for path in paths.folder.iterdir()) == ["collected", "parts"]
    assert (shared / "weights.bin").exists()


@pytest.mark.parametrize("is_copied", [False, True])
def test_the_next_run_brings_home_what_a_killed_one_did_not(run: RunPaths, shared: Path, is_copied: bool) -> None:
    job = placed_job(job_of(run, cluster(shared)), run)
    link = run.job(job.name).folder
    (link / "rank_0.log").write_text("the end")
    (link / "collected").touch()
    half = link.with_name(f".{job.name}.home")
    if is_copied:
        shutil.copytree(link, half)
        link.unlink()
    else:
        half.mkdir()
    plan = Plan(
        study="s", models=(), targets=(LocalTarget(),), measuring=Measuring(), pack=True, experiments=(), cells={},
        repeats={},
    )  # fmt: skip
    resolve_leftovers(Session(run, plan, run.folder, RunProgress(), SimpleNamespace(check=lambda: None)))
    assert not link.is_symlink() and (link / "rank_0.log").read_text() == "the end"
    assert [path.name for path in run.jobs.iterdir()] == [job.name]


def test_a_job_that_is_not_collected_stays_away(run: RunPaths, shared: Path) -> None:
    job = placed_job(job_of(run, cluster(shared)), run)
    bring_rest_home(run)
    assert run.job(job.name).folder.is_symlink()


def test_where_nothing_can_come_home_the_link_stays(run: RunPaths, shared: Path) -> None:
    job = placed_job(job_of(run, cluster(shared)), run)
    away = run.job(job.name).folder.resolve()
    shutil.rmtree(away)  # the cluster cleared its disk
    bring_home(run, job.name)
    assert run.job(job.name).folder.is_symlink()
    assert [entry.name for entry in run.jobs.iterdir()] == [job.name]


def test_a_shared_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError) as refused:
        stage_target(cluster(tmp_path / "nowhere"), "targets[1]", [], print)
    assert "targets[1].shared" in str(refused.value) and "shared by all nodes" in str(refused.value)


def test_hosts_that_do_not_answer_may_another_time_and_a_wrong_folder_stays_wrong(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hosts = SshTarget.model_validate({"hosts": ["127.0.0.1"], "port": unused.getsockname()[1], "user": "nobody"})
        with pytest.raises(TargetAway, match=r"targets\[0\]: 127\.0\.0\.1: not reached"):
            stage_targets([hosts], [], print, {hosts.name})
        with pytest.raises(StudyError) as refused:
            shared = cluster(tmp_path / "nowhere")
            stage_targets([hosts, shared], [], print, {hosts.name, shared.name})
    assert not isinstance(refused.value, TargetAway) and len(refused.value.problems) == 2


def test_a_damaged_source_is_named(shared: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs" / "models" / "tiny-stdlib", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text() + "\n")  # a model that was not brought by another test
    manifest = resolve_model("model", None, tmp_path / "cache", tmp_path)
    config.write_text("{}")
    model = PlannedModel(
        name="m", identity=manifest.identity, manifest=str(manifest_path(manifest.identity, tmp_path / "cache"))
    )
    with pytest.raises(StudyError, match=r"targets\[0\]\.shared: .*config\.json"):
        stage_target(cluster(shared), "targets[0]", [model], print)


def push_study(folder: Path, shared: Path | None) -> Path:
    """A study with a model, a Slurm target and a rented one beside this machine."""
    target = {"kind": "slurm", "name": "lab", "python": sys.executable, "shared": str(shared) if shared else None}
    rented = {"kind": "aws", "instance": "g5.xlarge", "regions": ["us-east-1"]}
    return write_study(
        folder,
        targets=[{"name": "here"}, target, rented],
        models=[{"id": str(ROOT / "configs" / "models" / "tiny-stdlib")}],
        workload={"kind": "generate", "new_tokens": 2},
        experiments={"s": {"kind": "strong", "grow": "tp", "to": 1}},
    )


@pytest.mark.slow
def test_push_brings_all_once(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    study = push_study(tmp_path, tmp_path / "shared")
    first = rankwise("push", "lab", "--study", study, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "code: rankwise-" in first.stdout and "model folder:" in first.stdout
    again = rankwise_here("push", "lab", "--study", study, cwd=tmp_path)
    assert again.returncode == 0 and "up to date" in again.stdout


def test_push_says_what_is_wrong(tmp_path: Path, shared: Path) -> None:
    study = push_study(tmp_path, shared)
    unknown = rankwise_here("push", "lob", "--study", study, cwd=tmp_path)
    assert unknown.returncode == 2 and "no target 'lob'" in unknown.stderr and "lab" in unknown.stderr
    local = rankwise_here("push", "here", "--study", study, cwd=tmp_path)
    assert local.returncode == 2 and "targets[0].kind" in local.stderr
    without = rankwise_here("push", "lab", "--study", push_study(tmp_path, None), cwd=tmp_path)
    assert without.returncode == 2 and "targets[1].shared" in without.stderr
    rented = rankwise_here("push", "aws", "--study", study, cwd=tmp_path)  # which may have no `shared`
    assert rented.returncode == 2 and "targets[2].kind: aws has no nodes before the run" in rented.stderr
