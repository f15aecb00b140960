"""Which URLs are of a server on this machine's loopback: no proxy of the environment may stand before it."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Return whether the URL is of a server on this machine's loopback, or of a tunnel that begins there."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
