"""Stage 1: a study file becomes a plan, with every input copied into the run folder."""

import contextlib
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.base import write_atomically
from configs.paths import RunPaths
from configs.plan import Plan, PlannedModel
from configs.study import StudySpec, study_yaml
from reports.reading.read import read_plan
from tasks.inputs import copy_inputs, make_plan
from tasks.predictions import with_predictions
from tasks.repeats import carried_on


@task(name="resolve study", task_run_name="resolve {study.study}", cache_policy=NO_CACHE)
def resolve_study(study: StudySpec, models: list[PlannedModel], run: RunPaths, base: Path, cache: Path) -> Plan:
    """Copy inputs, expand the grid, predict it, write `study.yaml` and `plan.json`.

    Raises StudyError naming every problem.
    """
    inputs = copy_inputs(study, run, base)
    before = None
    with contextlib.suppress(OSError, ValueError):  # none yet, or not to be read: then nothing was grown to
        before = read_plan(run.plan)
    plan = make_plan(study, models, inputs, run.inputs, cache, before)
    if before is not None:
        plan = carried_on(plan, before)
    plan = with_predictions(plan, run.inputs, cache, before.predictions if before else None)
    write_atomically(run.study, study_yaml(study))
    write_atomically(run.plan, plan.model_dump_json(indent=1))
    return plan
