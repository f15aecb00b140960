"""A team's set-up on this machine: folders, environment, and supervisord's configuration.

Nothing secret is written to a file or put on a command line: supervisord inherits the database's URL and the
API's credentials through its environment, which only the same user (and root) can read.

    setup = TeamSetup(default_folder(), database="postgresql://rankwise@db/prefect")
    environment = setup.environment()     # raises ValueError for what cannot be right
    setup.write_configuration()
"""

import configparser
import io
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from configs.common.base import expanded
from configs.common.secrets import shown_url
from flows.server.settings import (
    DATABASE,
    LOCAL_API_VARIABLE,
    LOOPBACK,
    data_folder,
    prefect_environment,
    server_settings,
)

DATABASE_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
FOLDER_VARIABLE = "RANKWISE_TEAM_FOLDER"
"""In the environment of every process of a set-up: by it they are found, whatever became of their parents."""

POOL = "rankwise"
WORKER_STOP_SECONDS = 18
SERVER_STOP_SECONDS = 9
STOP_SECONDS = WORKER_STOP_SECONDS + SERVER_STOP_SECONDS + 1.5
TEAM_START_SECONDS = 120.0
"""Until a server must answer, with a new database, on a loaded machine."""

_LONGEST_SOCKET = 107 - len(".1234567")  # unix(7); supervisord binds a temporary name with its pid first
_WILDCARDS = ("0.0.0.0", "::", "*", "")


def default_folder() -> Path:
    """`team` in Rankwise's data folder, beside the local server's."""
    return found_folder(data_folder().parent / "team")


def unusable_proxy() -> str | None:
    """Why no client of httpx can be made in this environment, one of loopback included; None where one can.

    Prefect makes its client in each flow run's process before any of our code is there to keep it off the proxies.
    """
    import httpx  # only here: most commands of a team ask by the standard library

    try:
        httpx.Client().close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        return str(error).partition(". ")[0].rstrip(".")
    return None


def found_folder(named: Path) -> Path:
    """A set-up's folder without `..` and `~`. Links stay: machines that share deployments name one path."""
    return Path(os.path.abspath(expanded(named)))


