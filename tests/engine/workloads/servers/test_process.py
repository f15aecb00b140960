"""Pages and answers of servers that speak HTTP badly."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from engine.workloads.servers.process import fetched, posted


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
