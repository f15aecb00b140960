"""Credentials reach MLflow and Weights & Biases, and neither the ranks, files, records nor logs."""

import base64
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from configs.common.live_variables import SOCKET_VARIABLE, has_password, hidden, variables_of
from engine.training.live import sender as telling
from engine.training.live import streamer
from slurm.launcher.starting import rank_environment
from tasks.campaign.live_credentials import live_credentials
from tests.support.run_folders.studies import rankwise, write_study
from tests.support.servers.mlflow_server import MlflowServer
from tests.support.training.live_streams import LOSSES, context_of, opened, tell

USER, PASSWORD = "ada", "corr:ect-horse+battery"
WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server() -> Iterator[MlflowServer]:
    with MlflowServer(USER, PASSWORD) as found:
        yield found


def as_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process the environment that the launcher gives to a rank."""
    environment = rank_environment(context_of(folder, ()).job, os.environ, launcher_pid=1)
    for name in list(os.environ):
        if name not in environment:
            monkeypatch.delenv(name)


def nothing_holds(folder: Path, *secrets: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in content], path


@pytest.mark.slow
@pytest.mark.parametrize("in_address", [False, True])
def test_mlflow_with_authentication(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    server: MlflowServer,
    in_address: bool,
) -> None:
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    if in_address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{USER}:corr%3Aect-horse+battery@{server.host}")
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    with live_credentials(["mlflow"]):
        as_rank(tmp_path, monkeypatch)
        assert not [value for value in os.environ.values() if PASSWORD in value or "corr%3A" in value]
        with opened(tmp_path, "mlflow") as live:
            for step, loss in enumerate(LOSSES, 1):
                tell(live, step, loss)
    said = capfd.readouterr()
    assert [(value, step) for name, value, step in server.metrics() if name == "loss"] == [
        (4.0, 1),
        (3.5, 2),
        (3.25, 3),
    ]
    assert ("runs/update", "FINISHED") in [(name, body.get("status")) for name, body in server.calls]
    assert server.refused == [] and live.figures()["live_dropped"] == 0
    assert PASSWORD not in said.out + said.err and "corr%3A" not in said.out + said.err
    nothing_holds(tmp_path, PASSWORD, "corr%3A")


@pytest.mark.slow
def test_a_wrong_password_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], server: MlflowServer
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-and-secret")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with live_credentials(["mlflow"]):
        as_rank(tmp_path, monkeypatch)
        with opened(tmp_path, "mlflow") as live:
            tell(live, 1, 2.0)
    said = capfd.readouterr()
    assert "mlflow is given up" in said.err and "wrong-and-secret" not in said.err + said.out
    assert server.refused and server.calls == []


def test_wandb_online_sends_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Headers are kept instead."""

        def do_POST(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
        with live_credentials(["wandb"]):
            as_rank(tmp_path, monkeypatch)
            with opened(tmp_path, "wandb") as live:
                tell(live, 1, 2.0)
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
    assert "Basic " + base64.b64encode(f"api:{WANDB_KEY}".encode()).decode() in seen
    said = capfd.readouterr()
    assert WANDB_KEY not in said.out + said.err
    nothing_holds(tmp_path, WANDB_KEY)


def test_only_a_streamer_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    with live_credentials(["wandb"]), socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + os.environ[SOCKET_VARIABLE])
        assert connection.recv(1000) == b""
    assert SOCKET_VARIABLE not in os.environ
    with live_credentials(["tensorboard", "prometheus", "mlflow"]):
        assert SOCKET_VARIABLE not in os.environ, "no variables of these, no socket"


def test_a_run_that_has_gone_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "rankwise-nobody")
    streamer.get_variables()
    assert "live: no credentials: the run's process does not answer" in capfd.readouterr().err


def test_what_is_a_secret() -> None:
    environment = {"MLFLOW_TRACKING_PASSWORD": "p" * 9, "WANDB_API_KEY": "k" * 9, "HF_TOKEN": "t" * 9, "PATH": "/bin"}
    assert variables_of(["mlflow"], environment) == {"MLFLOW_TRACKING_PASSWORD": "p" * 9}
    assert variables_of(["tensorboard"], environment) == {} == variables_of([], environment)
    assert has_password("http://a:b@host/x") and not has_password("http://host/x") and not has_password("sqlite:///x")
    url = {"MLFLOW_TRACKING_URI": "http://ada:secret@host"}
    assert hidden("cannot reach http://ada:secret@host: secret", url) == "cannot reach http://(hidden)@host: (hidden)"


@pytest.mark.nightly
def test_a_whole_run_keeps_the_password_to_itself(tmp_path: Path, server: MlflowServer) -> None:
    study = write_study(
        tmp_path,
        models=[{"id": "synthetic:llama-1m@0"}],
        workload={"kind": "train", "global_batch_size": 2, "sequence_length": 16, "steps": 3},
        experiments={"one": {"kind": "sweep", "over": {"workload.global_batch_size": [2]}}},
        measuring={"live": ["mlflow"], "cell_timeout_seconds": 60},
    )
    done = rankwise(
        "run", study, "--no-calibrate", cwd=tmp_path, MLFLOW_TRACKING_URI=server.address,
        MLFLOW_TRACKING_USERNAME=USER, MLFLOW_TRACKING_PASSWORD=PASSWORD,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name, _, _ in server.metrics()].count("loss") >= 1 and server.refused == []
    assert PASSWORD not in done.stdout + done.stderr
    nothing_holds(tmp_path, PASSWORD)
    record = json.loads(next((tmp_path / "runs" / "s" / "records").glob("*/*.json")).read_bytes())
    assert record["figures"]["live_dropped"] == 0
