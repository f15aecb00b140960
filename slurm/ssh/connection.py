"""One connection to each host, kept and used by everything of this process; made again when it broke.

    host = host_of(target, target.hosts[0])
    facts = await host.facts()
    answer, body = await host.ask("look", jobs=[...])

~/.ssh/config, the agent, known_hosts and jump hosts are asyncssh's part, as OpenSSH has them. A host whose key is not
known, or is another one, is refused: no first contact is taken on trust. On the host one process answers requests
(`slurm.ssh.node_program`); nothing of a job depends on it.
"""

import asyncio
import json
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from configs.common.base import expanded
from configs.common.files.reading import read_text
from configs.common.secrets import excerpt
from configs.targets.ssh_host import SshHost, jump_host
from configs.targets.target import SshTarget
from slurm.ssh.line import Line
from slurm.staging.packages import WHOLE_PYTHON

if TYPE_CHECKING:
    import asyncssh  # at run time in the functions that use it: every run imports this module, few have SSH hosts

OLDEST_PYTHON, DEFAULT_PYTHON = (3, 11), "python3"
CONNECT_SECONDS = 20.0
ANSWER_SECONDS = 30.0
_BEAT_SECONDS, _BEATS = 5.0, 3
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 15.0
_AT_ONCE, _AT_ONCE_BY_JUMP = 32, 8
"""Connections that are being made at the same time. Of ten a server drops some (MaxStartups of sshd_config)."""
_USERS_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_KNOWN_HOSTS_OF_MACHINE = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
"""Clusters often keep the keys of their nodes here (GlobalKnownHostsFile of ssh_config(5))."""
_GREETING = b"rankwise-node "
_ROOT = Path(__file__).parents[2]
_BOOT = (
    "import json,sys,types;i=sys.stdin.buffer;o=sys.stdout.buffer;v=sys.version_info;"
    "o.write(b'\\nrankwise-node %d.%d\\n'%v[:2]);o.flush();v[:2]<(3,11) and sys.exit();"
    "[(sys.modules.__setitem__(n,types.ModuleType(n)),exec(compile(s,n,'exec'),sys.modules[n].__dict__))"
    " for n,s in json.loads(i.readline())];sys.modules['slurm.ssh.node_program'].serve(i,o)"
)
_START = f'python=$1; {WHOLE_PYTHON}; export PYTHONSAFEPATH=1; exec "$python" -u -c "$2"'
"""By sh, whatever the login shell is; a `secrets.py` in the home folder is not imported."""
_PARTS = (
    "configs.common.files.abandoned",
    "slurm.staging.file_list",
    "slurm.ssh.node_files",
    "slurm.ssh.node_program",
)
"""Modules of the program, which the host is sent under their own names."""
_PACKAGES = ("configs", "configs.common", "configs.common.files", "slurm", "slurm.staging", "slurm.ssh")
"""Those of the modules, which are empty there."""


class HostAway(OSError):
    """A host cannot be reached now; it may be later. The message names it."""


class HostRefused(ValueError):
    """A host is not connected to as it is: its key, or its answer to ours. The message names it and the remedy."""


class HostError(OSError):
    """A host was reached and could not do what it was asked for. The message names it."""


class Facts(NamedTuple):
    """What a host says of itself, and by how many seconds its clock differs from this machine's at least."""

    data: dict[str, Any]
    clock_seconds: float

    @property
    def folder(self) -> str:
        """The absolute path of the target's folder there."""
        return str(self.data["folder"])

    @property
    def place(self) -> str:
        """The same for everyone who connects to this host, by whatever name; and another for every other host."""
        return f"{self.data['boot']} {self.data['place']}"

    def address_of(self, given: SshHost) -> str:
        """By which the other hosts of a job reach it: as the target says, else where it was connected to."""
        return given.address or str(self.data["address"] or self.data["hostname"])


@dataclass(frozen=True)
class Address:
    """How a host is connected to; two that are equal share a connection."""

    host: str
    name: str
    port: int | None
    user: str | None
    key: str | None
    host_key: str | None
    jump: str | None
    known_hosts: str | None
    folder: str
    python: str


