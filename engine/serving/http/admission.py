"""What every server checks before it looks at a request: the token, and the size and time of the body.

authorise(request, api_key)                       # ApiError 401
body = await read_body(request, settings.limits)  # ApiError 408, 413
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from configs.serving.settings import ServingLimits
from engine.serving.http.errors import ApiError

Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request."""


def authorise(request: Request, api_key: str | None) -> None:
    """Raise ApiError 401 without the bearer token; None: requests need none."""
    if api_key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        raise ApiError(401, "the Authorization header needs this server's bearer token", code="invalid_api_key")


async def read_body(request: Request, limits: ServingLimits) -> bytes:
    """Return the body of a request. Raises ApiError 408 for one that is too slow, 413 for one that is too large."""
    body = bytearray()
    too_large = ApiError(413, f"a request has at most {limits.max_body_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the request's body did not arrive within {limits.body_seconds:.0f} s") from None
    return bytes(body)
