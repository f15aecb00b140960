"""Start, inspect and stop a team's permanent Prefect server, worker and schedules: `rankwise team`.

supervisord keeps server and worker running; any init system can run `rankwise team up`, which stays in the
foreground and takes all along when it ends. With the API of a server elsewhere only the worker runs here.
What is started and with which settings: `flows.team.setup`, `flows.team.programs`.

    up(TeamSetup(default_folder()), background=True)
    status(default_folder())
    down(default_folder())
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

from configs.common.files.reading import MIB, read_json, read_tail
from configs.common.system.lock_files import locks_needed
from configs.common.system.proc import end_with_parent
from flows.server.local import LocalServerError
from flows.server.process import locked
from flows.server.settings import LOOPBACK, ui_url
from flows.team.api import Api
from flows.team.processes import (
    SupervisedProgram,
    end_all,
    processes_of,
    programs,
    supervisord_of,
)
from flows.team.setup import POOL, STOP_SECONDS, TEAM_START_SECONDS, TeamSetup, default_folder

_ONLINE_SECONDS = 120.0
_DEPLOY_SECONDS = 300.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

DEPLOY = [sys.executable, "-P", "-c", "from flows.cli.main import app; app(prog_name='rankwise')", "deploy-flows"]


class TeamError(LocalServerError):
    """The set-up did not start, or does not run as it should."""


def start_team(setup: TeamSetup, background: bool = False) -> int:
    """Start the set-up and register the flows; in the foreground, run until SIGTERM, SIGINT or SIGHUP.

    Returns the exit code: 0, or 1 where server and worker run but the flows could not be registered. Raises
    ValueError, OSError or TeamError where nothing was started; then nothing is left running.
    """
    setup.prepare()
    environment = setup.environment()
    with _signals_end():
        with locks_needed(setup.folder, "use a --folder of another one"), locked(setup.folder / "up.lock"):
            _refuse_other_machine(setup.folder)
            if supervisord_of(setup.folder):
                return _already_up(setup, environment)
            _refuse_what_is_in_the_way(setup)
            setup.write_configuration()
            supervisord = _start(setup, environment, background)
            _remember(setup)
        try:
            _wait_until_up(setup)
            _print_where(setup, background)
            if supervisord is None:
                return 0 if _online_and_registered(setup, environment) else 1
            _until_ended(setup, environment, supervisord)
            return 0
        except BaseException:
            _ignore_signals()
            end_all(setup.folder, STOP_SECONDS)
            _forget(setup.folder)
            raise
        finally:
            if supervisord is not None:
                supervisord.wait()


def _online_and_registered(setup: TeamSetup, environment: dict[str, str]) -> bool:
    """Whether the flows could be registered. In this order: both create the work pool where there is none."""
    _wait_until_online(setup, environment)
    return register(setup, environment)


def _until_ended(setup: TeamSetup, environment: dict[str, str], supervisord: "subprocess.Popen[bytes]") -> None:
    """Return when `rankwise team down` or a signal has ended all. Raises TeamError where supervisord died.

    From here on the server answers: a signal is the ordinary end, also while the flows are being registered.
    """
    try:
        _online_and_registered(setup, environment)
        code = supervisord.wait()
    except KeyboardInterrupt:
        _ignore_signals()
        end_all(setup.folder, STOP_SECONDS)
        code = supervisord.wait()
    if code:
        raise TeamError(f"supervisord ended with status {code}.\n{_end_of(setup.logs / 'supervisord.log')}")
    _forget(setup.folder)
    print("stopped: server, worker and their flow runs", flush=True)


def end_team(folder: Path) -> int:
    """End everything, within half a minute. Returns the exit code."""
    _refuse_other_machine(folder)
    if not processes_of(folder):
        print(f"{folder}: not running")
    else:
        killed = end_all(folder, STOP_SECONDS)
        print(f"{folder}: stopped" + (f", {killed} processes killed" if killed else ""))
    _forget(folder)
    return 0


def print_team_status(folder: Path) -> int:
    """Say what runs. Returns 0 if everything does, else 1."""
    _refuse_other_machine(folder)
    running, known = programs(folder / "supervisor.sock"), _known(folder)
    if running is None or known is None:
        print(f"{folder}: not running. Start it with `{_command('up', folder)}`")
        return 1
    api = Api(known["url"], known["own"], dict(os.environ))
    fine = []
    if known["own"]:
        answering = api.answers()
        fine.append(_say(running["server"], answering, "responding" if answering else "not responding"))
    online = api.online(socket.gethostname())
    words = online if isinstance(online, str) else ("online" if online else "not online in the API")
    fine.append(_say(running["worker"], online is True, words))
    print("\n".join([*api.deployments(), f"UI         {ui_url(api.url)}", f"logs       {folder / 'logs'}"]))
    return 0 if all(fine) else 1


def _start(setup: TeamSetup, environment: dict[str, str], background: bool) -> "subprocess.Popen[bytes] | None":
    """Start supervisord, in a session of its own: Ctrl-C in the terminal reaches us alone.

    In the foreground it is our child and ends with us. Raises TeamError where it refuses.
    """
    command = [sys.executable, "-m", "supervisor.supervisord", "--configuration", "supervisord.conf"]
    log = setup.logs / "supervisord.start.log"
    options: dict[str, Any] = {"cwd": setup.folder, "env": environment, "stdin": subprocess.DEVNULL}
    with log.open("wb") as output:
        if not background:
            return subprocess.Popen(
                [*command, "--nodaemon"],
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, signal.SIGTERM, os.getpid()),
                **options,
            )
        started = subprocess.run(command, stdout=output, stderr=output, start_new_session=True, **options)
    if started.returncode:
        raise TeamError(f"supervisord did not start.\n{_end_of(log)}")
    return None


def _wait_until_up(setup: TeamSetup) -> None:
    """Return when the server answers. Raises TeamError with the end of its log when it fails to start."""
    api = Api(setup.url, not setup.api, {})
    deadline = time.monotonic() + TEAM_START_SECONDS
    name = "worker" if setup.api else "server"
    while time.monotonic() < deadline:
        running = programs(setup.socket)
        if running is None and supervisord_of(setup.folder) is None:
            raise TeamError(f"supervisord has ended.\n{_end_of(setup.logs / 'supervisord.start.log')}")
        if running and running[name].failing:
            database = f"; its database: {setup.database_shown()}" if not setup.api else ""
            raise TeamError(f"the {name} failed to start{database}.\n{_end_of(setup.logs / f'{name}.log')}")
        if running and (setup.api or api.answers()):
            return
        time.sleep(0.3)
    raise TeamError(
        f"the server did not respond within {TEAM_START_SECONDS:.0f} s.\n{_end_of(setup.logs / 'server.log')}"
    )


def register(setup: TeamSetup, environment: dict[str, str]) -> bool:
    """Register work pool, deployments, limits and automations. What goes wrong is said; nothing is ended for it."""
    log = setup.logs / "deploy.log"
    with log.open("wb") as output:
        # A session of its own: what it starts is ended with it.
        deploying = subprocess.Popen(
            [*DEPLOY, "--folder", str(setup.work)],
            cwd=setup.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = deploying.wait(_DEPLOY_SECONDS)
        except BaseException as error:
            os.killpg(deploying.pid, signal.SIGKILL)
            code = deploying.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output.write(f"not registered within {_DEPLOY_SECONDS:.0f} s: ended\n".encode())
    if code == 0:
        print("".join(f"  {line}\n" for line in read_tail(log, MIB).splitlines()), end="", flush=True)
        return True
    print(
        f"FLOWS NOT REGISTERED; server and worker are running.\n{_end_of(log)}\nCorrect this, then run "
        f"`PREFECT_API_URL={setup.url} rankwise deploy-flows --folder {quote(str(setup.work))}`",
        file=sys.stderr,
        flush=True,
    )
    return False


def _wait_until_online(setup: TeamSetup, environment: dict[str, str]) -> None:
    """Return when the API shows the worker. One that takes long is said, not ended."""
    api, here = Api(setup.url, not setup.api, environment), socket.gethostname()
    deadline = time.monotonic() + _ONLINE_SECONDS
    while (online := api.online(here)) is not True:
        if time.monotonic() > deadline:
            why = f" ({online})" if isinstance(online, str) else ""
            print(
                f"the API does not show the worker yet{why}.\n{_end_of(setup.logs / 'worker.log')}",
                file=sys.stderr,
                flush=True,
            )
            return
        time.sleep(0.5)
    print(f"the worker {here} is online", flush=True)


def _print_where(setup: TeamSetup, background: bool) -> None:
    lines = [
        f"UI         {ui_url(setup.url)}",
        f"API        {setup.url}",
        f"work pool  {POOL}, {setup.workers} flow run{'s' if setup.workers != 1 else ''} concurrently on this machine",
        f"database   {setup.database_shown()}" if not setup.api else "database   elsewhere",
        f"runs       {setup.work / 'runs'}",
        f"logs       {setup.logs}",
        f"to stop    {'' if background else 'Ctrl-C, or '}{_command('down', setup.folder)}",
    ]
    print("\n".join(lines), flush=True)
    if setup.open_to_others and "PREFECT_SERVER_API_AUTH_STRING" not in os.environ:
        print(
            f"Warning: anyone who can reach {setup.host}:{setup.port} can start and change runs. "
            "Set PREFECT_SERVER_API_AUTH_STRING=user:password to require a password",
            file=sys.stderr,
            flush=True,
        )


def _already_up(setup: TeamSetup, environment: dict[str, str]) -> int:
    """Register the flows, which may be newer than those that are registered, and leave server and worker alone."""
    known = _known(setup.folder) or {"url": setup.url}
    print(
        f"already up: {ui_url(known['url'])}, logs in {setup.logs}; server and worker are left as they are", flush=True
    )
    if known["url"] != setup.url:
        print(f"to move it to {setup.url}, first run `{_command('down', setup.folder)}`")
        return 0
    return 0 if register(setup, environment) else 1


def _refuse_what_is_in_the_way(setup: TeamSetup) -> None:
    """Raises TeamError for remains of an earlier set-up, and where somebody else has the port."""
    if processes_of(setup.folder):
        raise TeamError(
            f"{setup.folder}: an earlier set-up is still stopping. Stop it with `{_command('down', setup.folder)}`"
        )
    if setup.api:
        return
    host = LOOPBACK if setup.host == "localhost" else setup.host
    try:
        family = socket.getaddrinfo(host, setup.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, setup.port))
    except OSError as error:
        raise TeamError(
            f"{setup.host}:{setup.port}: cannot listen ({error.strerror or error}). "
            "Stop the program that uses it, or change --port or --host"
        ) from error


def _refuse_other_machine(folder: Path) -> None:
    """Raises TeamError where the folder, on a shared disk, belongs to another machine's set-up."""
    known, here = _known(folder), socket.gethostname()
    if known and known["host"] != here:
        raise TeamError(
            f"{folder}: in use by the set-up on {known['host']}. Use another --folder, "
            f"or delete {folder / 'team.json'} if that machine no longer exists"
        )


