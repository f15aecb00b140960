"""The address of a deployment on this machine, and the tunnels from here to servers on other hosts.

    front = DeploymentFront(place, folder)           # services of this machine under supervisors, like servers
    front.begin(config, port, expires_at)
    front.apply(config)                                # returns when it is in force
    open_tunnel(place, folder, target, host, remote_port, expires_at)      # -> local port

A tunnel is OpenSSH's `ssh -N -L`, started again when the connection breaks, so tokens and answers travel encrypted.
"""

import sys
import time
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.files.reading import parse_model, read_model
from configs.serving.deployment import FrontConfig, FrontState, SupervisedProcess
from configs.targets.ssh_host import SshHost
from configs.targets.target import SshTarget
from tasks.deployment.places import LocalPlace, PlaceError, is_supervised, read, start_supervisor, stop, write
from tasks.deployment.servers import last_lines, wait_for_port
from tasks.providers.connections import quoted_path

_APPLY_SECONDS, _LOOK_SECONDS = 20.0, 0.05


class DeploymentFront:
    """The front of one deployment. folder: its service's."""

    def __init__(self, place: LocalPlace, folder: str) -> None:
        self.place, self.folder = place, folder

    @property
    def config(self) -> FrontConfig:
        """The configuration as written."""
        return read_model(Path(self.folder) / "front.json", FrontConfig)

    @property
    def state(self) -> FrontState:
        """What the front wrote last."""
        data = read(self.place, f"{self.folder}/front_state.json")
        return FrontState() if data is None else parse_model(data, FrontState, f"{self.folder}/front_state.json")

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return is_supervised(self.place, self.folder)

    def begin(self, config: FrontConfig, port: int, expires_at: float) -> int:
        """Start it; returns its port. Raises PlaceError, ServerNotReady."""
        self.place.ask("make", paths=[self.folder])
        write(self.place, f"{self.folder}/front.json", config.model_dump_json())
        files = (f"{self.folder}/front.json", f"{self.folder}/front_state.json")
        service = SupervisedProcess(
            argv=(sys.executable, "-m", "engine.routing.main", *files, "{port}"),
            port=port,
            expires_at=expires_at,
        )
        write(self.place, f"{self.folder}/service.json", service.model_dump_json())
        start_supervisor(self.place, self.folder)
        found = wait_for_port(self.place, self.folder)
        self._wait_for(config)
        return found

    def apply(self, config: FrontConfig) -> None:
        """Put another configuration in force; returns when it is. Raises PlaceError."""
        write_atomically(Path(self.folder) / "front.json", config.model_dump_json(), mode=0o600)
        self._wait_for(config)

    def wait_until_idle(self, names: set[str], seconds: float) -> bool:
        """Return whether these backends have no requests any more, within a time."""
        deadline = time.monotonic() + seconds
        while any(backend.in_flight for backend in self.state.backends if backend.name in names):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def end(self) -> None:
        """End it; one that does not run is no error. Raises PlaceError."""
        if Path(self.folder).is_dir():
            stop(self.place, self.folder)

    def _wait_for(self, config: FrontConfig) -> None:
        wanted = config.id
        deadline = time.monotonic() + _APPLY_SECONDS
        while self.state.config_id != wanted:
            if time.monotonic() > deadline:
                how = "did not take its settings" if self.is_alive else "does not run, and did not start"
                words = last_lines(self.place, self.folder) or "no message"
                raise PlaceError(None, f"the front {how} within {_APPLY_SECONDS:g} s: {words}")
            time.sleep(_LOOK_SECONDS)


def open_tunnel(
    place: LocalPlace, folder: str, target: SshTarget, host: SshHost, remote_port: int, expires_at: float
) -> int:
    """Start a tunnel to a port of a host; returns the port here. Raises PlaceError."""
    place.ask("make", paths=[folder])
    argv = tunnel_argv(target, host, f"{folder}/known_hosts", remote_port)
    if host.host_key is not None:
        port = host.port or target.port
        name = f"[{host.host}]:{port}" if port and port != 22 else host.host
        write(place, f"{folder}/known_hosts", f"{name} {host.host_key}\n")
    service = SupervisedProcess(argv=tuple(argv), expires_at=expires_at, drain_seconds=1.0)
    write(place, f"{folder}/service.json", service.model_dump_json())
    start_supervisor(place, folder)
    return wait_for_port(place, folder)


def tunnel_argv(target: SshTarget, host: SshHost, planted_hosts: str, remote_port: int) -> list[str]:
    """Return the command line of a tunnel: ~/.ssh/config is honoured, but for a host whose key was planted."""
    options = {
        "BatchMode": "yes",
        "ExitOnForwardFailure": "yes",
        "StrictHostKeyChecking": "yes",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ConnectTimeout": "10",
        "ForwardAgent": "no",
        "ControlMaster": "no",
        "ControlPath": "none",
    }
    key, user, port = host.key or target.key, host.user or target.user, host.port or target.port
    if key is not None:
        options |= {"IdentityFile": quoted_path(key), "IdentitiesOnly": "yes"}
    if host.host_key is not None:
        options |= {"UserKnownHostsFile": quoted_path(planted_hosts), "GlobalKnownHostsFile": "/dev/null"}
    elif target.known_hosts is not None:
        options |= {"UserKnownHostsFile": quoted_path(target.known_hosts)}
    argv = ["ssh", *(("-F", "none") if host.host_key is not None else ()), "-N", "-T"]
    argv += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    argv += ["-L", f"127.0.0.1:{{port}}:127.0.0.1:{remote_port}"]
    argv += [] if port is None else ["-p", str(port)]
    argv += [] if target.jump is None else ["-J", target.jump]
    return [*argv, f"{user}@{host.host}" if user else host.host]
