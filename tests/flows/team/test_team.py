"""The team's set-up, for real: supervisord, server, Prefect worker and flow runs, on SQLite and on PostgreSQL."""

import base64
import errno
import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli.server.team import app
from flows.team.api import Api
from flows.team.processes import processes_of, programs, supervisord_of
from flows.team.setup import DATABASE_VARIABLE, FOLDER_VARIABLE, TeamSetup
from flows.team.up import register, start_team
from tests.support.patience import patient
from tests.support.run_folders.studies import wait_until

UP = "deployment nightly:"
PASSWORD = "not-for-others"
TEAM = [sys.executable, "-c", "from flows.cli.server.team import app; app(prog_name='rankwise team')"]

FLOWS = """
import os, subprocess, time
from prefect import flow

@flow
def brief():
    return os.getcwd()

@flow
def lasting():
    launch = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan = subprocess.Popen(["sleep", "1001"], start_new_session=True)
    open("begun", "w").write(str(os.nice(0)))
    try:
        time.sleep(1000)
    finally:
        launch.terminate()
        launch.wait()
        open("ended", "w").write(",".join(name for name in os.environ if name.startswith("PREFECT_SERVER_")))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _opened(request: urllib.request.Request, tries: int = 5) -> Any:
    """The answer; 503, which a locked SQLite gives, is asked again as Prefect's own client does."""
    for _ in range(tries - 1):
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            error.close()
            time.sleep(1)
    return urllib.request.urlopen(request, timeout=600)


