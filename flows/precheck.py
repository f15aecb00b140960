"""Everything about a study that can be checked before anything is started. No Prefect here.

`rankwise validate`, `--dry-run` and the first second of `rankwise run` all go through here, so that
a mistake in the file costs a message and nothing else.
"""

import tempfile
from pathlib import Path

from configs.paths import RunPaths
from configs.plan import Plan, PlannedModel
from configs.study import ModelSpec, StudyError, StudySpec
from tasks.inputs import copy_inputs, make_plan, planned_model
from tasks.machine import check_plan
from tasks.providers.models import is_hub_repository


def check_study(study: StudySpec, base: Path, cache: Path, run_folder: Path) -> Plan:
    """The plan of a study as far as it can be made without a network.

    A model on a hub is not asked for: its cells carry the name instead of the commit. Raises
    StudyError naming every problem.
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
            plan = make_plan(study, models, inputs, scratch.inputs, cache)
            check_plan(plan, run_folder)
        except StudyError as error:
            problems += error.problems
    if problems:
        raise StudyError(problems)
    return plan


def _known_model(spec: ModelSpec, position: int, cache: Path, base: Path) -> PlannedModel:
    if spec.revision is not None and is_hub_repository(spec.id, base):
        return PlannedModel(name=spec.name, identity=f"{spec.id}@{spec.revision}", manifest="")
    return planned_model(spec, position, cache, base)
