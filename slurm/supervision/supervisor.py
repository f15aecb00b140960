"""Run the service of a folder until it is told to end or expires; start it again whenever it ends.

    python -m slurm.supervision.supervisor FOLDER    # FOLDER/service.json: configs.serving.deployment.SupervisedProcess

state.json says how it stands, server.log has the end of its output (at most 16 MiB), service.pid is locked while this
runs, so a folder has one supervisor. SIGTERM ends the service gracefully, a second one at once. The service ends with
its supervisor, however that ends.
"""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from configs.common.base import write_atomically
from configs.common.files.logs import cut_log
from configs.common.files.reading import read_json_object, read_model, read_tail, read_text
from configs.common.secrets import excerpt
from configs.common.system.lock_files import locks_needed
from configs.common.system.ports import free_port
from configs.common.system.proc import end_with_parent
from configs.serving.deployment import ServiceState, SupervisedProcess
from configs.serving.settings import API_KEY_VARIABLE
from slurm.launcher.node import interface_of

_SOON_SECONDS, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 30.0, 0.2, 15.0
_LOOK_SECONDS = 0.1


class Supervisor:
    """The loop over starts of one service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service = read_model(folder / "service.json", SupervisedProcess)
        self._stop = threading.Event()
        self._now = False
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._reason = 0, ""
        self._port = self._chosen_port()

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """End the service; at once where it is asked a second time."""
        self._now = self._stop.is_set()
        self._stop.set()

    def run(self) -> int:
        """Keep the service running. Returns the exit code."""
        pause = 0.0
        while not self._over():
            self._tell("waiting")
            if self._stop.wait(pause):
                break
            began = time.monotonic()
            try:
                self._start()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._process, self._reason = None, f"{self.folder}: {error.strerror}"  # until there is room again
            self._watch()
            quick = time.monotonic() - began < _SOON_SECONDS
            pause = min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS) if quick else _FIRST_PAUSE_SECONDS
        if self._expired():
            self._reason = "expired"
        self._tell("ended")
        return 0

    def give_up(self, reason: str) -> None:
        """Note why the service cannot be started any more."""
        self._reason = reason
        self._tell("ended")

    def _over(self) -> bool:
        return self._stop.is_set() or self._expired()

    def _expired(self) -> bool:
        return self.service.expires_at is not None and time.time() >= self.expires_at

    @property
    def expires_at(self) -> float:
        """The end of the service, which a file beside it may move."""
        assert self.service.expires_at is not None
        with suppress(OSError, ValueError):
            return float(read_text(self.folder / "expires_at", 64))
        return self.service.expires_at

    def _chosen_port(self) -> int:
        """Return the port of every start: the service's, that of an earlier supervisor here, else a free one."""
        if self.service.port:
            return self.service.port
        with suppress(OSError, ValueError):
            if before := read_model(self.folder / "state.json", ServiceState).port:
                return before
        return free_port()

    def _start(self) -> None:
        service, log = self.service, self.folder / "server.log"
        cut_log(log)
        environment = os.environ | service.environment
        environment.pop(API_KEY_VARIABLE, None)
        if service.own_address is not None and (interface := interface_of(service.own_address)) is not None:
            for name, value in (("GLOO", interface), ("TP", interface), ("NCCL", f"={interface}")):
                environment.setdefault(f"{name}_SOCKET_IFNAME", value)
        if service.key_file is not None:
            environment[API_KEY_VARIABLE] = read_text(self.folder / service.key_file, 4096).strip()
        if service.settings is not None:
            path = self.folder / service.settings
            write_atomically(path, json.dumps(read_json_object(path) | {"port": self._port}), mode=0o600)
        argv = [word.replace("{port}", str(self._port)) for word in service.argv]
        argv += [str(os.getpid())] if service.add_pid else []
        with log.open("ab") as out:
            try:
                self._process = subprocess.Popen(
                    argv, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    preexec_fn=None if service.add_pid else _end_with_us,
                )  # fmt: skip
            except OSError as error:
                self._process, self._reason = None, f"{argv[0]}: {error.strerror}"
        self._starts += 1
        self._tell("running")

    def _watch(self) -> None:
        """Return when the process has ended, be it by itself or because its time is over."""
        process = self._process
        if process is None:
            return
        while process.poll() is None and not self._over():
            cut_log(self.folder / "server.log")
            time.sleep(_LOOK_SECONDS)
        if process.poll() is None:
            self._end(process)
            return
        self._reason = f"exit code {process.returncode}: {self._last_line()}"

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        process.terminate()
        deadline = time.monotonic() + self.service.drain_seconds
        while process.poll() is None and time.monotonic() < deadline and not self._now:
            time.sleep(_LOOK_SECONDS)
        if process.poll() is None:
            process.terminate()  # a server that drains ends at the second
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        if process.poll() is None:
            process.kill()
        process.wait()

    def _last_line(self) -> str:
        with suppress(OSError, ValueError):
            lines = [line for line in read_tail(self.folder / "server.log", 4000).splitlines() if line.strip()]
            return excerpt(lines[-1], 300) if lines else "no message"
        return "no message"

    def _tell(self, state: str) -> None:
        running = self._process is not None and self._process.poll() is None
        told = ServiceState.model_validate(
            {
                "supervisor_pid": os.getpid(),
                "pid": self._process.pid if running and self._process else None,
                "port": self._port,
                "starts": self._starts,
                "state": state,
                "since": time.time(),
                "reason": self._reason,
            }
        )
        with suppress(OSError):  # a full disk must not end a service that runs
            write_atomically(self.folder / "state.json", told.model_dump_json())


def _end_with_us() -> None:
    end_with_parent(signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Supervise the service of a folder. Returns the exit code: 1 where another supervisor has it."""
    folder = Path(arguments[0]).resolve()
    handle = os.open(folder / "service.pid", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with locks_needed(folder, "deploy to a folder of another one"):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{folder}: another supervisor runs this service", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    with suppress(OSError):  # for people alone, and the disk may be full
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
    try:
        supervisor = Supervisor(folder)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    try:
        return supervisor.run()
    except (OSError, ValueError) as error:  # its key or its settings are gone
        supervisor.give_up(str(error))
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