@dataclass(frozen=True)
class TeamSetup:
    """What `rankwise team up` was told. `api` is the URL of a server elsewhere; then none is run here."""

    folder: Path
    host: str = LOOPBACK
    port: int = 4200
    database: str | None = None
    workers: int = 1
    api: str | None = None

    @property
    def home(self) -> Path:
        """PREFECT_HOME: the database unless it is elsewhere, the UI's files, leases, keys."""
        return self.folder / "prefect"

    @property
    def work(self) -> Path:
        """Where flow runs work; their runs end up in its folder `runs`."""
        return self.folder / "work"

    @property
    def logs(self) -> Path:
        """Logs of server, Prefect worker, registration and supervisord."""
        return self.folder / "logs"

    @property
    def socket(self) -> Path:
        """Through which supervisord is asked."""
        return self.folder / "supervisor.sock"

    @property
    def open_to_others(self) -> bool:
        """Whether the API can be reached from other machines."""
        return not self.api and self.host not in (LOOPBACK, "localhost", "::1")

    @property
    def url(self) -> str:
        """The API as processes of this machine reach it."""
        return self.api or _url(LOOPBACK if self.host in _WILDCARDS else self.host, self.port)

    def prepare(self) -> None:
        """Make the folders. Raises ValueError for a path that cannot be used, OSError where it cannot be written."""
        if self.api and self.api != shown_url(self.api):
            raise ValueError(
                "--api: a password on the command line is visible to all users of this machine. "
                "Set PREFECT_API_AUTH_STRING=user:password or PREFECT_API_KEY in the environment"
            )
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET:
            raise ValueError(f"--folder: {self.folder} is too long for a socket path. Use a shorter path")
        if "?" in str(self.home) and not self.api and self._database() is None:
            raise ValueError(f"--folder: {self.folder}: SQLite's URL takes no question mark. Use another path")
        if problem := unusable_proxy():
            raise ValueError(
                f"ALL_PROXY, https_proxy or NO_PROXY: Prefect's client cannot use them: {problem}. "
                "Name a proxy by http://, or unset them; for a SOCKS proxy run `pip install socksio`"
            )
        self.work.mkdir(parents=True, exist_ok=True)
        for private in (self.home, self.logs):
            private.mkdir(mode=0o700, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Environment of supervisord, server, Prefect worker and registration.

        The user's own settings of the server and of the client's ways (PREFECT_SERVER_*, PREFECT_CLIENT_*,
        time limits, certificates) win over ours; which API and which folders is decided here.
        """
        ours = prefect_environment(self.url)
        # Server and worker tell their logs what happens; only flow runs keep off the console.
        del ours["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"]
        if not self.api:
            ours = self._server() | ours
        mine = {name: value for name, value in os.environ.items() if not self._foreign(name)}
        decided = {
            "PREFECT_API_URL": self.url,
            "PREFECT_HOME": str(self.home),
            "PREFECT_PROFILES_PATH": str(self.home / "profiles.toml"),
            "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
            FOLDER_VARIABLE: str(self.folder),
        }
        if not self.api:
            decided |= {"PREFECT_SERVER_API_HOST": self.host, "PREFECT_SERVER_API_PORT": str(self.port)}
            if database := self._database():
                decided[DATABASE_VARIABLE] = database
            if password := mine.get("PREFECT_SERVER_API_AUTH_STRING"):
                # The server's own clients here must know it too.
                decided.setdefault("PREFECT_API_AUTH_STRING", password)
        # A proxy for the internet must not stand between the processes of this machine.
        decided |= {name: ours[name] for name in ("no_proxy", "NO_PROXY") if name in ours}
        return ours | mine | decided

    def database_shown(self) -> str:
        """The database for people: without a password."""
        url = self._database()
        if url is None:
            return f"SQLite, {self.home / DATABASE}"
        parts = urlsplit(url)
        if not parts.hostname:
            return f"{parts.scheme.partition('+')[0]}, {parts.path.lstrip('/') or parts.query}"
        where = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
        return f"{parts.scheme.partition('+')[0]}, {parts.path.lstrip('/')} on {where}"

    def write_configuration(self) -> Path:
        """Write supervisord.conf. All of its paths are relative to the folder, in which supervisord is started."""
        path = self.folder / "supervisord.conf"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._configuration())
        return path

    def _foreign(self, name: str) -> bool:
        """Whether a variable of the user's names another API, another home, or keys for another API."""
        if name in (LOCAL_API_VARIABLE, "PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE", DATABASE_VARIABLE):
            return True
        return name.startswith("PREFECT__") or (name == "PREFECT_API_KEY" and not self.api)

    def _server(self) -> dict[str, str]:
        """Settings of the server, whose background services are all on: schedules, late runs, automations."""
        settings = server_settings(self.url, self.home)
        if self.host in _WILDCARDS:
            # Where a browser elsewhere finds the API. With a tunnel or a proxy before it, the user's own
            # PREFECT_SERVER_UI_API_URL and PREFECT_SERVER_CORS_ALLOWED_ORIGINS say better.
            seen = f"http://{socket.getfqdn()}:{self.port}"
            settings["PREFECT_SERVER_UI_API_URL"] = f"{seen}/api"
            settings["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] += f",{seen}"
        return settings

    def _database(self) -> str | None:
        """URL with the driver that Prefect wants; None for our SQLite file."""
        url = self.database or os.environ.get(DATABASE_VARIABLE)
        if not url:
            return None
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018  # raises ValueError for what is no number
        except ValueError as error:
            raise ValueError(f"database: not a valid URL: {error}") from error
        if self.database and parts.password:
            raise ValueError(
                "--database: a password on the command line is visible to all users of this machine. "
                f"Set {DATABASE_VARIABLE} in the environment, or store the password in ~/.pgpass"
            )
        kind = parts.scheme.partition("+")[0]
        if kind in ("postgresql", "postgres"):
            return f"postgresql+asyncpg:{url.partition(':')[2]}"
        if kind == "sqlite":
            return f"sqlite+aiosqlite:{url.partition(':')[2]}"
        raise ValueError(f"database: got {kind or 'no scheme'}, expected postgresql://USER@HOST/NAME or SQLite")

    def _configuration(self) -> str:
        """See http://supervisord.org/configuration.html"""
        conf = configparser.RawConfigParser()
        conf.read_dict(
            {
                "supervisord": {
                    "identifier": "rankwise-team",
                    "logfile": "logs/supervisord.log",
                    "logfile_maxbytes": "5MB",
                    "logfile_backups": "2",
                    "pidfile": "supervisord.pid",
                    "silent": "true",
                },
                "unix_http_server": {"file": self.socket.name, "chmod": "0600"},
                "rpcinterface:supervisor": {
                    "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
                },
            }
        )
        if os.geteuid() == 0:
            conf["supervisord"]["user"] = "root"  # said, so that supervisord does not warn
        if not self.api:
            arguments = [self.host, str(self.port)]
            conf["program:server"] = _program("server", arguments, 10, SERVER_STOP_SECONDS)
        arguments = [self.url if not self.api else "-", str(self.workers)]
        conf["program:worker"] = _program("worker", arguments, 20, WORKER_STOP_SECONDS)
        text = io.StringIO()
        conf.write(text)
        return text.getvalue()


def _program(name: str, arguments: list[str], priority: int, stop_seconds: int) -> dict[str, str]:
    command = [sys.executable, "-P", "-m", "flows.team.programs", name, *arguments]
    return {
        "command": shlex.join(command).replace("%", "%%"),
        "directory": "work",
        # The highest is stopped first: the worker's flow runs still tell the server how they ended.
        "priority": str(priority),
        "autorestart": "true",
        # Who ends sooner has not started; the pause before the next try grows by a second each time, so an
        # outage of a day is over within minutes of its end. 1000 tries are four days at least.
        "startsecs": "20",
        "startretries": "1000",
        # SIGTERM to the program alone, which ends what it has started in good order; SIGKILL to all of it.
        "stopsignal": "TERM",
        "stopwaitsecs": str(stop_seconds),
        "stopasgroup": "false",
        "killasgroup": "true",
        "redirect_stderr": "true",
        "stdout_logfile": f"logs/{name}.log",
        "stdout_logfile_maxbytes": "10MB",
        "stdout_logfile_backups": "4",
    }


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/api"
