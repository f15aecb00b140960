"""Measuring never depends on a Prefect server: one that is away, fails, hangs or dies costs its display only."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.common.system.proc import network_namespace, start_ticks
from flows.server.local import lease_server
from flows.server.process import LocalServer, prefect_version, read_server
from tests.support.run_folders.studies import (
    RANKWISE,
    rankwise,
    start,
    status,
    under_measurement,
    wait_until,
    write_study,
)
from tests.support.servers.migrated_database import put_database

PASSWORD = "hush-4711-hush"
GONE = r"the local Prefect server at \S+ (has ended|is ending)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a study, and a data folder in which no server has been."""
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    put_database(tmp_path / "data" / "prefect" / "prefect.db")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    write_study(tmp_path)
    yield tmp_path
    server = read_server(tmp_path / "data" / "prefect")
    if server and server.alive:
        os.kill(server.pid, signal.SIGKILL)


class Broken(BaseHTTPRequestHandler):
    """An API of which nothing works but the question whether it is healthy."""

    def _answer(self) -> None:
        healthy = self.path.endswith("/health")
        self.send_response(200 if healthy else 500)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    do_GET = do_POST = do_PUT = do_PATCH = _answer

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def broken_api(handler: type[Broken] = Broken) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class Overloaded(Broken):
    """An API that says that it is healthy and shows its flows, and records nothing in time."""

    def _answer(self) -> None:
        if self.path.endswith(("/flows/", "/flow_runs/")):
            time.sleep(300)
        known = {"/health": "true", "/flows/filter": "[]", "/admin/version": json.dumps(prefect_version())}
        content = next((text for end, text in known.items() if self.path.endswith(end)), None)
        self.send_response(200 if content else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content or "")))
        self.end_headers()
        self.wfile.write((content or "").encode())

    do_GET = do_POST = do_PUT = do_PATCH = _answer


