"""The local Prefect server, for real: shared, quiet, on loopback only, ended with its last lease.

One database is migrated for the whole file; each test that needs a server of its own starts from a
copy of it.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.common.system.proc import network_namespace
from flows.cli.run import not_healthy
from flows.server import settings
from flows.server.local import ApiLease, LocalServerError, _listener, lease_server
from flows.server.process import NICE, LocalServer, is_leased, read_server
from flows.server.settings import (
    api_named_by_environment,
    data_folder,
    prefect_environment,
    server_environment,
    ui_url,
)
from tests.support.patience import wait_for
from tests.support.processes import runs

SETTINGS = ("PREFECT_", "RANKWISE_", "XDG_DATA_HOME")

HOLD = """
import sys
from flows.server.local import lease_server
from flows.server.process import read_server
lease = lease_server()
print(lease.url, read_server(lease.home).pid, flush=True)
sys.stdin.read()
"""

FLOW = """
from flows.server.local import prefect_api
with prefect_api() as api:
    from prefect import flow, get_run_logger, task
    @task
    def square(x): return x * x
    @flow(flow_run_name="shown-later")
    def study():
        get_run_logger().info("a line for the API")
        return square(7)
    print(study(), api.url)
"""

# Prefect imported too early, and a second use in one process: both must work from Python code.
EARLY = f"import prefect\n{FLOW}\nwith prefect_api() as api:\n    print(study(), api.url)\n"

OFFLINE = """
import fcntl, socket, struct, subprocess, sys, urllib.request
# SIOCSIFFLAGS with IFF_UP: https://man7.org/linux/man-pages/man7/netdevice.7.html
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error:
    print("no route:", error.strerror)
