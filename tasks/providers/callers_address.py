"""The public address of this machine, for the one rule that admits SSH."""

from http.client import HTTPException
from ipaddress import ip_address
from urllib.error import URLError
from urllib.request import urlopen

from configs.hardware.node_names import Cloud

_SERVICE = "https://checkip.amazonaws.com"
"""Answers with the caller's address in plain text."""


def callers_address(name: str = "--ssh-from") -> str:
    """Return the address as a range of one. Raises ValueError where it cannot be found out.

    name: of the option or field that says it, as the user writes it.
    """
    try:
        with urlopen(_SERVICE, timeout=10) as answer:
            address = ip_address(answer.read(64).decode().strip())
    except (URLError, OSError, HTTPException, ValueError) as error:
        why = f"{_SERVICE} did not return this machine's address ({error})"
        raise ValueError(f"{name}: {why}. Set it, such as 203.0.113.7/32") from error
    return f"{address}/{address.max_prefixlen}"


def check_source(cloud: Cloud, public_address: bool, ssh_from: str | None, names: tuple[str, str]) -> None:
    """Raise ValueError where the default of `ssh_from`, the address above, cannot admit this machine.

    Nodes without public addresses see its private one. Azure's networks admit their own anyway. names: of the two
    fields or options, as the user writes them.
    """
    if not public_address and ssh_from is None and cloud != "azure":
        private, source = names
        raise ValueError(
            f"{source}: is needed with {private}, because the nodes do not see this machine's public address. Name the "
            "one from which it reaches them, such as 10.0.0.5/32"
        )
