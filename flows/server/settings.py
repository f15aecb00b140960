"""Configuration of Prefect: choice of the API, and settings of clients and servers.

The user's own choice of a Prefect API comes first; `api_named_by_environment` finds it without
importing Prefect, because Prefect reads its settings (and says hello to its makers) when imported.
Without one, Rankwise runs a server of its own (`flows.server.local`) whose settings are here too.

    from flows.server.settings import api_named_by_environment
"""

import asyncio
import contextlib
import logging
import os
import queue
import re
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from configs.common.base import expanded
from configs.common.files.reading import read_text
from configs.common.secrets import holds_secret, shown_url
from configs.common.system.loopback import is_loopback

LOCAL_API_VARIABLE = "RANKWISE_LOCAL_API"
"""Set beside PREFECT_API_URL when Rankwise itself wrote that: such a URL is nobody's choice."""

LOOPBACK = "127.0.0.1"
DATABASE = "prefect.db"
"""In a server's folder."""
_CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"
_IN_DOTENV = re.compile(r"^[ \t]*(?:export[ \t]+)?PREFECT_API_URL[ \t]*=[ \t]*[\"']?([^\"'\s#]*)", re.MULTILINE)
"""Of several the last counts, and an empty one is none."""
HEARTBEAT_SECONDS = 30
"""Between two heartbeats of a flow run, of which an automation wants one in 90 s. Prefect's default is 180."""


def data_folder() -> Path:
    """Where the local server keeps database, logs and UI: `prefect` under Rankwise's data folder.

    RANKWISE_DATA names the data folder; else it is `rankwise` under XDG_DATA_HOME, ~/.local/share.
    """
    if base := os.environ.get("RANKWISE_DATA"):
        return expanded(base).absolute() / "prefect"
    return user_folder("XDG_DATA_HOME", ".local/share") / "rankwise" / "prefect"


def user_folder(variable: str, below_home: str) -> Path:
    """The folder that an XDG variable names, else its default below the home folder. Raises ValueError without one."""
    # A relative path there is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    xdg = Path(os.environ.get(variable, ""))
    if xdg.is_absolute():
        return xdg
    home = expanded("~")
    if not home.is_absolute():  # a user without an entry in passwd, as in a container
        raise ValueError("HOME: not set, and this user has no home folder. Set HOME to a folder")
    return home / below_home


def api_named_by_environment() -> str | None:
    """URL of the Prefect API that the user chose, or None.

    Looks where Prefect looks, in its order: PREFECT_API_URL, `.env`, `prefect.toml` and
    `pyproject.toml` of the working directory, the active profile. Source:
    https://docs.prefect.io/v3/concepts/settings-and-profiles
    Raises ValueError for a file that is not TOML.
    """
    url = os.environ.get("PREFECT_API_URL", "").strip()
    if url and url != os.environ.get(LOCAL_API_VARIABLE):
        return url
    dotenv = Path(".env")
    if dotenv.is_file():
        found = _IN_DOTENV.findall(read_text(dotenv))
        if found and found[-1]:
            return str(found[-1])
    in_project = _table(_toml(Path("pyproject.toml")), "tool", "prefect")
    for settings in (_toml(Path("prefect.toml")), in_project):
        if url := str(_table(settings, "api").get("url", "")).strip():
            return url
    return _api_of_profile()


