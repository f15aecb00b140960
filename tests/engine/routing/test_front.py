"""A front over real servers: tokens, refusals passed on, a backend that dies, a configuration that changes."""

import gzip
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from configs.serving.deployment import FrontConfig, FrontState, RoutedServer
from tests.support.fronts import running_front
from tests.support.patience import patient
from tests.support.run_folders.studies import wait_until


class Upstream:
    """A server that answers with its name; `status`, `cut`, `dies`, `packs` and `pauses` say how else."""

    def __init__(self, name: str) -> None:
        self.name, self.status, self.cut, self.dies, self.keys = name, 200, False, False, list[str | None]()
        self.away, self.packs, self.pauses, self.gets = False, False, False, list[dict[str, str]]()
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                return

            def do_GET(self) -> None:
                if upstream.away:
                    self.close_connection = True
                    return
                if self.path != "/readyz":
                    upstream.gets.append({name.lower(): value for name, value in self.headers.items()})
                self._send(200, b"{}")

            def do_POST(self) -> None:
                upstream.keys.append(self.headers.get("Authorization"))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                upstream.asked.set()
                if upstream.pauses:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun")
                    self.close_connection = True
                upstream.go_on.wait(600)  # longer than any limit of a test
                if upstream.pauses:
                    return
                if upstream.dies:
                    self.close_connection = True
                    return
                if upstream.cut:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
                    self.close_connection = True
                    return
                self._send(upstream.status, json.dumps({"name": upstream.name}).encode())

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                if upstream.packs:
                    data = gzip.compress(data)
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Set-Cookie", f"session=of-{upstream.name}; Path=/")
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def backend(self) -> RoutedServer:
        return RoutedServer(
            name=self.name, url=f"http://127.0.0.1:{self._server.server_port}", key=f"key-of-{self.name}"
        )

    def come_back(self) -> None:
        self.dies = self.away = False

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def upstreams(*names: str) -> Iterator[list[Upstream]]:
    made = [Upstream(name) for name in names]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def post(url: str, key: str = "front-key") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json={"a": 1}, headers=headers, timeout=600, trust_env=False)


def backends(folder: Path) -> set[str]:
    """Those that the front tells of; none before its first word."""
    if not (folder / "state.json").exists():
        return set()
    return {one.name for one in FrontState.model_validate_json((folder / "state.json").read_text()).backends}


def config(*backends: RoutedServer, wait_seconds: float = 5.0) -> FrontConfig:
    return FrontConfig(key="front-key", backends=backends, wait_seconds=wait_seconds)


def test_a_token_is_required_and_the_backends_own_is_sent(tmp_path: Path) -> None:
    with upstreams("a") as [one], running_front(tmp_path, config(one.backend)) as url:
        assert post(url, "wrong").status_code == 401
        assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
        answer = post(url)
        assert (answer.status_code, answer.json()) == (200, {"name": "a"})
        assert one.keys == ["Bearer key-of-a"]


def test_a_front_without_a_token_answers_no_page_elsewhere(tmp_path: Path) -> None:
    """A name that points at loopback let a web page use the servers behind, whose tokens the front has."""
    with upstreams("a") as [one], running_front(tmp_path, FrontConfig(backends=(one.backend,))) as url:
        port = url.rpartition(":")[2]
        for name in ("127.0.0.1", "localhost"):
            assert post(f"http://{name}:{port}").json() == {"name": "a"}
        keys = list(one.keys)
        for path in ("/v1/models", "/readyz", "/healthz"):
            answer = httpx.get(url + path, headers={"Host": f"evil.example:{port}"}, timeout=600, trust_env=False)
            assert answer.status_code == 403 and "'evil.example' is refused" in answer.json()["error"]["message"]
        assert one.keys == keys
        assert httpx.get(f"{url}/v1/models", headers={"Host": "localhost"}, timeout=600, trust_env=False).is_success
        assert one.gets[-1]["host"].startswith("127.0.0.1:"), "a server behind sees its own address"


def test_refused_and_unreachable_backends_are_passed_over(tmp_path: Path) -> None:
    with upstreams("a", "b") as [one, two], running_front(tmp_path, config(one.backend, two.backend)) as url:
        one.status = 503
        assert {post(url).json()["name"] for _ in range(4)} == {"b"}
        one.close()
        assert {post(url).json()["name"] for _ in range(4)} == {"b"}
        two.status = 429
        assert post(url).status_code in (429, 503)


