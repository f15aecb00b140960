"""Stage 3: the model's files, cached and listed in a manifest."""

from pathlib import Path

from configs.plans.plan import PlannedModel
from configs.spec.study import ModelSpec
from tasks.models.sources import TransientFetchError
from tasks.planning.inputs import planned_model
from tasks.prefect_api.stages import stage


@stage("fetch model", "fetch {spec.name}", retry_on=TransientFetchError)
def fetch_model(spec: ModelSpec, position: int, cache: Path, base: Path) -> PlannedModel:
    """Resolve one model and bring its files. Raises StudyError for what no retry can mend."""
    return planned_model(spec, position, cache, base)