def _api_of_profile() -> str | None:
    home = expanded(os.environ.get("PREFECT_HOME") or "~/.prefect")
    path = expanded(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    profiles = _toml(path)
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    # Without an active profile Prefect takes its own "ephemeral" one, which names no API.
    profile = _table(profiles, "profiles", str(active))
    return str(profile.get("PREFECT_API_URL", "")).strip() or None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError:
        if os.access(path.parent, os.X_OK):
            raise
        return {}  # HOME is another user's, as in a container whose image names root's
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML ({error}). Correct it, or set PREFECT_API_URL") from error


def _table(data: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        value = data.get(name)
        if not isinstance(value, dict):
            return {}
        data = value
    return data


def prefect_environment(url: str, home: Path | None = None) -> dict[str, str]:
    """Variables of a process that runs flows against `url`; to be set before Prefect is imported.

    `home` is the data folder of the local server, None for an API that the user named (whose
    PREFECT_HOME, keys and time limits stay as they are).
    """
    environment = {
        "PREFECT_API_URL": url,
        # Without it Prefect would start a server by itself where the API cannot be reached.
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        **_no_telemetry(),
        # The command line has a display of its own; the API gets the log.
        "PREFECT_LOGGING_LEVEL": "INFO",
        _CONSOLE_LEVEL: "CRITICAL",
        # Where the API goes away: a line of some thousand characters for each event that it does not take.
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_ENABLED": "true",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
    }
    if home is not None:
        environment |= {
            LOCAL_API_VARIABLE: url,
            "PREFECT_HOME": str(home),
        }
    return environment | _proxy_exceptions(url)


def environment_without_api() -> dict[str, str]:
    """Variables of a process that runs without any API: Prefect must not start a server of its own."""
    return {
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        **_no_telemetry(),
        _CONSOLE_LEVEL: "CRITICAL",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
    }


def server_environment(url: str, folder: Path) -> dict[str, str]:
    """The whole environment of the local server: the user's own, without settings of Prefect and secrets."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_") and not holds_secret(name, value)
    }
    return {
        **mine,
        **server_settings(url, folder),
        # Deployments, work pools, pauses and automations are not used here; each of these services
        # wakes up every few seconds. Recording of task runs and events, cancellation and the removal
        # of old events stay on.
        "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    }


def server_settings(url: str, folder: Path) -> dict[str, str]:
    """Settings of every server that Rankwise runs: the local one, and a team's (`flows.team.setup`).

    `url` is the API as clients on this machine reach it, `folder` holds all that the server keeps.
    """
    parts = urlsplit(url)
    host, port = str(parts.hostname), str(parts.port)
    origins = dict.fromkeys(f"http://{name}:{port}" for name in (host, LOOPBACK, "localhost"))
    return {
        **_no_telemetry(),
        **_no_proxy(host),
        "PREFECT_HOME": str(folder),
        "PREFECT_PROFILES_PATH": str(folder / "profiles.toml"),
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_PORT": port,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / DATABASE}",
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
        # Prefect's default is to unpack the UI into site-packages, which may be read-only.
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(folder / "ui"),
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # The default keeps the leases of concurrency limits in memory: after a restart nobody knows them, and what
        # they hold stays taken for ever. As files in PREFECT_HOME they run out as they should.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # The default `*` lets every page that the user's browser shows read and change his runs.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_COLORS": "false",
    }


def _no_telemetry() -> dict[str, str]:
    """The server's heartbeat and the client's events, see https://docs.prefect.io/v3/concepts/telemetry."""
    return {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


def _proxy_exceptions(url: str) -> dict[str, str]:
    """Variables that keep clients of an API on loopback from the proxy of the environment; none for other APIs."""
    return _no_proxy(str(urlsplit(url).hostname)) if is_loopback(url) else {}


def _no_proxy(*servers: str) -> dict[str, str]:
    """Loopback must not go through the proxy that a cluster's environment names; nor must our own servers."""
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    if "*" in hosts:  # no proxy at all: urllib, requests and botocore know the star where it stands alone
        return {"no_proxy": "*", "NO_PROXY": "*"}
    value = ",".join(dict.fromkeys([*hosts, LOOPBACK, "localhost", *servers]))
    return {"no_proxy": value, "NO_PROXY": value}


def apply_environment(environment: dict[str, str]) -> None:
    """Set the variables in this process, and have Prefect read them again if it is already imported."""
    with _CHANGING:
        if _keepers:
            for name in environment:
                _before.setdefault(name, os.environ.get(name))
        os.environ.update(environment)
    _have_prefect_read()


_CHANGING = threading.Lock()
_keepers = 0
_before: dict[str, str | None] = {}
"""What variables were before they were changed in a block of `environment_kept`; None: not set."""


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Undo at the end of the block what `apply_environment` does in it; of blocks of several threads, when all ended.

    For callers from Python: a script's own flows would go on to ask a local server that has ended with its last run.
    """
    global _keepers
    with _CHANGING:
        _keepers += 1
    try:
        yield
    finally:
        with _CHANGING:
            _keepers -= 1
            changed = {} if _keepers else dict(_before)
            for name, value in changed.items():
                del _before[name]
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        if changed:
            if _CONSOLE_LEVEL in changed:
                _let_console_speak()
            _have_prefect_read()


def _let_console_speak() -> None:
    """Let Prefect's console print lines of every level, until Prefect reads another level of it.

    Its default, 0, is none that Prefect sets again: `dictConfig` leaves out such levels where it is incremental.
    """
    for handler in logging.getLogger().handlers:
        if type(handler).__name__ == "PrefectConsoleHandler":
            handler.setLevel(logging.NOTSET)


def _have_prefect_read() -> None:
    """Have Prefect read the environment again, if it is imported."""
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context
        from prefect.logging.configuration import setup_logging

        refresh_global_settings_context()
        setup_logging(incremental=True)


def drain_prefect(timeout_seconds: float) -> None:
    """Send what Prefect's background threads of this process still keep: log lines, states of task runs.

    Prefect itself does that only when the process exits, and then without a limit: some seconds for each event that
    an API which is away does not take. What is not sent in time is dropped. Inside an event loop nothing is done.
    """
    if "prefect.events.worker" not in sys.modules:
        return
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    deadline = time.monotonic() + timeout_seconds
    for worker in (EventsWorker, APILogWorker):
        instances: list[Any] = list(worker._instances.values())  # type: ignore[misc]
        worker.drain_all(timeout=max(0.0, deadline - time.monotonic()))
        for instance in instances:
            _drop_all(instance._queue)


def _drop_all(items: "queue.Queue[Any]") -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            items.get_nowait()
    items.put_nowait(None)  # by which the worker knows the end


def ui_url(api_url: str) -> str:
    """Where a browser shows the runs of this API."""
    cloud = re.fullmatch(r"https://api\.prefect\.cloud/api/accounts/([^/]+)/workspaces/([^/]+)/?", api_url)
    if cloud:
        return f"https://app.prefect.cloud/account/{cloud[1]}/workspace/{cloud[2]}"
    return shown_url(api_url).rstrip("/").removesuffix("/api")
