"""Have Prefect's clients of this process ask an API on loopback without a look at the proxies of the environment.

ask_loopback_directly()

That NO_PROXY names loopback is not enough: httpx makes a transport for every proxy that the environment names before it
knows what is asked. It raises for a SOCKS proxy without the package socksio, for `socks://` and for a NO_PROXY with an
address in brackets, and a run would not reach its own server. Source: `Client._get_proxy_map` of httpx 0.28.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient

from configs.common.system.loopback import is_loopback


def ask_loopback_directly() -> None:
    """Change both kinds of clients, for those that are made from here on."""
    for kind in (PrefectHttpxAsyncClient, PrefectHttpxSyncClient):
        setattr(kind, "__init__", _direct(kind.__init__))  # noqa: B010  # mypy: a method cannot be assigned to


def _direct(made: Callable[..., None]) -> Callable[..., None]:
    @wraps(made)
    def made_directly(self: object, *arguments: Any, **options: Any) -> None:
        if is_loopback(str(options.get("base_url", ""))):
            options.setdefault("trust_env", False)
        made(self, *arguments, **options)

    return made_directly
