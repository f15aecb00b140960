"""Hosts that are reached by SSH: how to connect to each, and by which address the others of a job reach it.

SshHost.model_validate("gpu-a")                                   # all else from ~/.ssh/config
SshHost(host="203.0.113.7", port=2222, name="gpu-a", address="10.0.0.7", host_key="ssh-ed25519 AAAAC3...")
"""

import ipaddress
import re
from contextlib import suppress
from typing import Any

from pydantic import Field, field_validator, model_validator

from configs.common.base import Frozen

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$"
_HOST_KEY = re.compile(r"(ssh|ecdsa|sk)-[\w@.-]+ [A-Za-z0-9+/]+=*( .*)?")
_JUMP = re.compile(
    r"((?P<user>[^\s:@-][^\s:@]*)@)?"
    r"(\[(?P<bracketed>[^\s\[\]]+)\]|(?P<host>[^\s:@,\[\]-][^\s:@,\[\]]*))"
    r"(:(?P<port>[0-9]{1,5}))?"
)


class SshHost(Frozen):
    """One host. What is not given comes from the target, else from ~/.ssh/config, else as OpenSSH has it."""

    host: str = Field(
        max_length=255, pattern=_NAME, description="name or address to connect to, or an alias of ~/.ssh/config"
    )
    name: str = Field("", max_length=255, description="in records and reports; not set: `host`")
    port: int | None = Field(None, ge=1, le=65_535)
    user: str | None = Field(None, pattern=r"^[^\s:@-][^\s:@]*$")
    key: str | None = Field(None, description="file of the private key; none: those of ~/.ssh and of the agent")
    host_key: str | None = Field(
        None, description="its public key as in known_hosts, `ssh-ed25519 AAAA...`; none: what known_hosts says of it"
    )
    address: str | None = Field(
        None,
        max_length=255,
        pattern=_NAME,
        description="by which the other hosts of a job reach it; none: where it was connected to",
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"host": data}
        if isinstance(data, dict) and isinstance(data.get("host"), str):
            return {"name": data["host"]} | data
        return data

    @field_validator("name")
    @classmethod
    def _speakable(cls, name: str) -> str:
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"got {name!r}, expected letters, digits and ._:-")
        return name

    @field_validator("host")
    @classmethod
    def _without_port(cls, host: str) -> str:
        if ":" in host and not _is_ipv6(host):
            raise ValueError(f"got {host!r}, expected a name or an address alone. Set its port by `port`")
        return host

    @field_validator("host_key")
    @classmethod
    def _public_key(cls, key: str | None) -> str | None:
        if key is not None and not _HOST_KEY.fullmatch(key):
            raise ValueError(
                "expected a public key as in known_hosts: its type and the key, such as ssh-ed25519 AAAA..."
            )
        return key


def jump_host(written: str) -> tuple[str | None, str, int | None]:
    """Return user, host and port of a jump host: `user@host:port`, `[2001:db8::1]:port` or less. Raises ValueError."""
    parts = _JUMP.fullmatch(written)
    user, at, host = written.rpartition("@")
    if parts is None and _is_ipv6(host) and bool(user) is bool(at):
        return user or None, host, None
    port = int(parts["port"]) if parts and parts["port"] else None
    if parts is None or (parts["bracketed"] and not _is_ipv6(parts["bracketed"])) or not 0 < (port or 1) < 65_536:
        raise ValueError(f"got {written!r}, expected one host as in user@host:port or user@[2001:db8::1]:port")
    return parts["user"], parts["bracketed"] or parts["host"], port


def _is_ipv6(text: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.IPv6Address(text))
    return False
