"""A team's Prefect server and Prefect worker, real processes, where possible on a network without any route.

As root they live in a network namespace that has loopback and nothing else, and `inside()` brings the test
there too: what works in these tests works offline. Without root they share the machine's loopback.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tests.support.patience import patient
from tests.support.run_folders.studies import RANKWISE, wait_until
from tests.support.servers.migrated_database import put_database

_CLONE_NEWNET = 0x40000000
START_SECONDS = 120.0
PREFECT = [sys.executable, "-m", "prefect"]
PROGRAMS = [sys.executable, "-m", "flows.team.programs"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class OfflineTeam:
    """Server, worker and the folder in which flow runs work. `close` ends everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self._namespace = _namespace()
        self.offline = self._namespace is not None
        self.port = 4200 if self.offline else free_port()
        self.ui = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.ui}/api"
        self.database = folder / "prefect.db"
        put_database(self.database)
        # Other tests of this process may have set what the hub's client reads.
        mine = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.environment = mine | {
            "PREFECT_API_URL": self.url,
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{self.database}",
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(folder / "ui"),
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
            "PREFECT_CLI_COLORS": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "3",
            "RANKWISE_CACHE": str(folder / "cache"),
            # A server that a run starts on this network is not one for the tests outside.
            "RANKWISE_DATA": str(folder / "data"),
        }
        self._open = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and what it starts, on the team's network."""
        if self._namespace is None:
            yield
            return
        with open("/proc/thread-self/ns/net") as outside, open(f"/proc/{self._namespace.pid}/ns/net") as within:
            _enter(within.fileno())
            try:
                yield
            finally:
                _enter(outside.fileno())

    def start(self, name: str, *command: str, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a process of the team; its output goes to `<name>.log`. Call it `inside`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[name] = process
        return process

    def start_server(self) -> None:
        """Start the server and return when it answers."""
        server = self.start("server", *PROGRAMS, "server", "127.0.0.1", str(self.port))

        def answers() -> bool:
            assert server.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            with suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
            return False

        wait_until(answers, START_SECONDS, "the Prefect server")

    def start_worker(self) -> None:
        """Register the flows and start a Prefect worker; return when it is online."""
        self.rankwise("deploy-flows", "--folder", str(self.work))
        self.start("worker", *self.worker_command())

        def online() -> bool:
            return any(worker.status == "ONLINE" for worker in self.client.read_workers_for_work_pool("rankwise"))

        wait_until(online, START_SECONDS, "the Prefect worker")

    @staticmethod
    def worker_command() -> list[str]:
        """What starts a Prefect worker of the pool, for `start`."""
        return [*PREFECT, "worker", "start", "--pool", "rankwise", "--type", "process", "--name", "w"]

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a process of the team, with all that it started if it does not end by itself."""
        process = self._processes.pop(name)
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(600)

    def rankwise(self, *arguments: str, **environment: str) -> str:
        """Run the command line; it must succeed. Returns its output."""
        done = subprocess.run(
            [RANKWISE, *arguments],
            cwd=self.work,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @cached_property
    def client(self) -> SyncPrefectClient:
        """A client of the server, for `inside`. Patient: beside other tests SQLite has been locked for six tries."""
        self._open.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 20}))
        return self._open.enter_context(SyncPrefectClient(self.url))

    def flow_run(self, identifier: UUID) -> FlowRun:
        return self.client.read_flow_run(identifier)

    def state(self, identifier: UUID) -> str:
        """Name of the flow run's state type, such as `RUNNING`."""
        state = self.flow_run(identifier).state
        return state.type.value if state else "NONE"

    def run_form(self, study: dict[str, Any], **parameters: Any) -> UUID:
        """Start a run of the form's deployment, as the UI does."""
        deployment = self.client.read_deployment_by_name("study from the form/form")
        parameters = {"study": study, "runs": "runs", **parameters}
        return self.client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id

    def wait_for(self, identifier: UUID, *states: str, seconds: float = 120.0) -> str:
        """Return the state when the run is in one of these."""
        deadline = time.monotonic() + patient(seconds)
        while (state := self.state(identifier)) not in states:
            assert time.monotonic() < deadline, f"{state} after {seconds} s, not {states}\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        """The end of every log of the team."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        """End everything, the worker first."""
        with self.inside():
            self._open.close()
        for name in list(reversed(self._processes)):
            self.stop(name)
        if self._namespace is not None:
            self._namespace.kill()
            self._namespace.wait()


def _namespace() -> "subprocess.Popen[bytes] | None":
    """A process that holds a network namespace in which only loopback is up; None where that is not allowed."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return None
    script = "ip link set lo up && echo up && exec sleep infinity"
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    if holder.stdout.readline() == b"up\n":
        holder.stdout.close()
        return holder
    holder.stdout.close()
    holder.wait()
    return None


def _enter(descriptor: int) -> None:
    """setns(2) for this thread; Python has it from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def form(name: str, **changes: Any) -> dict[str, Any]:
    """A filled-in form: two noop cells, once each."""
    sweep = {"kind": "sweep", "over": {"label": ["a", "b"]}}
    filled: dict[str, Any] = {
        "study": name,
        "models": [],
        "workload": {"kind": "noop", "seconds": 0.01},
        "experiments": [{"name": "grid", "question": sweep}],
        "measuring": {"repeats": 1, "memory": False, "cell_timeout_seconds": 60},
    }
    return filled | changes
