"""Bodies of requests are read with a limit of size and time."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from configs.serving.settings import ServingLimits
from engine.serving.http.admission import authorise, read_body
from engine.serving.http.errors import ApiError


def request(parts: list[bytes], headers: dict[str, str] | None = None, ends: bool = True) -> Request:
    """A request whose body arrives in these parts, and then never ends where it is not to."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if left:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not ends}
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    sent = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": sent}, receive)


def read(asked: Request, **limits: Any) -> bytes:
    return asyncio.run(read_body(asked, ServingLimits(**limits)))


def test_a_whole_body_is_returned() -> None:
    assert read(request([b"{", b"}"])) == b"{}"


def test_a_body_that_never_ends_is_refused() -> None:
    with pytest.raises(ApiError, match="did not arrive within") as caught:
        read(request([b"{"], ends=False), body_seconds=0.05)
    assert caught.value.status == 408


@pytest.mark.parametrize("headers", [{}, {"content-length": "9"}])
def test_a_large_body_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        read(request([b"12345", b"6789"], headers), max_body_bytes=8)
    assert caught.value.status == 413


def test_a_compressed_body_is_refused_by_its_encoding() -> None:
    """It was called no JSON, at its first character."""
    with pytest.raises(ApiError, match=r"^Content-Encoding: 'gzip' is not supported") as caught:
        read(request([b"\x1f\x8b"], {"content-encoding": "GZIP"}))
    assert caught.value.status == 415
    assert read(request([b"{}"], {"content-encoding": "identity"})) == b"{}"


def test_the_token_is_compared() -> None:
    authorise(request([]), None)
    authorise(request([], {"authorization": "Bearer right"}), "right")
    authorise(request([], {"authorization": "bearer  schlüssel à "}), "schlüssel à")
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
        with pytest.raises(ApiError) as caught:
            authorise(request([], given), "right")
        assert caught.value.status == 401
