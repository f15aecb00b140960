"""What every server has in common: its application, the token, the Host of requests, and a body's size and time.

app = application(server, {"/v1/completions": complete}, metrics, readiness, refused)
authorise(request, api_key)                       # ApiError 401
body = await read_body(request, settings.limits)  # ApiError 408, 413, 415
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.common.files.reading import brief
from configs.serving.settings import ServingLimits, ServingSettings
from engine.serving.http.errors import ApiError, answer_errors_in_this_form
from engine.serving.http.hosts import foreign_host, refusal_of
from engine.serving.http.model import ServedModel

Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request."""


class ServesModel(Protocol):
    """A server with one model. api_key: the bearer token that requests need; None: none. in_progress: requests."""

    settings: ServingSettings
    model: ServedModel
    api_key: str | None
    in_progress: int


class _OwnHosts:
    """Refuses requests of an ASGI application that a page elsewhere may have made: see `foreign_host`."""

    def __init__(self, app: ASGIApp, server: ServesModel, refused: Callable[[int], None]) -> None:
        self._app, self._server, self._refused = app, server, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        name = foreign_host(scope.get("headers", ()), server.settings.host, server.api_key)
        if name is None:
            await self._app(scope, receive, send)
            return
        error = ApiError(403, refusal_of(name), code="host_not_allowed")
        self._refused(error.status)
        await JSONResponse(error.body, error.status)(scope, receive, send)


class _Counting:
    """Counts the requests of an ASGI application that are in progress; a path may end with a slash.

    Starlette's redirect to the path without it would name this server's own address, which clients behind a front, a
    proxy or a tunnel do not reach.
    """

    def __init__(self, app: ASGIApp, server: ServesModel) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._server.in_progress += 1
        path = scope.get("path", "")
        if path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        try:
            await self._app(scope, receive, send)
        finally:
            self._server.in_progress -= 1


def application(
    server: ServesModel,
    answers: Mapping[str, Handler],
    metrics: Callable[[], str | bytes],
    readiness: Callable[[], dict[str, object]],
    refused: Callable[[int], None],
) -> FastAPI:
    """Return an application with `answers` by POST, the endpoints of every server, and errors in the API's form.

    metrics: in Prometheus' text format. readiness: what /readyz answers; another `status` than ready is an HTTP 503.
    refused: counts refusals by their status. A request is in progress from its headers on, while its body is read too,
    until all of its response is given to the connection.
    """
    app = FastAPI(title="Rankwise", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    async def models(request: Request) -> Response:
        authorise(request, server.api_key)
        return JSONResponse({"object": "list", "data": [server.model.entry]})

    async def model(request: Request) -> Response:
        authorise(request, server.api_key)
        return JSONResponse(server.model.entry_of(request.path_params["name"]))

    async def figures(request: Request) -> Response:
        authorise(request, server.api_key)
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        state = readiness()
        return JSONResponse(state, 200 if state["status"] == "ready" else 503)

    for path, handler in answers.items():
        # Without FastAPI's parsing of arguments, of which there are none.
        app.add_route(path, handler, methods=["POST"])
    for path, handler in {
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/metrics": figures,
        "/healthz": health,
        "/health": health,  # as vLLM names it
        "/readyz": ready,
    }.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    answer_errors_in_this_form(app, refused)
    app.add_middleware(_OwnHosts, server=server, refused=refused)
    app.add_middleware(_Counting, server=server)
    return app


def authorise(request: Request, api_key: str | None) -> None:
    """Raise ApiError 401 without the bearer token; None: requests need none."""
    if api_key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    # Starlette reads a header's bytes as Latin-1.
    if kind.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1").strip(), api_key.encode()):
        raise ApiError(401, "the Authorization header needs this server's bearer token", code="invalid_api_key")


async def read_body(request: Request, limits: ServingLimits) -> bytes:
    """Return the body of a request.

    Raises ApiError 408 for one that is too slow, 413 for one that is too large, 415 for one that is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding: {brief(encoding)} is not supported; send the body as it is")
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
