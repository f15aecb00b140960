"""Queries to a Prefect API with the standard library, as Prefect's client would send them.

    api_opener(url, os.environ).open(f"{url}/health", timeout=10)

For commands that do not import Prefect, which takes a second or two.
"""

import contextlib
import json
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from configs.common.system.loopback import is_loopback

_ON = ("1", "true", "t", "yes", "y", "on")
"""How a setting of Prefect is switched on: https://docs.pydantic.dev/latest/api/standard_library_types/#booleans"""


class _OwnHost(urllib.request.HTTPRedirectHandler):
    """Follows an API to another path of its own, or to itself by TLS; another host would get the credentials."""

    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(answer[-1])
        by_tls = (before.scheme, after.scheme) == ("http", "https") and before.hostname == after.hostname
        same = (before.scheme, before.netloc) == (after.scheme, after.netloc)
        return super().redirect_request(req, *answer) if same or by_tls else None


def api_opener(url: str, environment: Mapping[str, str], own: bool = False) -> urllib.request.OpenerDirector:
    """What opens requests to an API: with the certificates and headers that the environment names for Prefect's client.

    One on loopback, or our `own`, is asked by no proxy. Raises OSError where the file of certificates cannot be read,
    ValueError for what is no URL. Source: `PrefectClient` in prefect/client/orchestration/__init__.py.
    """
    handlers: list[urllib.request.BaseHandler] = [_OwnHost()]
    if own or is_loopback(url):
        handlers.append(urllib.request.ProxyHandler({}))
    if urlsplit(url).scheme == "https":
        context = ssl.create_default_context(cafile=environment.get("PREFECT_API_SSL_CERT_FILE") or None)
        if environment.get("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "").strip().lower() in _ON:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    with contextlib.suppress(ValueError, AttributeError):  # what is no object of headers is for Prefect to refuse
        headers = json.loads(environment.get("PREFECT_CLIENT_CUSTOM_HEADERS") or "{}")
        opener.addheaders += [(str(name), str(value)) for name, value in headers.items()]
    return opener