def host_of(target: SshTarget, host: SshHost) -> "Host":
    """The connection to a host of a target; the same one for all who ask."""
    address = Address(
        host=host.host,
        name=host.name,
        port=host.port or target.port,
        user=host.user or target.user,
        key=host.key or target.key,
        host_key=host.host_key,
        jump=target.jump,
        known_hosts=target.known_hosts,
        python=target.python or DEFAULT_PYTHON,
        folder=target.folder,
    )
    return _hosts.setdefault(address, Host(address))


def hosts_of(target: SshTarget) -> "list[Host]":
    """The connections to all hosts of a target, in its order."""
    return [host_of(target, host) for host in target.hosts]


def is_away(target: SshTarget, given: SshHost) -> bool:
    """Whether a host of a target cannot be reached, by whichever connection: with `shared` jobs have another one.

    Their interpreter is not the one that the host was checked with. One that is open decides: others may be long idle.
    """
    wanted = replace(host_of(target, given).address, python="")
    same = [host for address, host in list(_hosts.items()) if replace(address, python="") == wanted]
    return any(host.away_since is not None for host in same) and not any(host.is_connected for host in same)


class Host:
    """One host: asked, and reconnected to with growing pauses. Used on the loop of `slurm.ssh.loop` alone."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.name = address.name
        self.away_since: float | None = None
        self.to_end: dict[tuple[str, int], None] = {}
        """Jobs, by folder and rank, that were given up while the host was away: ended when it is back."""
        self._line: Line | None = None
        self._facts: Facts | None = None
        self._was_reached = False
        self._connecting: asyncio.Lock | None = None
        self._failures, self._next_try, self._why = 0, 0.0, ""

    @property
    def is_connected(self) -> bool:
        """Whether its connection is open, as far as is known."""
        return self._line is not None and not self._line.closed

    @property
    def away_seconds(self) -> float:
        """For how long it could not be reached; 0 where it can be."""
        return 0.0 if self.away_since is None else time.monotonic() - self.away_since

    async def ask(
        self, operation: str, body: bytes = b"", limit_seconds: float | None = ANSWER_SECONDS, **arguments: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Have the host do something. Raises HostAway, HostRefused and HostError.

        limit_seconds: for the answer, beside the time in which bytes come or go.
        """
        import asyncssh

        line = await self._connected()
        try:
            said, content = await line.answered(operation, body, arguments, limit_seconds)
        except (TimeoutError, OSError, asyncssh.Error) as error:
            line.close()
            self._line = None
            raise self._is_away(error) from error
        self.away_since, self._failures = None, 0
        if "error" in said:
            raise HostError(said["errno"], f"{self.name}: {said['error']}")
        return said, content

    async def facts(self, fresh: bool = False) -> Facts:
        """What the host says of itself; asked once for each connection, or now."""
        await self._connected()
        if fresh or self._facts is None:
            self._facts = await self._hello()
        return self._facts

    async def _hello(self) -> Facts:
        began = time.time()
        said, _ = await self.ask("hello", limit_seconds=60.0, folder=self.address.folder)
        ended = time.time()
        early, late = said["time"] - began, said["time"] - ended
        return Facts(said, 0.0 if late <= 0.0 <= early else min(early, late, key=abs))

    async def _connected(self) -> Line:
        import asyncssh

        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._line is not None and not self._line.closed:
                return self._line
            if self._line is not None:
                self._line = None
                self.away_since = self.away_since or time.monotonic()
            if time.monotonic() < self._next_try:
                raise HostAway(None, f"{self.name}: {self._why}")
            try:
                self._line = await connect(self.address)
            except HostRefused as error:
                if not self._was_reached:
                    raise
                # Its jobs go on, and an agent that is locked or a home folder that is not mounted may come back.
                raise self._is_away(error) from error
            except (OSError, TimeoutError, asyncssh.Error) as error:
                raise self._is_away(error) from error
            self._facts, self._was_reached = None, True
            for folder, rank in list(self.to_end):
                with suppress(OSError, TimeoutError, asyncssh.Error):
                    await asyncio.wait_for(self._line.ask("end_job", b"", {"folder": folder, "rank": rank}), 20.0)
                    self.to_end.pop((folder, rank))
            return self._line

    def _is_away(self, error: Exception) -> HostAway:
        self.away_since = self.away_since or time.monotonic()
        pause = min(_FIRST_PAUSE_SECONDS * 2**self._failures, _LONGEST_PAUSE_SECONDS)
        self._failures, self._next_try = min(self._failures + 1, 10), time.monotonic() + pause
        self._why = _one_line(error).removeprefix(f"{self.name}: ")
        return HostAway(None, f"{self.name}: not reached: {self._why}")


