"""Which Host headers a server without a token takes: those that no page elsewhere can make a browser send.

    foreign_host(headers, "127.0.0.1", None)     # the name to refuse; None: the request may be answered

A page can have a browser send requests to a name of its own that it points at this machine's loopback interface (DNS
rebinding), and read the answers. It needs a name for that: addresses are taken, as tunnels and forwarded ports use.
"""

import ipaddress
from collections.abc import Iterable

from configs.common.files.reading import brief
from configs.serving.settings import API_KEY_VARIABLE


def foreign_host(headers: Iterable[tuple[bytes, bytes]], bound: str, api_key: str | None) -> str | None:
    """Return the first name in Host headers that is neither localhost, an address nor `bound`; None: there is none.

    headers: of an ASGI scope, names in lower case. bound: the address that the server listens on. With a token, which
    no page elsewhere has, and where other machines reach the server, by whatever name, every name is taken.
    """
    if api_key is not None or not _is_loopback(bound):
        return None
    given = (_name(value.decode("latin-1")) for header, value in headers if header == b"host")
    return next((name for name in given if not _is_own(name, bound)), None)


def refusal_of(name: str) -> str:
    """Return the message for a request with such a Host."""
    return (
        f"Host: {brief(name)} is refused by a server without a token. Use localhost or 127.0.0.1, or give the server "
        f"a token ({API_KEY_VARIABLE})"
    )


def _name(host: str) -> str:
    """Return a Host header's value without its port."""
    host = host.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.rpartition(":")[0] if host.count(":") == 1 else host).lower().removesuffix(".")


def _is_own(name: str, bound: str) -> bool:
    return name in ("localhost", bound.lower()) or _address(name) is not None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
