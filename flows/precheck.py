"""Checks of a study before anything is started. Does not import Prefect.

Used by `rankwise validate`, `--dry-run` and the start of `rankwise run`, so errors in the file are reported
immediately.
"""

import tempfile
from pathlib import Path

from configs.common.base import expanded
from configs.common.printable import printable
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel, UnusableModel
from configs.spec.study import ModelSpec, StudyError, StudySpec, read_mapping
from configs.targets.rented import RentedTarget
from tasks.campaign.repeats import targets_in_use
from tasks.checks.machine import check_clusters, check_resources
from tasks.checks.requirements import check_requirements
from tasks.checks.resumed import check_rules
from tasks.models.model_cache import DEFAULT_REVISION
from tasks.models.sources import hub_repository
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_models import planned_model, revision_of, usable_models
from tasks.planning.study_plan import earlier_plan, make_sound_plan


def check_study(
    study: StudySpec, base: Path, cache: Path, run_folder: Path, clusters: bool = False, only_failed: bool = False
) -> Plan:
    """The plan of a study as far as it can be made without a network.

    A model whose files are at fault is left out and named in the plan, unless there is no other.
    A model on a hub is not asked for: its cells carry the name instead of the commit. clusters: ask their schedulers,
    too, and predict the cells if nodes are to be rented. only_failed: of those on which something has failed. A run
    takes the plan as it is where nothing else is learnt of its models. Raises StudyError naming every problem.
    """
    problems = _path_problems({"run folder": run_folder, "folder of the study": base, "model cache": cache})
    if problems:
        raise StudyError(problems)
    models: list[PlannedModel] = []
    unusable: tuple[UnusableModel, ...] = ()
    before = earlier_plan(RunPaths(run_folder))
    try:
        models, unusable = usable_models(study, lambda spec, at: _known_model(spec, at, cache, base, before))
    except StudyError as error:
        problems += error.problems
    with tempfile.TemporaryDirectory() as folder:
        scratch = RunPaths(Path(folder))
        try:
            inputs = copy_inputs(study, scratch, base, kept=False)
            if problems:
                raise StudyError([])
            plan = make_sound_plan(study, models, unusable, inputs, scratch.inputs, cache, before)
            check_resources(plan, run_folder)
            check_requirements(plan, cache)
            check_rules(plan, before, RunPaths(run_folder))
            if clusters and any(isinstance(target, RentedTarget) for target in study.targets):
                from tasks.planning.predictions import with_predictions

                plan = with_predictions(plan, scratch.inputs, cache)
        except StudyError as error:
            problems += error.problems
    if problems:
        raise StudyError(problems)
    if clusters:
        check_clusters(plan, targets_in_use(plan, RunPaths(run_folder), only_failed))
    return plan


def missing_folders(path: Path, cache: Path) -> list[str]:
    """A problem for each model of a study file whose folder is not there, whatever else is wrong in the file.

    Only what a look at the file system tells: nothing of a folder that is there is read.
    """
    try:
        models = read_mapping(path, str(path), "expected a mapping").get("models")
    except StudyError:
        return []
    problems = []
    for position, written in enumerate(models if isinstance(models, list) else []):
        try:
            spec = ModelSpec.model_validate(written)
            base = path.parent
            if spec.id.startswith("synthetic:") or (base / expanded(spec.id)).exists():
                continue
            _known_model(spec, position, cache, base, None)
        except StudyError as error:
            problems += error.problems
        except (ValueError, OSError):
            continue  # told already, as every problem of the file's form, or no path that can be looked at
    return problems


def _path_problems(paths: dict[str, Path]) -> list[str]:
    """A problem for each path that no JSON can hold, such as one whose names were written in Latin-1."""
    found = []
    for what, path in paths.items():
        try:
            str(path.absolute()).encode()
        except UnicodeEncodeError:
            found.append(f"{what} {printable(str(path.absolute()))}: the path is not valid UTF-8. Rename the folder")
    return found


def _known_model(spec: ModelSpec, position: int, cache: Path, base: Path, before: Plan | None) -> PlannedModel:
    repository = hub_repository(spec.id, spec.revision, base)
    if repository is not None:
        revision = revision_of(spec, base, before) or DEFAULT_REVISION
        return PlannedModel(name=spec.name, identity=f"{repository}@{revision}", manifest="")
    return planned_model(spec, position, cache, base)
