"""Implementation of `rankwise route`: a front over the addresses of several deployments, until Ctrl-C."""

import functools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer

from configs.common.base import WrongArgument, write_atomically
from configs.common.files.reading import read_model, read_text
from configs.common.printable import plural
from configs.common.system.ports import check_port, free_port
from configs.common.system.proc import end_with_parent
from configs.serving.deployment import Deployment, FrontConfig, FrontState, RoutedServer
from configs.serving.settings import API_KEY_VARIABLE, own_api_key
from flows.cli.deploy.listing import store_of_user
from flows.cli.signals import ended_by_signals
from tasks.deployment.servers import is_ready

_READY_SECONDS, _LOOK_SECONDS = 30.0, 0.1


def run_route(names: list[str], port: int, max_in_flight: int, no_token: bool) -> int:
    """Serve until a signal ends it; prints what each deployment got. Returns the exit code."""
    store = store_of_user()
    found = [store.read(name) for name in dict.fromkeys(names)]
    models = {store.bundle(each).model for each in found}
    if len(models) > 1:
        raise WrongArgument(f"NAME: deployments of different models: {', '.join(sorted(models))}. Route one model")
    if port:
        check_port(port)  # else whoever listens there answers in the front's place that it is ready
    own = own_api_key()
    key = None if no_token else own or secrets.token_urlsafe(32)
    backends = tuple(_backend(each, max_in_flight) for each in found)
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="rankwise-route-") as folder, ended_by_signals():
        config, state = Path(folder) / "front.json", Path(folder) / "state.json"
        write_atomically(config, FrontConfig(key=key, backends=backends).model_dump_json(), mode=0o600)
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.routing.main", str(config), str(state), str(port)],
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # no folder of the working directory is imported
            # Ctrl-C in the terminal reaches us alone: to the front, a second signal means to drop its requests.
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM, os.getpid()),
        )
        try:
            _announce(process, port, key, own is None, models)
            return process.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            _end(process)
            if state.exists():
                _print_shares(read_model(state, FrontState))


def _backend(deployment: Deployment, max_in_flight: int) -> RoutedServer:
    return RoutedServer(
        name=deployment.name,
        url=deployment.url,
        key=read_text(Path(deployment.key_file), 4096).strip(),
        usd_per_hour=deployment.usd_per_hour,
        rented=deployment.rental is not None,
        max_in_flight=max_in_flight,
    )


def _announce(process: "subprocess.Popen[bytes]", port: int, key: str | None, made: bool, models: set[str]) -> None:
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _READY_SECONDS
    while not is_ready(url, key):
        if process.poll() is not None:
            raise ValueError(f"the front ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise ValueError("no deployment is ready. `rankwise deployments` lists their health")
        time.sleep(_LOOK_SECONDS)
    typer.echo(f"routing {', '.join(sorted(models))} at {url}/v1", err=True)
    if key is not None and made:
        typer.echo(f"requests need the header `Authorization: Bearer {key}`; {API_KEY_VARIABLE} sets another", err=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(35)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def _print_shares(state: FrontState) -> None:
    for backend in state.backends:
        typer.echo(f"{backend.name}: {plural(backend.requests, 'request')}, {backend.failures} failed", err=True)
    typer.echo(f"{plural(state.requests, 'request')}, {state.failed} without an answer of a deployment", err=True)