@contextmanager
def silent_api() -> Iterator[int]:
    """One that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def assert_measured_alone(done: "subprocess.CompletedProcess[str]", folder: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["status"] for row in status(folder / "runs" / "s")] == ["completed"] * 2
    assert done.stdout.count("measuring without Prefect") == 1
    assert "rankwise publish runs/s" in done.stdout
    assert (folder / "runs" / "s" / "report.md").exists()


@pytest.mark.slow
def test_an_api_that_refuses_and_publishing_later(folder: Path) -> None:
    url = f"http://me:{PASSWORD}@127.0.0.1:{refused_port()}/api"
    began = time.monotonic()
    done = rankwise("run", "s.yaml", "--no-calibrate", cwd=folder, PREFECT_API_URL=url)
    assert_measured_alone(done, folder)
    assert time.monotonic() - began < 150, "nothing waits for it"
    assert PASSWORD not in done.stdout + done.stderr

    refused = rankwise("publish", "runs/s", cwd=folder, PREFECT_API_URL=url)
    assert refused.returncode == 1 and "not published" in refused.stderr
    assert PASSWORD not in refused.stdout + refused.stderr

    with lease_server() as lease:
        lease.wait_until_healthy()
        published = rankwise("publish", "runs/s", cwd=folder)
        assert published.returncode == 0, published.stdout + published.stderr
        assert "published: http://127.0.0.1:" in published.stdout
        runs = ask(lease.url, "/flow_runs/filter")
        assert [(run["name"], run["state_type"]) for run in runs] == [("s", "COMPLETED")]
        assert {"target:local"} <= set(runs[0]["tags"])
        kinds = [artifact["type"] for artifact in ask(lease.url, "/artifacts/filter")]
        assert {"markdown", "table"} <= set(kinds)


def ask(url: str, path: str) -> Any:
    request = urllib.request.Request(f"{url}{path}", b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    "api", [pytest.param(broken_api, marks=pytest.mark.slow), pytest.param(silent_api, marks=pytest.mark.nightly)]
)
def test_an_api_that_fails_or_hangs(api: Any, folder: Path) -> None:
    with api() as port:
        done = rankwise("run", "s.yaml", "--no-calibrate", cwd=folder, PREFECT_API_URL=f"http://127.0.0.1:{port}/api")
    assert_measured_alone(done, folder)


@pytest.mark.nightly
def test_a_local_server_that_is_healthy_and_then_slow(folder: Path) -> None:
    """As on a busy machine, where the server, which is nice to measurements, records nothing for minutes."""
    data = folder / "data" / "prefect"
    data.mkdir(parents=True)
    with broken_api(Overloaded) as port:
        mine = LocalServer(
            socket.gethostname(), network_namespace(), os.getpid(), start_ticks(os.getpid()) or 0, port,
            f"http://127.0.0.1:{port}/api", "2026-01-01T00:00:00+00:00", prefect_version(),
        )  # fmt: skip
        (data / "server.json").write_text(json.dumps(asdict(mine)))
        try:
            run = start("run", "s.yaml", "--no-calibrate", cwd=folder)
            wait_until(lambda: "UI   " in (folder / "out.log").read_text(), 60, "the header")
            began = time.monotonic()
            wait_until(lambda: any((folder / "runs" / "s" / "records").glob("*/*.json")), 120, "a record")
            waited = time.monotonic() - began
            code = run.wait(600)
        finally:  # or this process would be taken for a server that is to be ended
            (data / "server.json").unlink()
    out = (folder / "out.log").read_text()
    assert waited < 30, "two questions without an answer at most, and no retries"
    assert code == 0 and "rankwise publish runs/s" in out, out


@pytest.mark.slow
def test_a_local_server_that_cannot_start(folder: Path) -> None:
    (folder / "data" / "prefect" / "prefect.db").write_bytes(b"not a database" * 100)
    done = rankwise("run", "s.yaml", "--no-calibrate", cwd=folder)
    assert_measured_alone(done, folder)
    # At the beginning, or on a busy machine only in the end: it waits for a server for seconds.
    assert re.search(rf"{GONE}; its log is \S+server\.log", " ".join(done.stdout.split())), done.stdout


@pytest.mark.nightly
def test_a_local_server_that_ends_while_the_run_measures(folder: Path) -> None:
    """As one that takes minutes to fail on a busy machine: a refused connection would not say why."""
    write_study(folder, workload={"kind": "noop", "seconds": 3.0}, pack=False)
    run = start("run", "s.yaml", "--no-calibrate", cwd=folder)
    wait_until(lambda: under_measurement(folder / "runs" / "s"), 120, "a measurement")
    server = read_server(folder / "data" / "prefect")
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    assert run.wait(600) == 0
    out = " ".join((folder / "out.log").read_text().split())
    assert re.search(rf"not in Prefect's UI \({GONE}; its log is", out), out


@pytest.mark.nightly
def test_a_data_folder_that_cannot_be_written(folder: Path) -> None:
    (folder / "data").write_text("")
    done = rankwise("run", "s.yaml", "--no-calibrate", cwd=folder)
    assert_measured_alone(done, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("order", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_server_that_dies_or_hangs_in_the_middle(order: signal.Signals, folder: Path) -> None:
    write_study(folder, workload={"kind": "noop", "seconds": 3.0}, pack=False)
    with lease_server() as lease:  # on a busy machine a server may need longer than a run waits for it
        lease.wait_until_healthy()
        run = start("run", "s.yaml", "--no-calibrate", cwd=folder)
        wait_until(lambda: under_measurement(folder / "runs" / "s"), 120, "a measurement")
    server = read_server(folder / "data" / "prefect")
    assert server is not None
    os.kill(server.pid, order)
    report = folder / "runs" / "s" / "report.md"
    wait_until(report.exists, 120, "the report")
    wait_until(lambda: "Report " in (folder / "out.log").read_text(), 60, "the result")
    hangs = order == signal.SIGSTOP  # where nobody listens any more, the run may end at once
    assert not hangs or run.poll() is None, "it is printed before the API is told"
    assert run.wait(600) == 0, (folder / "out.log").read_text()
    out = (folder / "out.log").read_text()
    assert [row["status"] for row in status(folder / "runs" / "s")] == ["completed"] * 2
    assert "measuring without Prefect" not in out and "rankwise publish runs/s" in out
    lines = ["\nReport ", *["telling the Prefect API"] * hangs, "not in Prefect's UI"]
    assert [out.index(line) for line in lines] == sorted(out.index(line) for line in lines), out
    assert not re.findall(r"Traceback|EventsWorker|Error logging", out)


def test_stages_are_tasks_in_a_flow_run_and_functions_elsewhere() -> None:
    """Transient faults are retried either way."""
    script = """
import time; time.sleep = lambda seconds: None
from tasks.prefect_api.stages import in_flow_run, stage
tries = []
@stage("try", "try {name}", retry_on=ConnectionError)
def attempt(name):
    tries.append(in_flow_run())
    if len(tries) < 3: raise ConnectionError(name)
    return name
assert attempt("a") == "a" and tries == [False] * 3, tries
@stage("fail", "fail", retry_on=ConnectionError)
def fail(): raise ValueError("once")
try: fail()
except ValueError: print("done")
"""
    python = Path(RANKWISE).with_name("python")
    ran = subprocess.run([str(python), "-c", script], capture_output=True, text=True)
    assert ran.stdout == "done\n", ran.stderr
