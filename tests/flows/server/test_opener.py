"""An API with a certificate of one's own is asked by `rankwise team` and `doctor` as Prefect's client asks it."""

import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows.cli.doctor import checks
from flows.team.api import Api


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._say(b"true")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(json.dumps([{"name": "here", "status": "ONLINE"}]).encode())

    def _say(self, body: bytes) -> None:
        admitted = self.headers.get("X-Gate") == "open"
        self.send_response(200 if admitted else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that no authority of the system has signed; its key beside it."""
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path.with_name("key.pem")), "-out", str(path)]
    subprocess.run([*made, *names], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def url(certificate: Path) -> Iterator[str]:
    """An API over TLS behind a gate that wants a header."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/api"
    server.shutdown()
    thread.join()
    server.server_close()


GATE = {"PREFECT_CLIENT_CUSTOM_HEADERS": '{"X-Gate": "open"}'}


@pytest.mark.parametrize("unchecked", [True, False])
def test_an_api_with_a_certificate_of_ones_own_is_asked(unchecked: bool, url: str, certificate: Path) -> None:
    """The worker of `team up --api` was online, and `team status` ended with 1: `certificate verify failed`."""
    trusted = {"PREFECT_API_SSL_CERT_FILE": str(certificate)}
    environment = {"PREFECT_API_TLS_INSECURE_SKIP_VERIFY": "True"} if unchecked else trusted
    assert Api(url, False, GATE | environment).online("here") is True
    assert Api(url, False, GATE | environment).answers()


def test_without_it_is_said_why_not(url: str, certificate: Path, tmp_path: Path) -> None:
    assert "certificate verify failed" in str(Api(url, False, GATE).online("here"))
    gone = {"PREFECT_API_SSL_CERT_FILE": str(tmp_path / "gone.pem")}
    assert "No such file" in str(Api(url, False, GATE | gone).online("here"))
    for headers in ("", "no JSON", "[]"):
        refused = {"PREFECT_CLIENT_CUSTOM_HEADERS": headers, "PREFECT_API_SSL_CERT_FILE": str(certificate)}
        assert "requires" in str(Api(url, False, refused).online("here"))


def test_doctor_asks_it_too(url: str, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PREFECT_") or name == "RANKWISE_LOCAL_API"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_API_URL", url)
    (check,) = checks.check_prefect_api()
    assert check.state == "missing" and "certificate verify failed" in check.detail
    monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", GATE["PREFECT_CLIENT_CUSTOM_HEADERS"])
    (check,) = checks.check_prefect_api()
    assert (check.state, check.detail) == ("ok", f"{url} answers")


class _Redirects(BaseHTTPRequestHandler):
    """Sends requests of `/api` to the place of its server, and keeps the headers of all others."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        at = self.server
        assert isinstance(at, _RedirectingServer)
        body = b"[]"
        if self.path.startswith("/api"):
            self.send_response(307 if self.command == "GET" else 302)
            self.send_header("Location", at.place)
        else:
            at.headers.append(dict(self.headers))
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class _RedirectingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Redirects)
        self.place, self.headers = "/elsewhere", list[dict[str, str]]()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


def test_an_api_that_redirects_to_another_host_hands_it_no_credentials() -> None:
    """A proxy before an API sends to its page of log-in, which got the key and counted as a healthy API."""
    with _RedirectingServer("127.0.0.1") as own, _RedirectingServer("127.0.0.2") as other:
        try:
            api = Api(
                f"http://127.0.0.1:{own.server_port}/api",
                False,
                {"PREFECT_API_KEY": "pnu_hush", "PREFECT_CLIENT_CUSTOM_HEADERS": '{"X-Gate": "hush"}'},
            )
            own.place = f"http://127.0.0.2:{other.server_port}/login"
            assert (api.answers(), api.online("here"), api.deployments()) == (False, False, [])
            assert other.headers == []
            own.place = f"http://127.0.0.1:{own.server_port}/elsewhere"
            assert api.answers() and api.deployments() == []
            assert [headers.get("Authorization") for headers in own.headers] == [None, "Bearer pnu_hush"]
        finally:
            own.shutdown()
            other.shutdown()
