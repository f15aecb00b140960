"""Export a study as a folder that a single `sbatch` command measures. Does not import Prefect.

    written = write_bundle(study, base, cache, Path("strong"), target=None)      # rankwise bundle sbatch

The folder is a run folder with job folders in jobs/ and records in records/ (`tasks.bundle.collect`). All paths in
its jobs are relative, so it can be copied to a cluster and back.
"""

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from configs.common.base import write_atomically
from configs.common.files.reading import TEXT_BYTES, read_text
from configs.plans.model_manifest import read_model_manifest
from configs.plans.packing import pack_launches
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.records.record import MeasuringPass
from configs.spec.measuring import Profiler
from configs.spec.study import StudyError, StudySpec, study_yaml
from configs.targets.target import SlurmTarget
from slurm.sbatch_bundle.scripts import BundleLaunch, LargeModel, SbatchBundle, readme, run_script, sbatch_script
from tasks.campaign.launches.jobs import write_job
from tasks.campaign.ledger import missing_measurements, read_ledger
from tasks.models.saved_reference import place_references
from tasks.planning.inputs import copy_inputs
from tasks.planning.predictions import with_predictions
from tasks.planning.script_inputs import replaced_notes
from tasks.planning.study_models import planned_model, resolved_note
from tasks.planning.study_plan import make_plan

_COPIED_BYTES = 256 << 20
"""Maximum size of weights in the folder; larger ones are copied to the cluster once, for all users."""
_PROFILERS: tuple[Profiler, ...] = get_args(Profiler)


@dataclass(frozen=True)
class RequestedFiles:
    """What a manifest asks for."""

    folder: Path
    launches: int
    nodes: int
    measurements: int
    large_models: tuple[LargeModel, ...]
    notes: tuple[str, ...]


def write_bundle(study: StudySpec, base: Path, cache: Path, folder: Path, target: str | None) -> RequestedFiles:
    """Make the folder. target: name of one of the study's Slurm targets; none: its only one.

    Raises StudyError for what the study cannot have, `TransientFetchError` where a model could not be fetched now.
    """
    chosen = _chosen(study, target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StudyError([f"--out: {folder} is not an empty folder. Use another folder or remove it"])
    was_there = folder.exists()
    try:
        return _written(study, chosen, base, cache, folder)
    except BaseException:
        # Half a bundle would be in the way of the next try, which wants an empty folder.
        with suppress(OSError):
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            if not was_there:
                folder.rmdir()
        raise


def _written(study: StudySpec, chosen: SlurmTarget, base: Path, cache: Path, folder: Path) -> RequestedFiles:
    # The folder is all that the job needs: nothing is staged anywhere else.
    chosen = chosen.model_copy(update={"shared": None})
    study = study.model_copy(update={"targets": [chosen]})
    run = RunPaths(folder.absolute())
    models = [planned_model(spec, position, cache, base) for position, spec in enumerate(study.models)]
    inputs = copy_inputs(study, run, base)
    plan = make_plan(study, models, inputs, run.inputs, cache)
    plan = with_predictions(plan, run.inputs, cache, None)
    run.jobs.mkdir(exist_ok=True)
    for name in ("cache", "outputs"):
        (run.folder / name).mkdir()
    large = _place_models(run, models)
    plan = plan.model_copy(update={"models": tuple(_relative(model) for model in models)})
    place_references(plan, run)
    steps = _write_jobs(plan, run)
    ranks = max(cell.layout.ranks for cell in plan.cells.values())
    manifest = SbatchBundle(study.study, chosen, steps, ranks, large, plan.measuring.profiler)
    try:
        texts = {"submit.sbatch": sbatch_script(manifest), "run.sh": run_script(chosen)}
    except ValueError as error:
        raise StudyError([str(error)]) from error
    texts |= {
        "README.md": readme(manifest, Path(run.folder.name)),
        "exp_config.json": _json(study.model_dump(mode="json")),
    }
    for name, text in texts.items():
        write_atomically(run.folder / name, text)
    for name in ("submit.sbatch", "run.sh"):
        (run.folder / name).chmod(0o755)
    _write_prompts(run)
    write_atomically(run.study, study_yaml(study))
    write_atomically(run.plan, plan.model_dump_json(indent=1))
    measurements = sum(plan.repeats.values())
    notes = (*filter(None, map(resolved_note, study.models, models)), *replaced_notes(study, base))
    return RequestedFiles(
        folder, sum(step.profiler is None for step in steps), manifest.nodes, measurements, large, notes
    )


def _chosen(study: StudySpec, name: str | None) -> SlurmTarget:
    chosen = _named(study, name)
    if chosen.allocation is not None:
        where = f"targets: {chosen.name}: allocation: {chosen.allocation}"
        raise StudyError([f"{where}: a bundle is a job of its own. Leave allocation out, or use `rankwise run`"])
    return chosen


def _named(study: StudySpec, name: str | None) -> SlurmTarget:
    found = [target for target in study.targets if isinstance(target, SlurmTarget)]
    names = ", ".join(target.name for target in found)
    if not found:
        raise StudyError(["targets: expected one of kind slurm\n  add one such as {kind: slurm, nodes: 2}"])
    if name is None:
        if len(found) > 1:
            raise StudyError([f"targets: several are of kind slurm. Select one with --target\n  use one of: {names}"])
        return found[0]
    if name not in [target.name for target in found]:
        raise StudyError([f"--target: unknown Slurm target {name!r}\n  use one of: {names}"])
    return next(target for target in found if target.name == name)


def _place_models(run: RunPaths, models: Iterable[PlannedModel]) -> tuple[LargeModel, ...]:
    """Manifests, and weights that are not too large, into models/<hash>/; returns what must be copied otherwise."""
    large = []
    for model in models:
        source = Path(model.manifest)
        manifest = read_model_manifest(source)
        place = run.folder / _relative(model).manifest
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, manifest.model_copy(update={"folder": "files"}).model_dump_json(indent=1))
        if sum(file.size_bytes for file in manifest.files.values()) > _COPIED_BYTES:
            large.append(LargeModel(place.parent.name, model.name.replace("/", "-"), manifest.folder))
            continue
        for name in manifest.files or ["config.json"]:
            copy = place.parent / "files" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(manifest.folder) / name, copy)
    return tuple(large)