@pytest.mark.parametrize("status", [200, 429])
def test_a_compressed_answer_stays_as_it_came(tmp_path: Path, status: int) -> None:
    """A refusal was unpacked and sent with the header of a packed one, which no client could read."""
    with upstreams("a") as (one,), running_front(tmp_path, config(one.backend)) as url:
        one.status, one.packs = status, True
        answer = post(url)
        assert (answer.status_code, answer.json()) == (status, {"name": "a"})
        assert answer.headers["content-encoding"] == "gzip"


def test_an_answer_that_breaks_is_not_repeated(tmp_path: Path) -> None:
    with upstreams("a", "b") as [one, two], running_front(tmp_path, config(one.backend, two.backend)) as url:
        one.cut = True
        with pytest.raises(httpx.RemoteProtocolError):
            post(url)
        assert two.keys == []


def test_a_request_with_which_servers_go_away_does_not_go_round(tmp_path: Path) -> None:
    with upstreams("a", "b") as [one, two], running_front(tmp_path, config(one.backend, two.backend)) as url:
        one.dies = True
        assert post(url).json() == {"name": "b"}, "a single loss is made good"
        before = len(one.keys) + len(two.keys)
        two.dies = True
        answer = post(url)
        assert answer.status_code == 502 and "went away with this request 3 times" in answer.json()["error"]["message"]
        assert len(one.keys) + len(two.keys) - before == 3


def test_a_server_that_a_tunnel_stands_for_is_waited_for(tmp_path: Path) -> None:
    """The tunnel takes connections while its server starts again, and closes them."""
    with upstreams("a") as [one], running_front(tmp_path, config(one.backend, wait_seconds=30.0)) as url:
        assert post(url).status_code == 200
        one.dies = one.away = True
        back = threading.Timer(2.0, one.come_back)
        back.start()
        assert post(url).json() == {"name": "a"}
        back.join()


def test_a_configuration_is_taken_while_requests_come(tmp_path: Path) -> None:
    with upstreams("a", "b") as [one, two], running_front(tmp_path, config(one.backend)) as url:
        names: list[str] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                names.append(post(url).json()["name"])

        thread = threading.Thread(target=ask)
        thread.start()
        drained = config(two.backend, one.backend.model_copy(update={"draining": True}))
        (tmp_path / "front.json").write_text(drained.model_dump_json())
        deadline = time.monotonic() + patient(60)
        while not names or names[-1] != "b":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stop.set()
        thread.join()
        assert names == sorted(names)
        told = FrontState.model_validate_json((tmp_path / "state.json").read_text())
        assert told.failed == 0


def test_a_backend_that_was_taken_away_is_forgotten_with_its_last_request(tmp_path: Path) -> None:
    with upstreams("a", "b") as [one, two], running_front(tmp_path, config(one.backend)) as url:
        one.go_on.clear()
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(post(url).status_code))
        asking.start()
        assert one.asked.wait(600)
        (tmp_path / "front.json").write_text(config(two.backend).model_dump_json())
        wait_until(lambda: backends(tmp_path) == {"a", "b"}, 10, "the other backend to be taken")
        one.go_on.set()
        asking.join()
        wait_until(lambda: backends(tmp_path) == {"b"}, 10, "the first backend to be forgotten")
        assert answers == [200]


@pytest.mark.parametrize("key", ["plain", "schlüssel à"])
def test_a_token_is_its_bytes(tmp_path: Path, key: str) -> None:
    with upstreams("a") as [one]:
        backend = one.backend.model_copy(update={"key": key})
        with running_front(tmp_path, config(backend).model_copy(update={"key": key})) as url:
            for given, status in ((key, 200), (key[:-1] + "b", 401)):
                headers = {b"Authorization": f"Bearer {given}".encode()}
                answer = httpx.post(url + "/v1/completions", json={}, headers=headers, timeout=600, trust_env=False)
                assert answer.status_code == status
        assert one.keys == [f"Bearer {key}".encode().decode("latin-1")]


