"""This machine and hosts by SSH, asked in one form: files, and services under a supervisor.

    place = LocalPlace(folder, cache)                # or SshPlace(target, number, folder)
    place.write(f"{place.root}/a/service.json", data)
    place.start(f"{place.root}/a")
    place.state(f"{place.root}/a"), place.is_alive(f"{place.root}/a")

What a host does for a job by SSH (`slurm.ssh.node_program`) is done here for services, on this machine too.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from configs.common.files.reading import parse_model
from configs.common.system.cores import usable_cores
from configs.serving.deployment import ServiceState
from configs.targets.target import SshTarget
from slurm.ssh import node_files, node_program
from slurm.ssh.connection import Facts, HostAway, HostError, HostRefused, host_of
from slurm.ssh.loop import wait_for
from slurm.ssh.staging import interpreter_name

_STATE_BYTES = 64 << 10
_OPERATIONS: dict[str, Callable[..., dict[str, Any] | None]] = {
    "put": node_files.put,
    "get": node_files.get,
    "sizes": node_files.sizes,
    "remove": node_files.remove,
    "make": node_files.make,
    "start_job": node_program.start_job,
    "look": node_program.look,
    "end_job": node_program.end_job,
}


class PlaceError(OSError):
    """A target could not do what it was asked for; the message names it."""


class PlaceAway(PlaceError):
    """A machine that cannot be reached now; it may be later."""


class Place(Protocol):
    """One machine on which services run. root: folder of this deployment there.

    clock_seconds: by how much its clock is ahead of this machine's.
    """

    name: str
    root: str
    python: str
    models: str
    clock_seconds: float

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """Have it done there. Raises PlaceError."""
        ...

    def cores(self) -> int:
        """Return the cores that may be used."""
        ...

    def memory_bytes(self) -> int:
        """Return the memory that services may take."""
        ...

    def gpu_memory_bytes(self, first: int = 0, count: int | None = None) -> int | None:
        """Return what is free on the GPU that has least, of `count` from place `first` on or of all.

        None: there is none, or it is not known.
        """
        ...

    def gpu_count(self) -> int:
        """Return how many GPUs ranks may have; 0: there are none, or it is not known."""
        ...

    def gpu_variables(self, first: int, count: int) -> dict[str, str]:
        """Return the variables with which ranks there see `count` GPUs alone, from place `first` on; none: unknown."""
        ...


def _from(first: int, count: int | None) -> slice:
    return slice(first, None if count is None else first + count)


class LocalPlace:
    """This machine."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.name, self.root, self.python = "local", str(root), sys.executable
        self.models = str(cache / "models")
        self.clock_seconds = 0.0

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """Do it here."""
        if operation == "put":
            arguments["body"] = body
        try:
            said = _OPERATIONS[operation](**arguments) or {}
        except OSError as error:
            raise PlaceError(error.errno, f"{self.name}: {error.strerror or error}") from error
        return said, said.pop("body", b"")

    def cores(self) -> int:
        """Return the cores that this process may use."""
        return usable_cores()

    def memory_bytes(self) -> int:
        """Return the memory that is free now."""
        from configs.common.system.memory import host_memory_available

        return host_memory_available()

    def gpu_memory_bytes(self, first: int = 0, count: int | None = None) -> int | None:
        """Return what is free now on the GPU that has least; None: there is none, or it is not known."""
        from engine.planner.accelerators import free_memory_bytes, local_accelerators

        return free_memory_bytes(local_accelerators()[_from(first, count)])

    def gpu_count(self) -> int:
        """Return how many GPUs this process may use."""
        from engine.planner.accelerators import local_accelerators

        return len(local_accelerators())

    def gpu_variables(self, first: int, count: int) -> dict[str, str]:
        """Return the variables of so many of those that this process may use."""
        from engine.planner.accelerators import variables_for

        return variables_for(first, count)