_hosts: dict[Address, Host] = {}
_gates: dict[str | None, asyncio.Semaphore] = {}
"""By jump host."""


async def connect(address: Address) -> Line:
    """Connect and start the program. Raises HostRefused, OSError, TimeoutError and what asyncssh raises."""
    import asyncssh

    by = address.jump or _jump_of_config(address.host)
    async with _gates.setdefault(by, asyncio.Semaphore(_AT_ONCE_BY_JUMP if by else _AT_ONCE)):
        opened: list[asyncssh.SSHClientConnection] = []
        try:
            if address.jump is not None:
                opened.append(await _jump_connection(address, address.jump))
            opened.append(await _connection(address, *opened))
            return await asyncio.wait_for(_begin(address, opened), CONNECT_SECONDS)
        except BaseException:
            for each in opened:
                each.abort()
            raise


def _jump_of_config(host: str) -> str | None:
    """The jump host that ~/.ssh/config names for a host."""
    import asyncssh

    try:
        options = asyncssh.SSHClientConnectionOptions(
            config=(), host=host, client_keys=None, known_hosts=None, agent_path=None
        )
    except (OSError, ValueError):  # told when the connection is made
        return None
    return options.tunnel if isinstance(options.tunnel, str) else None


async def _jump_connection(address: Address, jump: str) -> "asyncssh.SSHClientConnection":
    """Connect to the jump host, by the same key and file of known hosts, where the target names them."""
    import asyncssh

    user, host, port = jump_host(jump)
    name = f"{address.name}: jump host {host}"
    try:
        return await _connection(replace(address, name=name, host=host, port=port, user=user, host_key=None))
    except (OSError, TimeoutError, asyncssh.Error) as error:
        raise ConnectionError(f"jump host {host}: {_one_line(error)}") from error


async def _connection(
    address: Address, tunnel: "asyncssh.SSHClientConnection | None" = None
) -> "asyncssh.SSHClientConnection":
    """Connect to one host, by another where one is given. Raises as `connect`."""
    import asyncssh

    try:
        through = {} if tunnel is None else {"tunnel": tunnel}
        return await asyncssh.connect(address.host, **_options(address), **through)
    except asyncssh.HostKeyNotVerifiable as error:
        raise HostRefused(f"{address.name}: {_key_refused(address, error)}") from error
    except asyncssh.PermissionDenied as error:
        who = f" for user {address.user}" if address.user else ""
        raise HostRefused(
            f"{address.name}: no key is accepted{who}: {_one_line(error)}. Name one by `key`, or load one"
        ) from error
    except HostRefused:
        raise
    except (asyncssh.KeyImportError, asyncssh.ConfigParseError, ValueError) as error:
        raise HostRefused(f"{address.name}: {_one_line(error)}") from error


