"""Variables of the libraries behind live streams, some of them secrets: who may have them, and how they are asked for.

The ranks get none that is a secret. The process of the run answers, on a socket of this machine, the process that talks
to the libraries (`engine.training.live.streamer`): an abstract Unix socket, named by the variable SOCKET_VARIABLE.
"""

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from configs.common.secrets import HIDDEN, is_secret

SOCKET_VARIABLE = "RANKWISE_LIVE_SOCKET"
STREAMER = "engine.training.live.streamer"
_PREFIXES = {"mlflow": "MLFLOW_", "wandb": "WANDB_"}
"""Live stream -> prefix of its library's variables. The other streams need none."""


def variables_of(sinks: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of these streams' libraries."""
    prefixes = tuple(_PREFIXES[sink] for sink in sinks if sink in _PREFIXES)
    return {name: value for name, value in environment.items() if prefixes and name.startswith(prefixes)}


def has_password(value: str) -> bool:
    """Return whether a value is a URL with a password."""
    try:
        return urlsplit(value).password is not None
    except ValueError:
        return False


def hidden(text: str, variables: Mapping[str, str]) -> str:
    """Return a text without the secrets among these variables."""
    for name, value in variables.items():
        secrets = {value} if is_secret(name) else set()
        if has_password(value):
            secrets |= {urlsplit(value).netloc.rpartition("@")[0], urlsplit(value).password or ""}
        for secret in sorted(secrets - {""}, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
    return text
