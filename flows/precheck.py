"""Checks of a study before anything is started. Does not import Prefect.

Used by `rankwise validate`, `--dry-run` and the start of `rankwise run`, so errors in the file are reported
immediately.
"""

import tempfile
from pathlib import Path

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.spec.study import ModelSpec, StudyError, StudySpec
from tasks.checks.machine import check_clusters, check_resources
from tasks.models.sources import is_hub_repository
from tasks.planning.inputs import copy_inputs, earlier_plan, make_plan, planned_model


def check_study(study: StudySpec, base: Path, cache: Path, run_folder: Path, clusters: bool = False) -> Plan:
    """The plan of a study as far as it can be made without a network.

    A model on a hub is not asked for: its cells carry the name instead of the commit. clusters: ask their schedulers,
    too. A run takes the plan as it is where nothing else is learnt of its models. Raises StudyError naming every
    problem.
    """
    problems: list[str] = []
    models = []
    for position, spec in enumerate(study.models):
        try:
            models.append(_known_model(spec, position, cache, base))
        except StudyError as error:
            problems += error.problems
    with tempfile.TemporaryDirectory() as folder:
        scratch = RunPaths(Path(folder))
        try:
            inputs = copy_inputs(study, scratch, base)
            if problems:
                raise StudyError([])
            plan = make_plan(study, models, inputs, scratch.inputs, cache, earlier_plan(RunPaths(run_folder)))
            check_resources(plan, run_folder)
        except StudyError as error:
            problems += error.problems
    if problems:
        raise StudyError(problems)
    if clusters:
        check_clusters(plan)
    return plan


def _known_model(spec: ModelSpec, position: int, cache: Path, base: Path) -> PlannedModel:
    if spec.revision is not None and is_hub_repository(spec.id, base):
        return PlannedModel(name=spec.name, identity=f"{spec.id}@{spec.revision}", manifest="")
    return planned_model(spec, position, cache, base)