class SshPlace:
    """A host of a target. Everything travels in the encrypted connection."""

    def __init__(self, target: SshTarget, number: int, folder: str) -> None:
        self.target, self.number = target, number
        self._host = host_of(target, target.hosts[number])
        self.name = self._host.name
        self._facts: Facts = self._wait(self._host.facts())
        self.root = f"{self._facts.folder}/{folder}"
        self.python = f"{self._facts.folder}/{interpreter_name(target)}"
        self.models = f"{self._facts.folder}/rankwise/models"
        self.clock_seconds = self._facts.clock_seconds

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """Have the host do it."""
        said, content = self._wait(self._host.ask(operation, body, limit_seconds=120.0, **arguments))
        return said, content

    def cores(self) -> int:
        """Return the host's cores."""
        return int(self._facts.data["cores"])

    def memory_bytes(self) -> int:
        """Return the host's memory that was free when it was first asked."""
        data = self._facts.data
        return min(int(data["memory_bytes"]), int(data.get("available_bytes") or data["memory_bytes"]))

    def gpu_memory_bytes(self, first: int = 0, count: int | None = None) -> int | None:
        """Return what was free on the GPU that has least; None: there is none, or it is not known."""
        free = self._facts.data["gpus"].get("free_bytes", ())[_from(first, count)]
        return min((int(one) for one in free if one is not None), default=None)

    def gpu_count(self) -> int:
        """Return how many GPUs the host has told of."""
        return len(self._facts.data["gpus"]["names"])

    def gpu_variables(self, first: int, count: int) -> dict[str, str]:
        """Return the variables by the numbers that nvidia-smi has; of slices, which have none, nothing."""
        from engine.planner.accelerators import DEVICE_ORDER

        if any(" MIG " in name for name in self._facts.data["gpus"]["names"]):
            return {}
        return DEVICE_ORDER | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + count)))}

    @property
    def address(self) -> str:
        """The address by which the target's other hosts reach this one."""
        return self._facts.address_of(self.target.hosts[self.number])

    def _wait(self, work: Any) -> Any:
        try:
            return wait_for(work)
        except HostAway as error:
            raise PlaceAway(error.errno, error.strerror or str(error)) from error
        except HostError as error:
            raise PlaceError(error.errno, error.strerror or str(error)) from error
        except HostRefused as error:
            raise PlaceError(None, str(error)) from error


def write(place: Place, path: str, content: str | bytes, mode: int = 0o600) -> None:
    """Write a small file there, whole or not at all; by default for its owner alone. Raises PlaceError."""
    body = content.encode() if isinstance(content, str) else content
    place.ask("put", body, path=path, offset=0, last=True, mode=mode)


def read(place: Place, path: str, tail_bytes: int = _STATE_BYTES) -> bytes | None:
    """Return the end of a file there; None: there is none. Raises PlaceError."""
    size = place.ask("sizes", paths=[path])[0]["sizes"][0]
    if size is None:
        return None
    offset = max(0, size - tail_bytes)
    return place.ask("get", path=path, offset=offset, size=tail_bytes)[1]


def start_supervisor(place: Place, folder: str) -> None:
    """Start the supervisor of a folder, in a session of its own. Raises PlaceError."""
    argv = [place.python, "-m", "slurm.supervision.supervisor", folder]
    place.ask("start_job", folder=folder, rank=0, argv=argv, environment={})


def is_supervised(place: Place, folder: str) -> bool:
    """Return whether the supervisor of a folder lives. Raises PlaceError."""
    return bool(place.ask("look", jobs=[{"folder": folder, "rank": 0, "known": None}])[0]["jobs"][0]["alive"])


def state(place: Place, folder: str) -> ServiceState | None:
    """Return what the supervisor wrote last; None: nothing yet. Raises PlaceError."""
    data = read(place, f"{folder}/state.json")
    with suppress(ValueError):
        return None if data is None else parse_model(data, ServiceState, f"{place.name}: {folder}/state.json")
    return None


def stop(place: Place, folder: str) -> None:
    """End a service and its supervisor; returns when nothing of it is left. Raises PlaceError naming what is."""
    left = place.ask("end_job", folder=folder, rank=0)[0]["left"]
    if left:
        raise PlaceError(None, f"{place.name}: processes {', '.join(map(str, left))} of {folder} could not be ended")