def _remember(setup: TeamSetup) -> None:
    known = {"host": socket.gethostname(), "url": setup.url, "own": not setup.api}
    (setup.folder / "team.json").write_text(json.dumps(known) + "\n")


def _known(folder: Path) -> dict[str, Any] | None:
    """On which host the set-up of this folder runs, with which API, if it was not ended."""
    try:
        known = read_json(folder / "team.json")
        return {"host": str(known["host"]), "url": str(known["url"]), "own": bool(known["own"])}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _forget(folder: Path) -> None:
    (folder / "team.json").unlink(missing_ok=True)


def _say(program: SupervisedProgram, good: bool, words: str) -> bool:
    """One line; whether the program runs and does what it is for."""
    print(f"{program.name:<10} {program.state.lower()}, {words}; {program.description}")
    return good and program.state in ("RUNNING", "STARTING")


def _command(name: str, folder: Path) -> str:
    return f"rankwise team {name}" + ("" if folder == default_folder() else f" --folder {quote(str(folder))}")


def _end_of(log: Path, lines: int = 8) -> str:
    """The last lines of a log, of tracebacks only what was raised."""
    try:
        text = read_tail(log, 20_000)
    except OSError as error:
        return f"The log cannot be read: {error}"
    told = [line for line in text.splitlines() if line.strip() and line[0] != " " and "Traceback (" not in line]
    return "\n".join([f"The end of {log}, without its tracebacks:", *(f"    {line}" for line in told[-lines:])])


def _ignore_signals() -> None:
    """What ends is not interrupted once more: it would leave something behind."""
    for number in _ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as Ctrl-C does. Under nohup, SIGHUP stays ignored."""

    def interrupt(number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt(f"signal {number}")

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in _ENDING_SIGNALS if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