def _options(address: Address) -> dict[str, Any]:
    """Arguments for asyncssh; what is left out comes from ~/.ssh/config. Raises HostRefused."""
    import asyncssh

    given: dict[str, Any] = {
        "port": address.port,
        "username": address.user,
        "client_keys": [str(expanded(address.key))] if address.key else None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    for field, path in (("key", address.key), ("known_hosts", address.known_hosts)):
        if path is not None and not expanded(path).is_file():
            raise HostRefused(f"{address.name}: {field}: no such file: {path}")
    if address.host_key is not None:
        options["known_hosts"] = ([asyncssh.import_public_key(address.host_key)], [], [])
    elif address.known_hosts is not None:
        options["known_hosts"] = str(expanded(address.known_hosts))
    else:
        options["known_hosts"] = _usual_known_hosts(address.host) or b"\n"
    return options | {
        "connect_timeout": CONNECT_SECONDS,
        "keepalive_interval": _BEAT_SECONDS,
        "keepalive_count_max": _BEATS,
        "send_env": None,  # whatever ~/.ssh/config says: tokens of this machine stay here
        "agent_forwarding": False,
        "preferred_auth": "gssapi-with-mic,publickey",  # nobody is there to type a password
    }


def _usual_known_hosts(host: str) -> list[str]:
    """Files with the keys that OpenSSH would know a host by: of ~/.ssh/config, else the user's own; and the machine's.

    Left to itself asyncssh passes over the machine's, fails for one of several files that is not there, and takes any
    key where the configuration says `UserKnownHostsFile none`. Raises ValueError for a configuration with errors.
    """
    import asyncssh

    options = asyncssh.SSHClientConnectionOptions(config=(), host=host, client_keys=None, agent_path=None)
    told = cast("Sequence[str] | None", options.known_hosts)
    own = [] if told is None else [str(expanded(name)) for name in told or _USERS_KNOWN_HOSTS]
    found = [name for name in own if os.access(name, os.R_OK)]
    for name in _KNOWN_HOSTS_OF_MACHINE:
        with suppress(OSError, ValueError):  # a line that asyncssh cannot read is not the user's to mend
            asyncssh.read_known_hosts(name)
            found.append(name)
    return found


def _key_refused(address: Address, error: Exception) -> str:
    if address.host_key is not None:
        said = _one_line(error)
        return f"its host key is not the one that `host_key` names ({said}). Find out why before anything else"
    port = f" -p {address.port}" if address.port and address.port != 22 else ""
    where = address.known_hosts or "~/.ssh/known_hosts"
    return (
        f"host key not accepted ({_one_line(error)}). A first contact is not taken on trust: check its key, then add "
        f"it to {where}, as by `ssh{port} {address.host}`; where it is known, its key has changed"
    )


def _one_line(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return excerpt(" ".join((str(error) or type(error).__name__).split()), 300)


async def _begin(address: Address, opened: "Sequence[asyncssh.SSHClientConnection]") -> Line:
    """Start the program on a host that was connected to, the last of `opened`. Raises HostRefused."""
    command = f"exec sh -c {shlex.quote(_START)} sh {shlex.quote(address.python)} {shlex.quote(_BOOT)}"
    process = await opened[-1].create_process(command, encoding=None)
    told = last = b""
    while not told.startswith(_GREETING):  # what a login script says comes first
        last = told.strip() or last
        told = await process.stdout.readline()
        if not told:
            lines = (await process.stderr.read(-1)).strip().splitlines()
            said = excerpt((lines[-1] if lines else last).decode(errors="replace"), 300)
            raise HostRefused(
                f"{address.name}: {address.python} does not start: {said.rstrip('.') or 'no message'}. Install Python "
                f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer there, or name one by `python`"
            )
    version = told.removeprefix(_GREETING).decode().strip()
    if tuple(int(part) for part in version.split(".")) < OLDEST_PYTHON:
        raise HostRefused(
            f"{address.name}: {address.python} is Python {version}, expected {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or "
            "newer. Install one, or name it by `python`"
        )
    process.stdin.write(program_line())
    return Line(opened[::-1], process)


def program_line() -> bytes:
    """Return what the interpreter on a host is sent first: names and sources of the program's modules."""
    sources = [(name, read_text(_ROOT / f"{name.replace('.', '/')}.py")) for name in _PARTS]
    return json.dumps([*((name, "") for name in _PACKAGES), *sources]).encode() + b"\n"