code = sys.stdin.read()
exec(code)
"""


def process_of(server: LocalServer) -> psutil.Process:
    return psutil.Process(server.pid)


def wait_until_gone(process: psutil.Process, folder: Path) -> None:
    """The promise: about ten seconds after the last lease nothing is left."""
    wait_for(lambda: not runs(process), "the server's end", 15)
    left = read_server(folder)
    assert left is None or not left.alive


def server_of(lease: ApiLease) -> LocalServer:
    assert lease.home is not None
    server = read_server(lease.home)
    assert server is not None
    return server


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def environment_of(data: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return {**clean, "RANKWISE_DATA": str(data), "DO_NOT_TRACK": "1"}


@contextlib.contextmanager
def holder(data: Path, code: str = HOLD, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another run that holds a lease until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment_of(data) | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(SETTINGS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect_home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def first_day(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A data folder in which a flow ran twice through a new server, and what that printed."""
    data = tmp_path_factory.mktemp("first_day")
    ran = subprocess.run([sys.executable, "-c", EARLY], env=environment_of(data), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    wait_for(lambda: not (data / "prefect" / "server.json").exists(), "the server's end", 15)
    return data, ran.stdout


@pytest.fixture
def data(first_day: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of that folder; whatever server a test leaves there is ended before the next test."""
    copy = tmp_path / "data"
    shutil.copytree(first_day[0], copy)
    monkeypatch.setenv("RANKWISE_DATA", str(copy))
    yield copy
    assert not is_leased(copy / "prefect")
    server = read_server(copy / "prefect")
    if server and server.alive:
        process = process_of(server)
        os.kill(server.pid, signal.SIGTERM)
        wait_until_gone(process, copy / "prefect")


@pytest.mark.slow
def test_a_run_waits_longer_for_a_server_that_creates_its_database(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody's first run would be recorded on a slow machine: it takes twice as long as any later one's."""
    waited: list[float] = []
    monkeypatch.setattr(ApiLease, "wait_until_healthy", lambda _, seconds: waited.append(seconds))
    for folder in (tmp_path / "new", data):
        monkeypatch.setenv("RANKWISE_DATA", str(folder))
        with lease_server() as lease:
            process = process_of(server_of(lease))
            assert not_healthy(lease) is None
        process.kill()
    assert waited == [90.0, 15.0]


def test_a_server_is_shared_quiet_and_local_and_remembers(data: Path, first_day: tuple[Path, str]) -> None:
    printed = first_day[1].splitlines()
    assert [line.startswith("49 http://127.0.0.1:") for line in printed] == [True, True]
    with lease_server() as lease:
        server = server_of(lease)
        with holder(data, "from flows.server.local import serve_ui; serve_ui()") as ui:
            assert ui.stdout is not None
            assert ui.stdout.readline() == f"Prefect UI: {lease.ui}\n"
            assert ui.poll() is None
            ui.send_signal(signal.SIGINT)
            assert ui.wait(600) == 0
        assert server_of(lease) == server
        lease.wait_until_healthy()
        # What was recorded through the server of yesterday.
        runs = post(lease.url, "/flow_runs/filter", {})
        assert [(run["name"], run["state_type"]) for run in runs] == [("shown-later", "COMPLETED")] * 2
        tasks = post(lease.url, "/task_runs/filter", {})
        assert {task["flow_run_id"] for task in tasks} == {run["id"] for run in runs}
        assert [task["state_type"] for task in tasks] == ["COMPLETED"] * 2
        assert "a line for the API" in {line["message"] for line in post(lease.url, "/logs/filter", {})}

        process = process_of(server)
        assert process.children() == []
        assert {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()} == {max(NICE, os.nice(0))}
        sockets = process.net_connections("inet")
        listening = {s.laddr for s in sockets if s.status == psutil.CONN_LISTEN}
        assert listening == {("127.0.0.1", server.port)}
        assert {s.raddr[0] for s in sockets if s.raddr} <= {"127.0.0.1"}
        with urllib.request.urlopen(urllib.request.Request(lease.ui, headers={"Accept": "text/html"})) as page:
            assert b"<html" in page.read().lower()
    wait_until_gone(process, data / "prefect")


def test_two_that_begin_at_once_get_one_server_and_their_death_ends_it(data: Path) -> None:
    soon = {"RANKWISE_SERVER_LINGER": "0.5"}
    with holder(data, **soon) as one, holder(data, **soon) as other:
        assert one.stdout is not None and other.stdout is not None
        said = one.stdout.readline()
        assert said == other.stdout.readline()
        server = read_server(data / "prefect")
        assert server is not None and f"{server.url} {server.pid}\n" == said
        process = process_of(server)
        one.send_signal(signal.SIGKILL)
        one.wait()
        time.sleep(2)
        assert server.alive
        other.send_signal(signal.SIGKILL)
        other.wait()
        wait_until_gone(process, data / "prefect")


def test_a_server_stays_as_long_as_it_was_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_SERVER_LINGER", "60")
    with lease_server() as lease:
        server = server_of(lease)
    time.sleep(4.5)
    with lease_server() as later:
        assert server_of(later) == server and server.alive


@pytest.mark.parametrize("given", ["soon", "-1", "inf", "nan"])
def test_a_time_to_stay_that_is_none_is_named(given: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_SERVER_LINGER", given)
    with pytest.raises(LocalServerError, match=f"^RANKWISE_SERVER_LINGER: got '{given}', expected seconds"):
        lease_server()


def test_a_server_stays_for_a_run_that_is_about_to_take_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_SERVER_LINGER", "0.5")
    lease = lease_server()
    server = server_of(lease)
    with (data / "prefect" / "server.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lease.close()
        time.sleep(2)
    with lease_server() as later:
        assert server_of(later) == server
        time.sleep(1)
        assert server.alive


@pytest.mark.slow
def test_a_server_whose_folder_was_removed_ends(data: Path) -> None:
    """No run can find it, or end it: it would stay until the machine is switched off."""
    with lease_server() as lease:
        lease.wait_until_healthy()
        server = read_server(data_folder())
        assert server is not None
        shutil.rmtree(data)
    wait_for(lambda: not server.alive, "the end of a server without a folder", 60)
    (data / "prefect").mkdir(parents=True)


def test_what_is_left_of_a_dead_or_older_server_is_replaced(data: Path) -> None:
    folder = data / "prefect"
    dead = LocalServer("", network_namespace(), 1, 0, 1, "http://127.0.0.1:1/api", "", "3.0.0")
    here = os.uname().nodename
    for stale in (json.dumps({**vars(dead), "host": here}), json.dumps(vars(dead)), "{", '{"pid": 1}'):
        (folder / "server.json").write_text(stale)
        with lease_server() as lease:
            assert lease.url != dead.url
            server = server_of(lease)
            assert server.alive
            # While somebody uses it, a server of another version is shared rather than ended.
            (folder / "server.json").write_text(json.dumps({**vars(server), "version": "3.0.0"}))
            with lease_server() as second:
                assert server_of(second).pid == server.pid
        with lease_server() as lease:
            old, server = server, server_of(lease)
            assert (old.pid == server.pid, old.alive) == (False, False)
        process = process_of(server)
        os.kill(server.pid, signal.SIGTERM)
        wait_until_gone(process, folder)


def test_a_server_in_use_on_another_machine_is_refused(data: Path) -> None:
    folder = data / "prefect"
    (folder / "server.json").write_text(
        json.dumps(vars(LocalServer("elsewhere", network_namespace(), 1, 0, 1, "http://x/api", "", "3.0.0")))
    )
    with (folder / "lease.lock").open("a") as lease:
        fcntl.flock(lease, fcntl.LOCK_SH)
        with pytest.raises(LocalServerError, match=r"elsewhere.*RANKWISE_DATA"):
            lease_server()
    (folder / "server.json").unlink()


def test_a_server_of_another_network_namespace_is_not_joined(data: Path) -> None:
    """Its URL may even answer here: then it is another server."""
    with lease_server() as lease:
        server = server_of(lease)
        (data / "prefect" / "server.json").write_text(json.dumps({**vars(server), "network": "net:[1]"}))
        with pytest.raises(LocalServerError, match=r"another network namespace.*RANKWISE_DATA"):
            lease_server()
    with lease_server() as lease:
        assert server_of(lease).network == network_namespace() and server_of(lease).pid != server.pid
        assert not server.alive


def test_a_server_that_was_killed_is_told_and_replaced_by_the_next_run(data: Path) -> None:
    with lease_server() as lease:
        server = server_of(lease)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(LocalServerError, match=r"has ended(.|\n)*server\.log"):
            lease.wait_until_healthy()
        assert begin_again(lease) != server.pid


def begin_again(lease: ApiLease) -> int:
    with lease_server() as second:
        assert second.home == lease.home
        return server_of(second).pid


def test_a_server_that_cannot_start_says_why(data: Path) -> None:
    (data / "prefect" / "prefect.db").write_bytes(b"not a database" * 100)
    for journal in (data / "prefect").glob("prefect.db-*"):
        journal.unlink()
    with lease_server() as lease, pytest.raises(LocalServerError, match=r"server\.log(.|\n)*file is not a database"):
        lease.wait_until_healthy()


def test_a_data_folder_whose_path_no_database_takes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database lay beside the folder, under the part of its path before the question mark."""
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "what?" / "data"))
    with pytest.raises(LocalServerError, match=r"what\?/data/prefect: SQLite's URL takes no question mark"):
        lease_server()
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "file"))
    with pytest.raises(LocalServerError, match=r"file/prefect: .*RANKWISE_DATA .*PREFECT_API_URL"):
        lease_server()


@pytest.mark.slow
def test_works_without_any_network(data: Path) -> None:
    """As root in a network namespace of its own; else in one that a user namespace allows.

    Where neither is allowed, every way out is closed by a proxy that refuses.
    """
    routes = [["unshare", "--net"], ["unshare", "--map-root-user", "--net"]]
    allowed = [route for route in routes if subprocess.run([*route, "true"], capture_output=True).returncode == 0]
    environment = environment_of(data)
    if allowed:
        command = [*allowed[0], sys.executable, "-c", OFFLINE]
    else:
        command = [sys.executable, "-c", "import sys; print('no route: proxied'); exec(sys.stdin.read())"]
        environment |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    ran = subprocess.run(command, input=FLOW, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    route, result = ran.stdout.splitlines()
    assert route.startswith("no route:")
    assert result.startswith("49 http://127.0.0.1:")
    assert ran.stderr == ""


def test_an_api_named_in_a_file_is_found_as_prefect_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        ".env": "# mine\nexport PREFECT_API_URL='http://dotenv:1/api'\n",
        "prefect.toml": '[api]\nurl = "http://prefect-toml:1/api"\n',
        "pyproject.toml": '[tool.prefect.api]\nurl = "http://pyproject:1/api"\n',
        "home/profiles.toml": 'active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://profile:1/api"\n',
    }
    monkeypatch.setenv("PREFECT_HOME", "home")
    found = []
    for position, (file, text) in enumerate(files.items()):
        project = tmp_path / str(position)
        (project / "home").mkdir(parents=True)
        monkeypatch.chdir(project)
        assert api_named_by_environment() is None
        (project / file).write_text(text)
        found.append(api_named_by_environment())
    assert found == [f"http://{name}:1/api" for name in ("dotenv", "prefect-toml", "pyproject", "profile")]
    ask = (
        "import os; from prefect.settings import Settings\n"
        "for n in '0123': os.chdir(f'../{n}'); print(Settings().api.url)"
    )
    environment = {**os.environ, "DO_NOT_TRACK": "1"}
    asked = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True)
    assert asked.stdout.split() == found, asked.stderr


def test_an_empty_api_in_a_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line was taken for it, and a token there was printed as an address; of two lines the first counted."""
    texts = {
        "PREFECT_API_URL=\nHF_TOKEN=hf_secret\n": None,
        "PREFECT_API_URL=http://first:1/api\nPREFECT_API_URL = http://last:1/api # mine\n": "http://last:1/api",
        "PREFECT_API_URL=http://first:1/api\nPREFECT_API_URL=\n": None,
    }
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ask = "from prefect.settings import Settings; from pathlib import Path\nfor text in {!r}:\n"
    ask += "    Path('.env').write_text(text); print(Settings().api.url or None)"
    environment = {**os.environ, "DO_NOT_TRACK": "1"}
    asked = subprocess.run(
        [sys.executable, "-c", ask.format(list(texts))], env=environment, capture_output=True, text=True
    )
    assert asked.stdout.split() == [str(url) for url in texts.values()], asked.stderr
    for text, url in texts.items():
        Path(".env").write_text(text)
        assert api_named_by_environment() == url


def test_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = tmp_path / "prefect_home" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.write_text(
        'active = "ephemeral"\n[profiles.ephemeral]\nPREFECT_SERVER_EPHEMERAL_ENABLED = "true"\n'
        '[profiles.lab]\nPREFECT_API_URL = "http://lab/api"\n'
    )
    assert api_named_by_environment() is None
    monkeypatch.setenv("PREFECT_PROFILE", "lab")
    assert api_named_by_environment() == "http://lab/api"
    profiles.write_text("active = ")
    with pytest.raises(ValueError, match=r"profiles\.toml: not valid TOML"):
        api_named_by_environment()


def test_a_named_api_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PREFECT_API_URL", "http://named:1/api")
    with lease_server() as lease:
        lease.wait_until_healthy()
        assert (lease.url, lease.ui, lease.home) == ("http://named:1/api", "http://named:1", None)
        assert "PREFECT_HOME" not in lease.environment
    assert not (tmp_path / "data").exists()


def test_each_data_folder_has_a_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose server has ended comes upon no server of another folder there, whichever variable names it."""
    monkeypatch.delenv("RANKWISE_DATA", raising=False)
    for variable in ("XDG_DATA_HOME", "RANKWISE_DATA"):
        ports = set()
        for name in ("a", "b"):
            monkeypatch.setenv(variable, str(tmp_path / name))
            with _listener(data_folder()) as listener:
                ports.add(listener.getsockname()[1])
        assert len(ports) == 2


def test_our_own_url_in_the_environment_names_no_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in prefect_environment("http://127.0.0.1:5/api", tmp_path).items():
        monkeypatch.setenv(name, value)
    assert api_named_by_environment() is None


@pytest.mark.parametrize(
    ("url", "kept_off"),
    [
        ("http://127.0.0.1:4200/api", "intranet,127.0.0.1,localhost"),
        ("http://localhost:4200/api", "intranet,127.0.0.1,localhost"),
        ("http://[::1]:4200/api", "intranet,127.0.0.1,localhost,::1"),
        ("https://prefect.example.org/api", None),
    ],
)
def test_a_named_api_on_loopback_is_not_reached_by_a_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, kept_off: str | None
) -> None:
    monkeypatch.setenv("no_proxy", "intranet")
    environment = prefect_environment(url)
    assert environment.get("no_proxy") == environment.get("NO_PROXY") == kept_off


def test_a_profile_in_another_users_home_names_no_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image whose HOME is root's, started as another user, no run began, whatever folders were named."""

    def refused(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(settings, "read_text", refused)
    with pytest.raises(PermissionError):  # the user's own file, which may name an API
        api_named_by_environment()
    monkeypatch.setattr(settings.os, "access", lambda path, mode: False)
    assert api_named_by_environment() is None


@pytest.mark.parametrize("named", ["*", "intranet, *"])
def test_who_wants_no_proxy_at_all_has_none(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`NO_PROXY=*` with further hosts is no host's name to urllib, requests and botocore: they took the proxy again."""
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", named)
    for name, value in prefect_environment("http://127.0.0.1:4200/api").items():
        monkeypatch.setenv(name, value)
    assert urllib.request.proxy_bypass("huggingface.co") and urllib.request.proxy_bypass("127.0.0.1")


def test_the_servers_environment_has_nothing_of_the_users_prefect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://elsewhere/db")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    monkeypatch.setenv("no_proxy", "intranet,localhost")
    environment = server_environment("http://127.0.0.1:5/api", tmp_path)
    assert environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    assert "secret" not in " ".join(environment.values())
    assert environment["NO_PROXY"] == environment["no_proxy"] == "intranet,localhost,127.0.0.1"
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".local/share/rankwise/prefect"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert data_folder() == tmp_path / ".local/share/rankwise/prefect"
    monkeypatch.setenv("XDG_DATA_HOME", "/elsewhere")
    assert data_folder() == Path("/elsewhere/rankwise/prefect")
    monkeypatch.setenv("RANKWISE_DATA", "here")
    assert data_folder() == tmp_path / "here/prefect"


def test_ui_url() -> None:
    assert ui_url("http://127.0.0.1:4200/api/") == "http://127.0.0.1:4200"
    assert ui_url("https://me:secret@host/api") == "https://host"
    cloud = "https://api.prefect.cloud/api/accounts/a/workspaces/w"
    assert ui_url(cloud) == "https://app.prefect.cloud/account/a/workspace/w"


def test_a_priority_is_lowered_and_never_raised() -> None:
    """Raising it takes a privilege: under `nice -n 19 rankwise run` the server of another user than root ended."""
    program = "import os; from flows.server.process import lower_priority; {}; lower_priority(); print(os.nice(0))"
    for earlier, expected in (("os.nice(0)", max(NICE, os.nice(0))), ("os.nice(19)", 19)):
        command = [sys.executable, "-c", program.format(earlier)]
        # a session of its own: its priority is lowered too
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
        assert done.stdout == f"{expected}\n", done.stderr
