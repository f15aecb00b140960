"""Stage 1: a study file becomes a plan, with every input copied into the run folder."""

from pathlib import Path

from configs.common.base import write_atomically
from configs.common.files.reading import PLAN_BYTES, read_json_object
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel, UnusableModel
from configs.records.record import SchemaError, check_schema
from configs.spec.study import StudySpec, study_yaml
from tasks.campaign.repeats import carried_on, targets_in_use
from tasks.checks.machine import check_clusters, check_resources
from tasks.checks.requirements import check_requirements
from tasks.checks.resumed import check_rules
from tasks.models.saved_reference import place_references
from tasks.planning.inputs import copy_inputs
from tasks.planning.predictions import predicted_before, with_predictions
from tasks.planning.study_plan import earlier_plan, make_sound_plan
from tasks.prefect_api.stages import stage


class CheckedPlan:
    """A plan that was made and checked before the flow began. A plain class: Prefect would walk through a model."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan


@stage("resolve study", "resolve {study.study}")
def resolve_study(
    study: StudySpec,
    models: list[PlannedModel],
    run: RunPaths,
    base: Path,
    cache: Path,
    checked: CheckedPlan,
    unusable: tuple[UnusableModel, ...] = (),
    only_failed: bool = False,
) -> Plan:
    """Copy inputs, expand the grid, predict it, write `study.yaml` and `plan.json`.

    The checked plan stays where its models are these; otherwise, as for a model whose commit only its hub knows, the
    plan is made here and checked against this machine and the clusters. Raises StudyError naming every problem,
    and SchemaError for a folder of another version, whose plan stays as it is.
    """
    _check_version(run)
    inputs = copy_inputs(study, run, base)
    before = earlier_plan(run)
    plan = checked.plan
    if plan is None or (list(plan.models), plan.unusable) != (models, unusable):
        plan = make_sound_plan(study, models, unusable, inputs, run.inputs, cache, before)
        check_resources(plan, run.folder)
        check_requirements(plan, cache)
        check_clusters(plan, targets_in_use(plan, run, only_failed))
    check_rules(plan, before, run)
    if before is not None:
        plan = carried_on(plan, before)
    plan = with_predictions(plan, run.inputs, cache, predicted_before(plan, before) if before else None)
    write_atomically(run.study, study_yaml(study))
    write_atomically(run.plan, plan.model_dump_json(indent=1))
    place_references(plan, run)
    return plan


def _check_version(run: RunPaths) -> None:
    """Raise SchemaError for a plan of another version, which could not read its folder again with one of this."""
    try:
        check_schema(read_json_object(run.plan, PLAN_BYTES), run.plan)
    except SchemaError:
        raise
    except (OSError, ValueError):
        return  # there is none, or none that can be read
