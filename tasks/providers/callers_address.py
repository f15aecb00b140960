"""The public address of this machine, for the one rule that admits SSH."""

from http.client import HTTPException
from ipaddress import ip_address
from urllib.error import URLError
from urllib.request import urlopen

_SERVICE = "https://checkip.amazonaws.com"
"""Answers with the caller's address in plain text."""


def callers_address() -> str:
    """Return the address as a range of one. Raises ValueError where it cannot be found out."""
    try:
        with urlopen(_SERVICE, timeout=10) as answer:
            address = ip_address(answer.read(64).decode().strip())
    except (URLError, OSError, HTTPException, ValueError) as error:
        remedy = "Name it: --ssh-from 203.0.113.7/32"
        raise ValueError(f"--ssh-from: {_SERVICE} did not return this machine's address ({error}). {remedy}") from error
    return f"{address}/{address.max_prefixlen}"
