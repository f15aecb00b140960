"""Pages and answers of servers that speak HTTP badly."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from engine.workloads.servers.commands import ServerCommand
from engine.workloads.servers.process import RunningServer, ServerDiedError, fetched, posted
from tests.support.run_folders.studies import wait_until


@contextmanager
def answering(raw: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every request with these bytes and closes; its URL, and the requests' tokens."""
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("authorization", ""))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.wfile.write(raw)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", tokens
        finally:
            server.shutdown()
            thread.join()


WORKER_STAYS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_died_leaves_no_workers(tmp_path: Path) -> None:
    """They may hold the memory of a GPU, and its next server's port."""
    log = tmp_path / "server.log"
    server = RunningServer(ServerCommand([sys.executable, "-c", WORKER_STAYS]), "http://127.0.0.1:9", log)
    with pytest.raises(ServerDiedError, match="exit code -9"):
        while True:
            server.check()
    worker = psutil.Process(int(log.read_text()))
    server.stop()
    gone, alive = psutil.wait_procs([worker], timeout=600)
    assert gone and not alive


WORKS = """
import subprocess, sys, time
work = "import time\\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-c", work])
child = subprocess.Popen([sys.executable, "-c", work + "\\nprint(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_servers_cpu_time_is_that_of_all_its_processes(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    server = RunningServer(ServerCommand([sys.executable, "-c", WORKS]), "http://127.0.0.1:9", log)
    try:
        wait_until(lambda: log.read_text() == "ready\n", what="both have worked")
        seconds = server.cpu_seconds()
    finally:
        server.stop()
    assert seconds is not None and seconds > 0.59  # the kernel counts in hundredths
    assert server.cpu_seconds() is None


CUT = b"transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"


@pytest.mark.parametrize("raw", [b"HTTP/1.1 200 OK\r\n" + CUT, b"no HTTP at all\r\n\r\n"])
def test_an_answer_that_is_cut_off_or_no_http_is_none(raw: bytes) -> None:
    """It ended the thread that watches a server, and the one that asks again under load."""
    with answering(raw) as (url, _):
        assert fetched(f"{url}/metrics") is None
        with pytest.raises(OSError, match=r"IncompleteRead|BadStatusLine"):
            posted(f"{url}/v1/completions", {}, None, 30)


def test_a_refusal_that_is_cut_off_keeps_its_status() -> None:
    with answering(b"HTTP/1.1 503 Busy\r\n" + CUT) as (url, _):
        assert posted(url, {}, None, 30) == (503, {})


def test_a_redirect_does_not_hand_the_token_on() -> None:
    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as (other, stolen):
        moved = f"HTTP/1.1 302 Found\r\nlocation: {other}/x\r\ncontent-length: 0\r\n\r\n".encode()
        with answering(moved) as (url, tokens):
            assert fetched(url, "s3cret") is None
            assert posted(url, {}, "s3cret", 30) == (302, {})
            assert tokens == ["Bearer s3cret"] * 2
    assert stolen == []