def _relative(model: PlannedModel) -> PlannedModel:
    """The model with the place of its manifest in the folder."""
    return model.model_copy(update={"manifest": f"models/{Path(model.manifest).parent.name}/manifest.json"})


def _write_jobs(plan: Plan, run: RunPaths) -> list[BundleLaunch]:
    """A job folder for each launch of the plan and, for those who set PROFILER, of passes under a profiler."""
    steps = []
    passes: list[tuple[MeasuringPass, Profiler | None]] = [
        (name, None) for name in get_args(MeasuringPass) if name not in _PROFILERS
    ]
    for measuring_pass, profiler in [*passes, *((name, name) for name in _PROFILERS)]:
        asked = plan.model_copy(update={"measuring": plan.measuring.model_copy(update={"profiler": profiler})})
        measurements = missing_measurements(asked, read_ledger(run), measuring_pass, False)
        for launch in pack_launches(measurements, measuring_pass, plan.measuring.seed, plan.pack):
            job = write_job(launch, plan, run, run.folder / "cache")
            # Seen from the job folder, wherever that will be.
            moved = {"inputs": "../../inputs", "cache": "../../cache"}
            moved |= {"manifest": f"../../{job.manifest}"} if job.manifest else {}
            moved |= {"checkpoints": "../../checkpoints"} if job.checkpoints else {}
            write_atomically(run.job(job.name).job, job.model_copy(update=moved).model_dump_json())
            steps.append(BundleLaunch(job.cell.nodes, job.name, profiler))
    return steps


def _write_prompts(run: RunPaths) -> None:
    """All prompts of the study in one file, for people."""
    texts = [read_text(path, TEXT_BYTES).rstrip("\n") + "\n" for path in sorted(run.inputs.glob("*.jsonl"))]
    if texts:
        write_atomically(run.folder / "prompts.jsonl", "".join(texts))


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"
