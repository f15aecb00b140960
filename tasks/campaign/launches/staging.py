"""Targets with a folder that all nodes see: what a study needs there, and job folders that lie there. No Prefect here.

    stage_targets(targets, models, notice, names)   # before anything is submitted; `rankwise push` does it beforehand
    job = placed_job(job, run)                  # a job as the nodes must be told it, its folder made
    bring_home(run, job.name)                   # when its records are made

A job folder in the shared folder has a symbolic link in the run folder, so that everybody else goes on by the name
that it has there. When its records are made, what is left (logs, how it ended, accounts) comes home in the link's
place: the run folder is whole without the cluster's disk, which is often cleared without asking.
"""

import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.plans.job import Job
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import RunPaths
from configs.plans.plan import PlannedModel
from configs.spec.study import StudyError
from configs.targets.resources import ClusterTarget, ScheduledTarget
from configs.targets.target import SshTarget, Target
from slurm.staging.packages import Notice, common_folder, run_root, stage_inputs, stage_interpreter, stage_model

_interpreters: dict[tuple[str, str | None], Path] = {}
"""Of this process, by shared folder and the interpreter that the target names: to pack the code takes a second."""


class TargetAway(StudyError):
    """Hosts of a target are not reached; another time they may be."""


def stage_targets(
    targets: Sequence[Target], models: Sequence[PlannedModel], notice: Notice, in_use: Collection[str]
) -> None:
    """Bring what is missing to the shared folder of each target in use that has one, or to its hosts.

    Raises StudyError naming the target where that cannot be; TargetAway where it may be another time.
    """
    errors: list[StudyError] = []
    for position, target in enumerate(targets):
        if target.name not in in_use:
            continue
        try:
            stage_target(target, f"targets[{position}]", models, notice)
        except StudyError as error:
            errors.append(error)
    if errors:
        away = all(isinstance(error, TargetAway) for error in errors)
        raise (TargetAway if away else StudyError)([problem for error in errors for problem in error.problems])


def _stage_hosts(target: SshTarget, where: str, models: Iterable[PlannedModel], notice: Notice, thorough: bool) -> None:
    # Imported here: launches on this machine alone work without asyncssh, as on a borrowed GPU.
    from slurm.ssh.connection import HostAway
    from slurm.ssh.loop import wait_for
    from slurm.ssh.staging import stage_hosts

    try:
        wait_for(stage_hosts(target, [Path(model.manifest) for model in models], notice, thorough))
    except (OSError, ValueError) as error:
        kind = TargetAway if isinstance(error, HostAway) else StudyError
        raise kind([f"{where}: {getattr(error, 'strerror', None) or error}"]) from error


def stage_target(
    target: Target, where: str, models: Iterable[PlannedModel], notice: Notice, thorough: bool = False
) -> None:
    """Bring code, libraries and models to a target's shared folder, or to each of its hosts; nothing where it has none.

    thorough: hash also the files that are there already. Raises StudyError naming `where`, the target's field;
    TargetAway where a host is not reached.
    """
    if isinstance(target, SshTarget) and target.shared is None:
        _stage_hosts(target, where, models, notice, thorough)
        return
    if not isinstance(target, ClusterTarget) or target.shared is None:
        return
    shared = Path(target.shared)
    if not shared.is_absolute() or not shared.is_dir():
        raise StudyError(
            [f"{where}.shared: no such folder: {target.shared}. Use the full path of a folder shared by all nodes"]
        )
    try:
        _with_our_code(target, notice)
        for model in models:
            _stage_model(shared, Path(model.manifest), notice, thorough)
    except OSError as error:
        raise StudyError([f"{where}.shared: {error.filename or shared}: {error.strerror or error}"]) from error
    except ValueError as error:
        raise StudyError([f"{where}.shared: {error}"]) from error


