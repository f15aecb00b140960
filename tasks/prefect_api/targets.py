"""Targets that a team stores in Prefect's API: the Variable `rankwise_targets`, fields of a target by its name.

    prefect variable set rankwise_targets '{"lab": {"kind": "slurm", "partition": "gpu", "nodes": 2}}'

Studies name them; everybody who reaches the API can read them, so that none may hold a secret.
"""

from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient

from configs.spec.short_form import checked_targets
from configs.spec.study import StudyError
from tasks.prefect_api.api import NEEDED_SECONDS, api_error_text, quick_client

TARGETS_VARIABLE = "rankwise_targets"
_WHERE = f"Prefect variable {TARGETS_VARIABLE}"


def stored_targets() -> dict[str, dict[str, Any]]:
    """Fields of each target by its name. Raises StudyError for a list that is not sound, and where it is not read."""
    try:
        with quick_client(answer_seconds=NEEDED_SECONDS) as client:
            return read_targets(client)
    except httpx.HTTPError as error:
        raise StudyError([f"{_WHERE}: not read: {api_error_text(error)}. Run it again when the API answers"]) from error


def read_targets(client: SyncPrefectClient) -> dict[str, dict[str, Any]]:
    """The same from a client. Raises StudyError for a list that is not sound."""
    variable = client.read_variable_by_name(TARGETS_VARIABLE)
    return checked_targets(variable.value, _WHERE) if variable else {}
