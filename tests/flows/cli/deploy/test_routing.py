"""`rankwise route`: its port, its requests, and which servers it takes first."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from configs.common.system.ports import free_port
from engine.routing.choosing import BackendLoad, next_backend
from flows.cli.deploy import routing
from tests.support.patience import patient


def _one_deployment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "key").write_text("k")
    found = SimpleNamespace(
        name="a", url="http://127.0.0.1:9", key_file=str(folder / "key"), usd_per_hour=None, model="m", rental=None
    )
    monkeypatch.setattr(
        routing, "store_of_user", lambda: SimpleNamespace(read=lambda name: found, bundle=lambda each: each)
    )


def test_a_router_imports_no_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _one_deployment(tmp_path, monkeypatch)
    own = tmp_path / "engine" / "__init__.py"
    own.parent.mkdir()
    own.write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(routing, "_announce", lambda *_: None)
    monkeypatch.setattr(routing, "check_port", lambda port: None)  # it was free when the command began
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it ends by itself, after its imports
        assert routing.run_route(["a"], taken.getsockname()[1], 1, no_token=True) != 0
    assert not (tmp_path / "imported").exists()


class _OfAnother(BaseHTTPRequestHandler):
    """Takes requests, as another router's front."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_router_does_not_announce_the_server_that_has_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took the answer of another router, begun in another terminal, for its own, and told a token of nobody."""
    _one_deployment(tmp_path, monkeypatch)
    with HTTPServer(("127.0.0.1", 0), _OfAnother) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(ValueError, match=r"cannot be listened on: .*Use another --port"):
            routing.run_route(["a"], other.server_port, 1, no_token=False)
        other.shutdown()
    assert "routing" not in capsys.readouterr().err


class _Slow(_OfAnother):
    """Answers a request some time after it came."""

    began = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.began.set()
        time.sleep(2)
        self.do_GET()


_ROUTER = """
import sys
from types import SimpleNamespace
from flows.cli.deploy import routing
key, url, port = sys.argv[1:]
found = SimpleNamespace(name="a", url=url, key_file=key, usd_per_hour=None, model="m", rental=None)
routing.store_of_user = lambda: SimpleNamespace(read=lambda name: found, bundle=lambda each: each)
sys.exit(routing.run_route(["a"], int(port), 1, no_token=True))
"""


def test_an_interrupted_router_answers_what_it_has_begun(tmp_path: Path) -> None:
    """Ctrl-C reached the front twice, from the terminal and from the command: it dropped its requests."""
    (tmp_path / "key").write_text("k")
    port, answers = free_port(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as slow:
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        words = [str(tmp_path / "key"), f"http://127.0.0.1:{slow.server_port}", str(port)]
        with subprocess.Popen(
            [sys.executable, "-c", _ROUTER, *words],
            stderr=subprocess.PIPE,
            start_new_session=True,  # as of a terminal, whose Ctrl-C is for the whole group
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where a script runs the tests
        ) as router:
            assert router.stderr is not None and router.stderr.readline().startswith(b"routing m at ")
            url = f"http://127.0.0.1:{port}/v1/completions"
            asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json={}, trust_env=False)))
            asking.start()
            assert _Slow.began.wait(patient(10))
            os.killpg(router.pid, signal.SIGINT)
            asking.join(patient(20))
            assert router.wait(patient(20)) == 0
        slow.shutdown()
    assert [answer.status_code for answer in answers] == [200]


@pytest.mark.parametrize(("rental", "first"), [("deploy-1a2b", "cheap"), (None, "a")])
def test_a_router_takes_no_rented_nodes_of_unknown_price_for_own_machines(
    tmp_path: Path, rental: str | None, first: str
) -> None:
    (tmp_path / "key").write_text("k")
    known = {"url": "u", "key_file": str(tmp_path / "key")}
    found = [
        SimpleNamespace(**known, name="a", rental=rental, usd_per_hour=None),
        SimpleNamespace(**known, name="cheap", rental="deploy-3c4d", usd_per_hour=0.5),
    ]
    backends = [routing._backend(cast(Any, each), 1) for each in found]
    chosen = next_backend(backends, {each.name: BackendLoad(ready=True) for each in backends})
    assert chosen is not None and chosen.name == first
