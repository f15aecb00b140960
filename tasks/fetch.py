"""Stage 3: the model's files, cached and listed in a manifest."""

from pathlib import Path

from configs.plans.plan import Plan, PlannedModel
from configs.spec.study import ModelSpec
from tasks.models.sources import TransientFetchError
from tasks.planning.study_models import planned_model
from tasks.prefect_api.stages import stage


class EarlierPlan:
    """The plan of an earlier run, which pins models. A plain class: Prefect would walk through a model."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan


@stage("fetch model", "fetch {spec.name}", retry_on=TransientFetchError)
def fetch_model(spec: ModelSpec, position: int, cache: Path, base: Path, before: EarlierPlan) -> PlannedModel:
    """Resolve one model and bring its files. Raises StudyError for what no retry can mend."""
    return planned_model(spec, position, cache, base, before.plan)
