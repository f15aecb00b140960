"""Prefect's clients of an API on loopback, whatever proxies the environment names."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.prefect_api import api

_PROXIES = {
    "socks": ("ALL_PROXY", "socks5://127.0.0.1:9"),
    "unknown scheme": ("all_proxy", "socks://127.0.0.1:9"),
    "http": ("http_proxy", "http://127.0.0.1:9"),
    "unreadable exceptions": ("no_proxy", "[::1]"),
}


@pytest.fixture
def healthy() -> Iterator[str]:
    """An API that says that it is healthy."""

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("proxy", _PROXIES.values(), ids=_PROXIES.keys())
def test_an_api_on_loopback_is_asked_without_the_proxies_of_the_environment(
    proxy: tuple[str, str], healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """httpx raised ImportError for a SOCKS proxy, also where NO_PROXY named loopback: runs had no API."""
    monkeypatch.setenv(*proxy)
    if proxy[0] != "no_proxy":
        monkeypatch.setenv("no_proxy", "" if proxy[0] == "http_proxy" else "127.0.0.1")

    async def asked() -> Exception | None:
        async with get_client() as client:
            return await client.api_healthcheck()

    with temporary_settings({PREFECT_API_URL: healthy}):
        with api.quick_client(retries=0) as client:
            assert client.api_healthcheck() is None
        assert asyncio.run(asked()) is None


def test_an_api_elsewhere_is_asked_by_the_proxy_and_says_what_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:9")
    with temporary_settings({PREFECT_API_URL: "http://prefect.example.org/api"}):
        assert "Unknown scheme for proxy URL" in (api.why_unavailable() or "")
