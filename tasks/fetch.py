"""Stage 3: the model's files, cached and listed in a manifest."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from configs.plans.plan import PlannedModel
from configs.spec.study import ModelSpec
from tasks.models.sources import TransientFetchError
from tasks.planning.inputs import planned_model


async def _can_pass(task: Any, task_run: Any, state: Any) -> bool:
    """Retry what time can heal (network, server); a wrong name stays wrong."""
    try:
        await state.aresult()
    except TransientFetchError:
        return True
    except Exception:
        return False
    return False


@task(
    name="fetch model",
    task_run_name="fetch {spec.name}",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=2),
    retry_jitter_factor=0.5,
    retry_condition_fn=_can_pass,
)
def fetch_model(spec: ModelSpec, position: int, cache: Path, base: Path) -> PlannedModel:
    """Resolve one model and bring its files. Raises StudyError for what no retry can mend."""
    return planned_model(spec, position, cache, base)