@dataclass
class Team:
    """A set-up in a folder of its own, used as a person would: through the command line and the API."""

    folder: Path
    port: int = field(default_factory=free_port)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def _command(self, command: str, *options: str) -> dict[str, Any]:
        arguments = [*TEAM, command, "--folder", str(self.folder), *options]
        environment = os.environ | {"DO_NOT_TRACK": "1", "COLUMNS": "200"} | self.environment
        return {"args": arguments, "env": environment, "cwd": self.folder.parent, "text": True}

    def say(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(**self._command(command, *options), capture_output=True, timeout=300)

    @contextmanager
    def foreground(self, *options: str) -> Iterator["subprocess.Popen[str]"]:
        with subprocess.Popen(
            **self._command("up", *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                yield process
            finally:
                process.terminate()

    def ask(self, path: str, body: dict[str, Any] | None = None, user: str = f"team:{PASSWORD}") -> Any:
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Basic {base64.b64encode(user.encode()).decode()}",
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with _opened(request) as answer:
            return json.load(answer)

    def run(self, name: str) -> str:
        """A flow run of one of the flows above, through a deployment. Returns its id."""
        (self.folder / "work" / "team_flows.py").write_text(FLOWS)
        flow = self.ask("/flows/", {"name": name})["id"]
        deployment = {
            "name": name,
            "flow_id": flow,
            "work_pool_name": "rankwise",
            "entrypoint": f"team_flows.py:{name}",
            "path": str(self.folder / "work"),
            "job_variables": {"working_dir": str(self.folder / "work")},
        }
        identifier = self.ask("/deployments/", deployment)["id"]
        created: str = self.ask(f"/deployments/{identifier}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
        return created

    def state(self, run: str) -> str:
        told: str = self.ask(f"/flow_runs/{run}")["state_type"]
        return told

    def completes(self, name: str) -> None:
        run = self.run(name)
        wait_until(lambda: self.state(run) == "COMPLETED", 120, f"{name} to complete")

    def assert_gone(self) -> None:
        wait_until(lambda: not processes_of(self.folder), 30, "the end of all processes")
        assert not (self.folder / "team.json").exists()


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    """A folder for a set-up; whatever a test leaves running there is ended."""
    made = Team(tmp_path / "team")
    yield made
    for process in processes_of(made.folder):
        process.kill()


class Postgres:
    """A PostgreSQL server of our own, which refuses to run as root and so runs as nobody there."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._binaries = binaries
        self._as: list[str] = []
        (folder / "password").write_text(PASSWORD)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
            for path in (folder, folder / "password"):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        self.process: subprocess.Popen[bytes] | None = None
        self._tool("initdb", "-D", "data", "-U", "postgres", "-A", "scram-sha-256", "--pwfile=password", "--no-sync")

    def start(self) -> None:
        where = ["-D", "data", "-k", str(self.folder), "-p", str(self.port), "-c", "fsync=off"]
        with (self.folder / "log").open("wb") as log:
            command = [*self._as, str(self._binaries / "postgres"), *where]
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        wait_until(self._ready, 60, "PostgreSQL")
        # As docs/how-to/prefect.md says: an ordinary role that owns the database.
        self._tool("psql", *self._as_admin("-d", "postgres"), "-c", f"create role rankwise login password '{PASSWORD}'")
        self._tool("createdb", *self._as_admin("--owner", "rankwise", "prefect"))

    def _as_admin(self, *arguments: str) -> list[str]:
        return ["-h", str(self.folder), "-p", str(self.port), "-U", "postgres", *arguments]

    def url(self, database: str) -> str:
        return f"postgresql://rankwise:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def flow_runs(self) -> set[str]:
        query = "select name || ' ' || state_type from flow_run"
        return set(self._tool("psql", *self._as_admin("-d", "prefect"), "-Atc", query).split("\n"))

    def close(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(600)

    def _ready(self) -> bool:
        asked = subprocess.run([self._binaries / "pg_isready", "-q", "-h", str(self.folder), "-p", str(self.port)])
        return asked.returncode == 0

    def _tool(self, name: str, *arguments: str) -> str:
        command = [*self._as, str(self._binaries / name), *arguments]
        environment = {"PATH": os.defpath, "PGPASSWORD": PASSWORD, "LC_ALL": "C"}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    binary = found[-1] if found else shutil.which("initdb")
    if binary is None:
        pytest.skip("PostgreSQL is not installed")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no setpriv")
    # Not below pytest's folder, into which only root may look.
    with tempfile.TemporaryDirectory(prefix="rankwise-postgres-") as folder:
        server = Postgres(Path(binary).resolve().parent, Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.close()


def everything_said(folder: Path) -> str:
    """What others could read: command lines, and the files of the set-up that hold text."""
    lines = [" ".join(process.cmdline()) for process in processes_of(folder)]
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(folder / "prefect")]
    return "\n".join([*lines, *(path.read_text(errors="replace") for path in files)])


@pytest.mark.slow
def test_up_serves_survives_and_goes_down_without_a_trace(team: Team) -> None:
    team.environment = {"PREFECT_SERVER_API_AUTH_STRING": f"team:{PASSWORD}"}
    options = ("--port", str(team.port), "--background", "--workers", "2")
    up = team.say("up", *options)
    assert up.returncode == 0, up.stdout + up.stderr
    assert f"UI         http://127.0.0.1:{team.port}\n" in up.stdout
    assert f"the worker {socket.gethostname()} is online" in up.stdout
    status = team.say("status")
    assert status.returncode == 0, status.stdout
    assert "responding" in status.stdout and "online" in status.stdout and "schedules on" in status.stdout
    again = team.say("up", *options)
    assert (again.returncode, again.stdout.partition(":")[0]) == (0, "already up")
    assert UP in again.stdout, "flows are registered again: they may be newer"

    with pytest.raises(urllib.error.HTTPError, match="401"):
        team.ask("/deployments/filter", {}, user="team:guess")
    assert PASSWORD not in everything_said(team.folder)
    assert (team.folder / "supervisord.conf").stat().st_mode & 0o077 == 0

    before = programs(team.folder / "supervisor.sock")
    assert before is not None
    assert {psutil.Process(program.pid).nice() for program in before.values()} == {0}
    os.kill(before["server"].pid, signal.SIGKILL)
    wait_until(lambda: server_pid(team) not in (0, before["server"].pid), 60, "a new server")
    wait_until(Api(team.url, own=True, environment={}).answers, 90, "its answer")
    team.completes("brief")
    assert programs(team.folder / "supervisor.sock")["worker"].pid == before["worker"].pid  # type: ignore[index]

    a_second_worker_elsewhere(team)

    run = team.run("lasting")
    begun, ended = team.folder / "work" / "begun", team.folder / "work" / "ended"
    wait_until(lambda: begun.exists() and begun.read_text(), 60, "the flow run")
    assert begun.read_text() == "0"  # a measured cell at nice 19 would measure something else
    started = time.monotonic()
    down = team.say("down")
    assert (down.returncode, down.stdout) == (0, f"{team.folder}: stopped\n")
    assert time.monotonic() - started < patient(30)
    assert ended.read_text() in ("", "PREFECT_SERVER_EPHEMERAL_ENABLED")
    team.assert_gone()
    with sqlite3.connect(team.folder / "prefect" / "prefect.db") as database:
        (state,) = database.execute("select state_type from flow_run where id = ?", (run,)).fetchone()
    database.close()
    assert state == "CRASHED"
    assert team.say("status").returncode == 1
    assert team.say("down").stdout == f"{team.folder}: not running\n"


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """What a process prints, to the line with these words."""
    assert process.stdout is not None
    told = ""
    while words not in told:
        line = process.stdout.readline()
        assert line, told
        told += line
    return told


def server_pid(team: Team) -> int:
    told = programs(team.folder / "supervisor.sock")
    return told["server"].pid if told else 0


def a_second_worker_elsewhere(team: Team) -> None:
    """Only a worker, for the server of the first; SIGTERM ends it, and nothing of the first."""
    other = Team(team.folder.parent / "other", environment={"PREFECT_API_AUTH_STRING": f"team:{PASSWORD}"})
    with other.foreground("--api", team.url) as process:
        told = read_until(process, UP)
        process.terminate()
        assert process.stdout is not None
        told += process.stdout.read()
        assert process.wait(600) == 0, told
    assert "database   elsewhere" in told
    assert told.endswith("stopped: server, worker and their flow runs\n")
    assert PASSWORD not in everything_said(other.folder)
    assert "program:server" not in (other.folder / "supervisord.conf").read_text()
    other.assert_gone()
    assert team.say("status").returncode == 0


@pytest.mark.nightly
def test_on_postgresql_and_without_supervisord_nothing_goes_on(team: Team, postgres: Postgres) -> None:
    team.environment = {DATABASE_VARIABLE: postgres.url("prefect")}
    with team.foreground("--port", str(team.port)) as process:
        told = read_until(process, UP)
        assert f"database   postgresql, prefect on 127.0.0.1:{postgres.port}\n" in told
        team.completes("brief")
        assert PASSWORD not in everything_said(team.folder)
        assert not (team.folder / "prefect" / "prefect.db").exists()
        assert {line.split()[-1] for line in postgres.flow_runs() if line} == {"COMPLETED"}
        supervisord = supervisord_of(team.folder)
        assert supervisord is not None
        left = processes_of(team.folder)
        supervisord.kill()
        assert process.wait(600) == 1
        assert process.stdout is not None
        assert "supervisord ended with status -9" in process.stdout.read()
    assert not psutil.wait_procs(left, 20)[1]
    team.assert_gone()


@pytest.mark.slow
def test_a_database_that_is_not_there_is_told(team: Team, postgres: Postgres) -> None:
    team.environment = {DATABASE_VARIABLE: postgres.url("nowhere")}
    up = team.say("up", "--port", str(team.port), "--background")
    assert up.returncode == 1
    assert f"the server failed to start; its database: postgresql, nowhere on 127.0.0.1:{postgres.port}" in up.stderr
    assert 'database "nowhere" does not exist' in up.stderr
    assert "Traceback (" not in up.stderr and PASSWORD not in up.stderr
    team.assert_gone()


def test_a_port_in_use_is_told(team: Team) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = team.say("up", "--port", str(port), "--background")
    assert up.returncode == 1
    assert up.stderr.startswith(f"127.0.0.1:{port}: cannot listen") and "--port" in up.stderr
    team.assert_gone()


def test_flows_that_cannot_be_registered_are_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    setup = TeamSetup(tmp_path / "our team")
    setup.prepare()
    monkeypatch.setattr("flows.team.up.DEPLOY", [sys.executable, "-c", "import sys; sys.exit('the pool is broken')"])
    assert not register(setup, setup.environment())
    told = capfd.readouterr().err
    assert told.startswith("FLOWS NOT REGISTERED; server and worker are running")
    assert "the pool is broken" in told and f"rankwise deploy-flows --folder '{setup.work}'`" in told


def test_registering_that_does_not_end_is_ended_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    setup = TeamSetup(tmp_path)
    setup.prepare()
    hangs = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    monkeypatch.setattr("flows.team.up.DEPLOY", [sys.executable, "-c", hangs])
    monkeypatch.setattr("flows.team.up._DEPLOY_SECONDS", 3.0)
    assert not register(setup, setup.environment())
    assert "not registered within 3 s: ended" in capfd.readouterr().err
    child = int((setup.logs / "deploy.log").read_text().split()[0])
    wait_until(lambda: not psutil.pid_exists(child), 10, "the end of what it had started")


def test_a_folder_is_the_same_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`team down --folder /data/team` found nothing of what `team up --folder ../team` had started."""
    asked: list[Path] = []

    def end_team(folder: Path) -> int:
        asked.append(folder)
        return 0

    monkeypatch.setattr("flows.team.up.end_team", end_team)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for written in ("../team", "../elsewhere/../team/", str(tmp_path / "team")):
        assert CliRunner().invoke(app, ["down", "--folder", written]).exit_code == 0
    monkeypatch.setenv("RANKWISE_DATA", "..")
    assert CliRunner().invoke(app, ["down"]).exit_code == 0
    assert asked == [tmp_path / "team"] * 4


def test_processes_are_found_by_any_path_of_their_folder(tmp_path: Path) -> None:
    """Of a home folder that is a link, the shell and the working directory say different ones."""
    (tmp_path / "team").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    environment = os.environ | {FOLDER_VARIABLE: str(tmp_path / "team")}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            for folder in (tmp_path / "link" / "team", tmp_path / "team"):
                assert [found.pid for found in processes_of(folder)] == [process.pid]
            assert processes_of(tmp_path / "other") == []
        finally:
            process.kill()


def test_what_cannot_be_right_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"visible to all users.*{DATABASE_VARIABLE}"):
        TeamSetup(tmp_path, database=f"postgresql://a:{PASSWORD}@h/d").environment()
    with pytest.raises(ValueError, match=r"got mysql, expected postgresql://"):
        TeamSetup(tmp_path, database="mysql://h/d").environment()
    with pytest.raises(ValueError, match="too long for a socket path"):
        TeamSetup(tmp_path / ("x" * 100)).prepare()
    (tmp_path / "team.json").write_text('{"host": "elsewhere", "url": "http://h/api", "own": true}')
    told = Team(tmp_path).say("status")
    assert told.returncode == 1 and "in use by the set-up on elsewhere" in told.stderr


def test_a_folder_without_locks_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"this file system has no locks .* use a --folder of another one"):
        start_team(TeamSetup(tmp_path))


def test_a_folder_whose_path_no_database_takes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--folder: t\?: SQLite's URL takes no question mark"):
        TeamSetup(Path("t?")).prepare()
    assert list(tmp_path.iterdir()) == []


def test_a_proxy_that_no_flow_run_could_be_started_with_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flow run failed in Prefect's own program, before it began."""
    monkeypatch.setenv("all_proxy", "socks://proxy:1080")
    with pytest.raises(ValueError, match=r"ALL_PROXY, https_proxy or NO_PROXY: .*Unknown scheme .*pip install socksio"):
        TeamSetup(tmp_path / "t").prepare()
    assert not (tmp_path / "t").exists()


def test_the_environment_is_the_users_but_for_what_is_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PREFECT_API_URL": "http://mine/api",
        "PREFECT_API_KEY": "key",
        "PREFECT_PROFILE": "mine",
        "PREFECT_SERVER_UI_API_URL": "https://proxy/api",
        "PREFECT_SERVER_API_AUTH_STRING": "a:b",
    }.items():
        monkeypatch.setenv(name, value)
    own = TeamSetup(tmp_path, host="0.0.0.0", port=5000, database="postgres://u@h:1/d").environment()
    assert own["PREFECT_API_URL"] == "http://127.0.0.1:5000/api"
    assert own[DATABASE_VARIABLE] == "postgresql+asyncpg://u@h:1/d"
    assert own["PREFECT_SERVER_UI_API_URL"] == "https://proxy/api"
    assert own["PREFECT_API_AUTH_STRING"] == "a:b"
    assert own["PREFECT_SERVER_API_HOST"] == "0.0.0.0"
    assert not {"PREFECT_API_KEY", "PREFECT_PROFILE"} & own.keys()
    assert not [name for name in own if name.startswith("PREFECT_SERVER_SERVICES_")]  # all services are on
    elsewhere = TeamSetup(tmp_path, api="https://team/api").environment()
    assert (elsewhere["PREFECT_API_URL"], elsewhere["PREFECT_API_KEY"]) == ("https://team/api", "key")
    assert "PREFECT_SERVER_API_HOST" not in elsewhere
    monkeypatch.setenv("no_proxy", "intranet")
    tunnel = TeamSetup(tmp_path, api="http://127.0.0.1:4200/api").environment()
    assert tunnel["no_proxy"] == tunnel["NO_PROXY"] == "intranet,127.0.0.1,localhost"


def test_an_api_behind_a_tunnel_is_not_asked_by_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        answers = threading.Thread(target=_say_healthy, args=(tunnel,), daemon=True)
        answers.start()
        assert Api(f"http://127.0.0.1:{tunnel.getsockname()[1]}/api", own=False, environment={}).answers()


def _say_healthy(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ntrue")
