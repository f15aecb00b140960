"""Settings and credentials that a team stores in Prefect's API instead of on each machine.

A Variable `rankwise_environment` and a Secret block `rankwise-credentials`, each a JSON object of
environment variables, hold during a run; what the process has already wins. They never reach the ranks
(`slurm.launch` drops secrets), a file, a log or the API: errors name the block, never what is in it.

    prefect variable set rankwise_environment '{"HF_ENDPOINT": "https://hub.example.org"}'
    with api_environment(): ...
"""

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from tasks.prefect_api.api import NEEDED_SECONDS, api_error_text, quick_client

ENVIRONMENT_VARIABLE = "rankwise_environment"
CREDENTIALS_BLOCK = "rankwise-credentials"


@contextlib.contextmanager
def api_environment() -> Iterator[None]:
    """Set what the API holds in this process's environment for the block.

    Raises ValueError, naming the variable or block, for one that is no mapping of names to text.
    """
    try:
        with quick_client(answer_seconds=NEEDED_SECONDS) as client:
            found = _variable(client) | _secret(client)
    except httpx.HTTPError as error:
        get_run_logger().warning("settings and credentials of the Prefect API not read: %s", api_error_text(error))
        found = {}
    with _CHANGING:
        added = {name: value for name, value in found.items() if name not in os.environ}
        os.environ.update(added)
        held = [name for name in found if name in added or _holders[name]]
        _holders.update(held)
    try:
        if added:
            get_run_logger().info("set from the Prefect API: %s", ", ".join(sorted(added)))
        yield
    finally:
        with _CHANGING:
            _holders.subtract(held)
            for name in held:
                if not _holders[name]:
                    os.environ.pop(name, None)


_CHANGING = threading.Lock()
_holders: Counter[str] = Counter()
"""How many blocks hold a variable of the API: studies that a script runs in threads share the environment."""


def _variable(client: SyncPrefectClient) -> dict[str, str]:
    variable = client.read_variable_by_name(ENVIRONMENT_VARIABLE)
    return _checked(variable.value, f"Prefect variable {ENVIRONMENT_VARIABLE}") if variable else {}


def _secret(client: SyncPrefectClient) -> dict[str, str]:
    try:
        value = client.read_block_document_by_name(CREDENTIALS_BLOCK, "secret").data.get("value")
    except ObjectNotFound:
        return {}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return _checked(value, f"Prefect Secret block {CREDENTIALS_BLOCK}")


def _checked(value: Any, where: str) -> dict[str, str]:
    """The value, if it is a mapping of names to texts; an error that names only the place otherwise."""
    if not isinstance(value, dict) or not all(isinstance(item, str) for pair in value.items() for item in pair):
        raise ValueError(f'{where}: expected a JSON object of names and strings, for example {{"HF_TOKEN": "..."}}')
    if not all(_fits(name, content) for name, content in value.items()):
        raise ValueError(
            f"{where}: one of its names is empty or has `=` or spaces around it, or there is a character in a name or "
            "value that no environment can hold"
        )
    return value


def _fits(name: str, value: str) -> bool:
    """Whether an environment can hold this."""
    try:
        text = f"{name}{value}".encode()
    except UnicodeEncodeError:  # half of a surrogate pair; the error itself has the value in it
        return False
    return bool(name) and name == name.strip() and "=" not in name and b"\0" not in text