def _with_our_code(target: ClusterTarget, notice: Notice) -> ClusterTarget:
    """The target with an interpreter that has the code which runs here."""
    assert target.shared is not None
    container = target.container if isinstance(target, ScheduledTarget) else None
    named = container.python if container else target.python
    program = _interpreters.get((target.shared, named))
    if program is None or not program.exists():
        program = stage_interpreter(Path(target.shared), named, notice)
        _interpreters[target.shared, named] = program
    if container is None:
        return target.model_copy(update={"python": str(program)})
    return target.model_copy(update={"container": container.model_copy(update={"python": str(program)})})


def _stage_model(shared: Path, manifest: Path, notice: Notice, thorough: bool = False) -> Path:
    content = read_model(manifest, ModelManifest, PLAN_BYTES)
    return stage_model(shared, content, manifest.parent.name, notice, thorough)


def placed_job(job: Job, run: RunPaths) -> Job:
    """Make the folder of a job and give the job the paths under which its nodes see things.

    Without a shared folder both are as they are here. Raises OSError.
    """
    target, folder = job.target, run.job(job.name).folder
    if isinstance(target, SshTarget):
        job = _within_limit(job, target)
    if isinstance(target, SshTarget) and target.shared is None:
        return _carried(job, run)
    if not isinstance(target, ClusterTarget) or target.shared is None:
        run.job(job.name).parts.mkdir(parents=True, exist_ok=True)
        return job
    shared = Path(target.shared)
    common_folder(shared, "runs")
    root = run_root(shared, run.folder)
    away = _fresh(root / "jobs" / job.name)
    (away / "parts").mkdir()
    run.jobs.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(away)
    cache = root / "cache"
    cache.mkdir(exist_ok=True)
    manifest = _stage_model(shared, Path(job.manifest), lambda _: None) if job.manifest else None
    return job.model_copy(
        update={
            "target": _with_our_code(target, lambda _: None),
            "inputs": str(stage_inputs(run.inputs, root)),
            "cache": str(cache),
            "checkpoints": str(root / "checkpoints") if job.checkpoints else None,
            "manifest": str(manifest) if manifest else None,
        }
    )


def _within_limit(job: Job, target: SshTarget) -> Job:
    """With the target's time limit, which no scheduler enforces."""
    if target.time_limit_minutes is None:
        return job
    return job.model_copy(update={"timeout_seconds": min(job.timeout_seconds, 60.0 * target.time_limit_minutes)})


def _carried(job: Job, run: RunPaths) -> Job:
    """A job that hosts get carried: its paths are relative to its folder, wherever that lies on each of them.

    Checkpoints would lie on the hosts of one attempt alone, so that another could not go on from them.
    """
    run.job(job.name).parts.mkdir(parents=True, exist_ok=True)
    models = "../../../../rankwise/models"
    return job.model_copy(
        update={
            "inputs": "../../inputs",
            "cache": "../../cache",
            "checkpoints": None,
            "manifest": f"{models}/{Path(job.manifest).parent.name}/manifest.json" if job.manifest else None,
        }
    )


def _fresh(folder: Path) -> Path:
    """Make a folder that was not there: one of that name is of an earlier run folder at the same path."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    candidate, count = folder, 1
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            count += 1
            candidate = folder.with_name(f"{folder.name}.{count}")


def bring_home(run: RunPaths, name: str) -> None:
    """Put what is left of a job in the shared folder into the run folder, in the place of the link to it.

    Nothing for a job that lies there already. Where there is no room, the link stays as it is.
    """
    link = run.job(name).folder
    if not link.is_symlink():
        return
    away, home = link.resolve(), link.with_name(f".{name}.home")
    shutil.rmtree(home, ignore_errors=True)
    try:
        for path in away.iterdir():
            if path.is_symlink() and not path.exists():
                path.unlink()  # to the output of a node that wrote none
        shutil.copytree(away, home)  # links to Slurm's output, which lies outside, become files
    except (OSError, shutil.Error):
        shutil.rmtree(home, ignore_errors=True)
        return
    link.unlink()
    home.rename(link)
    with suppress(OSError):  # Slurm may still write a last line into it
        shutil.rmtree(away)