def test_a_request_waits_for_a_backend_and_then_says_so(tmp_path: Path) -> None:
    gone = RoutedServer(name="gone", url="http://127.0.0.1:9")
    with running_front(tmp_path, config(gone, wait_seconds=0.5)) as url:
        answer = post(url)
        assert answer.status_code == 503 and "no server of this address is ready" in answer.text


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_hangs_up_before_its_answer_frees_its_place(tmp_path: Path, begun: bool) -> None:
    """The server behind is told so by its closed connection, and stops computing.

    A stream has begun before its first token: while that was waited for, nobody noticed.
    """
    with upstreams("a") as [one], running_front(tmp_path, config(one.backend)) as url:
        one.pauses = begun
        one.go_on.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/v1/completions", json={}, headers={"Authorization": "Bearer front-key"},
                       timeout=httpx.Timeout(60, read=1.0), trust_env=False)  # fmt: skip
        assert one.asked.wait(600)

        def in_flight() -> int:
            return sum(each.in_flight for each in state(tmp_path).backends)

        wait_until(lambda: in_flight() == 0, 60, "the place of a client that is gone")
        assert not one.go_on.is_set() and state(tmp_path).failed == 0
        one.go_on.set()


def test_a_body_that_does_not_arrive_is_refused(tmp_path: Path) -> None:
    with upstreams("a") as [one]:
        slow = config(one.backend).model_copy(update={"body_seconds": 0.3})
        with (
            running_front(tmp_path, slow) as url,
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw,
        ):
            raw.settimeout(60)
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer front-key\r\n"
                        b"Content-Length: 10\r\n\r\n{")  # fmt: skip
            assert raw.recv(4096).startswith(b"HTTP/1.1 408")
        assert one.keys == []


def state(folder: Path) -> FrontState:
    return FrontState.model_validate_json((folder / "state.json").read_text())


def test_escaped_paths_and_requests_for_web_sockets_are_passed_on(tmp_path: Path) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Authorization": "Bearer front-key"}
    with upstreams("a") as [one], running_front(tmp_path, config(one.backend)) as url:
        headers = {"Authorization": "Bearer front-key"}
        for path in ("/v1/a%00b", "/v1/models%3Fx=%C3%A9"):
            assert httpx.get(f"{url}{path}", headers=headers, timeout=600, trust_env=False).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers=upgrade, timeout=600, trust_env=False).status_code == 200


def test_a_client_gets_its_own_cookies_and_headers_alone(tmp_path: Path) -> None:
    """A backend's cookie for one client went along with every request after it, whoever sent it."""
    with upstreams("a") as [one], running_front(tmp_path, config(one.backend)) as url:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(2):
            with socket.create_connection((host, int(port)), timeout=600) as sent:
                lines = ("GET /v1/models HTTP/1.1", "Host: x", "Authorization: Bearer front-key", "Connection: close")
                sent.sendall("\r\n".join((*lines, "", "")).encode())
                answer = b"".join(iter(lambda: sent.recv(65536), b""))
            assert b"session=of-a" in answer, "the client has its cookie"
        own = {"Cookie": "session=mine", "Accept-Encoding": "br", "Authorization": "Bearer front-key"}
        httpx.get(f"{url}/v1/models", headers=own, timeout=600, trust_env=False)
    *bare, last = one.gets
    for headers in bare:
        assert not headers.keys() & {"cookie", "accept", "accept-encoding", "user-agent"}
    assert (last["cookie"], last["accept-encoding"]) == ("session=mine", "br")


@pytest.mark.parametrize("target", ["@127.0.0.1:{port}/v1/models", "http://127.0.0.1:{port}/v1/models", "*"])
def test_a_path_cannot_name_another_machine(tmp_path: Path, target: str) -> None:
    with upstreams("a", "elsewhere") as [one, other], running_front(tmp_path, config(one.backend)) as url:
        host, port = url.removeprefix("http://").split(":")
        asked = target.format(port=other.backend.url.rpartition(":")[2])
        with socket.create_connection((host, int(port)), timeout=600) as sent:
            lines = (f"POST {asked} HTTP/1.1", "Host: x", "Authorization: Bearer front-key", "Connection: close")
            sent.sendall("\r\n".join((*lines, "Content-Length: 0", "", "")).encode())
            answer = b"".join(iter(lambda: sent.recv(65536), b""))
        assert other.keys == [] and answer.startswith(b"HTTP/1.1 400")


def test_more_requests_at_once_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    """Each has two sockets here. Where one could not be made all servers counted as not ready, for every request."""
    with upstreams("a") as [one], ExitStack() as started:
        one.go_on.clear()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        try:
            backend = one.backend.model_copy(update={"max_in_flight": 100})
            url = started.enter_context(running_front(tmp_path, config(backend)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with ThreadPoolExecutor(60) as clients:
            answers = [clients.submit(post, url) for _ in range(60)]
            wait_until(lambda: len(one.keys) == 60 or any(answer.done() for answer in answers), 60, "the requests")
            one.go_on.set()
            codes = {answer.result().status_code for answer in answers}
    assert codes == {200}
