"""Sinks of live metrics: one context manager for each kind, which opens, yields `write(told)`, and closes.

    with SINKS["tensorboard"](about) as write:
        write({"step": 10, "loss": 2.1, "time": 1700000000.0})

They run in a separate process (`engine.training.live.streamer`) and may raise and hang. No sink uses the network unless
MLFLOW_TRACKING_URI does or WANDB_MODE is online, and none writes outside the run folder.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from configs.common.base import write_atomically
from configs.common.live_variables import has_password
from configs.common.secrets import shown_url, without_password
from engine.training.live.metrics import METRIC_PREFIX, METRICS

Write = Callable[[dict[str, Any]], None]
PORTS_TRIED = 16
_LABELS = ("study", "cell", "repeat", "node")


def _say(name: str, what: str) -> None:
    print(f"live: {name}: {what}", file=sys.stderr, flush=True)


def _values(told: dict[str, Any]) -> dict[str, float]:
    return {name: float(told[name]) for name in METRICS if name in told and name != "step"}


@contextmanager
def tensorboard(about: dict[str, Any]) -> Iterator[Write]:
    """Write event files in the measurement's folder, flushed after each write: `tensorboard --logdir <run>/live`."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(about["folder"])
    _say("tensorboard", about["folder"])
    begun = False

    def write(told: dict[str, Any]) -> None:
        nonlocal begun
        if not begun:  # an attempt before may have gone further than its checkpoint: what it told from here on is void
            writer.add_event(Event(step=told["step"], session_log=SessionLog(status=SessionLog.START)))
            begun = True
        values = [Summary.Value(tag=name, simple_value=value) for name, value in _values(told).items()]
        writer.add_event(Event(wall_time=told["time"], step=told["step"], summary=Summary(value=values)))
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def mlflow(about: dict[str, Any]) -> Iterator[Write]:
    """Write a run of the study's experiment, in `<run>/live/mlflow.db` unless MLFLOW_TRACKING_URI is set.

    MLflow 3 supports no new file stores (mlflow.store.tracking.file_store); SQLite works without a server.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    root = Path(about["root"])
    server = _without_login(os.environ.get("MLFLOW_TRACKING_URI"))
    place = server or f"sqlite:///{root}/mlflow.db"
    root.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=place)
    known = client.get_experiment_by_name(about["study"])
    artifacts = None if server else (root / "mlflow_artifacts").as_uri()
    experiment = known.experiment_id if known else _new_experiment(client, about["study"], artifacts)
    tags = {name: str(about[name]) for name in ("cell", "key", "repeat", "attempt")}
    run = client.create_run(experiment, run_name=about["name"], tags=tags).info.run_id
    client.log_batch(run, params=[Param(name, str(value)) for name, value in _flat(about["config"]).items()])
    _say("mlflow", f"run {run} of experiment {about['study']} in {shown_url(place)}")

    def write(told: dict[str, Any]) -> None:
        now = int(told["time"] * 1000)
        client.log_batch(run, [Metric(name, value, now, told["step"]) for name, value in _values(told).items()])

    try:
        yield write
    finally:
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(about.get("end", "killed"), "KILLED")
        client.set_terminated(run, status)


def _new_experiment(client: Any, name: str, artifacts: str | None) -> str:
    """Create an experiment, or take that of another job of the study that was faster."""
    from mlflow.exceptions import MlflowException

    try:
        created: str = client.create_experiment(name, artifacts)
    except MlflowException:
        known = client.get_experiment_by_name(name)
        if known is None:
            raise
        created = known.experiment_id
    return created


def _without_login(address: str | None) -> str | None:
    """Move user and password of an address into the variables for them, because the library prints the address."""
    if address is None or not has_password(address):
        return address
    parts = urlsplit(address)
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    os.environ["MLFLOW_TRACKING_URI"] = without_password(address)
    return os.environ["MLFLOW_TRACKING_URI"]


@contextmanager
def wandb(about: dict[str, Any]) -> Iterator[Write]:
    """Write an offline run in the measurement's folder, which `wandb sync` uploads; with WANDB_MODE=online, upload it
    now.
    """
    folder = Path(about["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        {f"WANDB_{kind}_DIR": str(folder / "wandb" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    )
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb as library

    settings = library.Settings(
        console="off", disable_git=True, disable_job_creation=True, save_code=False, silent=True,
        x_disable_meta=True, x_disable_stats=True,
    )  # fmt: skip
    online = os.environ.get("WANDB_MODE") == "online"
    run = library.init(
        project=about["study"], name=about["name"], group=about["cell"], config=about["config"], dir=str(folder),
        mode="online" if online else "offline", settings=settings,
    )  # fmt: skip
    _say("wandb", str(run.url) if online else str(Path(run.dir).parent))

    def write(told: dict[str, Any]) -> None:
        # Its step numbers must increase; evaluations follow the step that they evaluate.
        run.log({**_values(told), "step": told["step"], "_timestamp": told["time"]})

    run.define_metric("*", step_metric="step")
    try:
        yield write
    finally:
        run.finish(exit_code=0 if about.get("end") == "finished" else 1)


@contextmanager
def prometheus(about: dict[str, Any]) -> Iterator[Write]:
    """Serve an HTTP endpoint on the node during the measurement, and write a discovery file for Prometheus servers."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry = CollectorRegistry()
    labels = {name: str(about[name]) for name in _LABELS}
    gauges = {name: Gauge(METRIC_PREFIX + name, says, _LABELS, registry=registry) for name, says in METRICS.items()}
    wanted = about["port"]
    for port in range(wanted, wanted + (PORTS_TRIED if wanted else 1)):
        try:
            server, thread = start_http_server(port, addr=_listening_address(about["host"]), registry=registry)
            break
        except OSError as error:
            refused = error
    else:
        raise OSError(f"no free port among {wanted} to {wanted + PORTS_TRIED - 1}: {refused}")
    address = f"{about['host']}:{server.server_port}"
    found_by = Path(about["root"]) / "prometheus" / f"{about['name']}.json"
    found_by.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(found_by, json.dumps([{"targets": [address], "labels": {"job": "rankwise"}}]))
    _say("prometheus", f"http://{address}/metrics")

    def write(told: dict[str, Any]) -> None:
        gauges["step"].labels(**labels).set(told["step"])
        for name, value in _values(told).items():
            gauges[name].labels(**labels).set(value)

    try:
        yield write
    finally:
        found_by.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        thread.join()


def _listening_address(host: str) -> str:
    """The address that a host name, this machine's, stands for to others; all interfaces where it does not say."""
    with suppress(OSError):
        address = socket.gethostbyname(host)
        if host == address or not address.startswith("127."):  # Debian maps a machine's own name to 127.0.1.1
            return address
    return "0.0.0.0"


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten to dotted names; unset values are left out."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value
    return flat


SINKS: dict[str, Callable[[dict[str, Any]], AbstractContextManager[Write]]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "wandb": wandb,
    "prometheus": prometheus,
}
