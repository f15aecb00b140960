"""The HTTP application: endpoints, limits, the token, health and metrics.

    app = serving_app(server)                # a FastAPI application

Every refusal has the form of OpenAI's API. A body is read with a limit of size and time before it is parsed.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from configs.serving.settings import ServingSettings
from engine.serving.http.admission import application, authorise, read_body
from engine.serving.http.answers import GrowingChoice
from engine.serving.http.endpoints import Generation, whole
from engine.serving.http.errors import ApiError
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.protocol import chunk_writer
from engine.serving.http.replicas import Router
from engine.serving.http.responses import ResponseForm
from engine.serving.http.schema import ChatRequest, CompletionRequest, GenerationRequest, read_request
from engine.serving.http.streaming import EventStream, disconnected, events


@dataclass
class Server:
    """A running server. api_key: the bearer token that requests need; None: none. draining: it takes no more.

    in_progress: see `application`.
    """

    settings: ServingSettings
    model: ServedModel
    router: Router
    metrics: ServerMetrics
    api_key: str | None
    draining: bool = False
    in_progress: int = 0


def serving_app(server: Server) -> FastAPI:
    """Return the application."""
    service = Generation(server.model, server.settings, server.router, server.metrics)

    async def completions(request: Request) -> Response:
        wanted = read_request(await _admitted(request, server), CompletionRequest)
        return await _respond(request, server, service, wanted, *await service.complete(wanted))

    async def chat(request: Request) -> Response:
        wanted = read_request(await _admitted(request, server), ChatRequest)
        return await _respond(request, server, service, wanted, *await service.chat(wanted))

    def readiness() -> dict[str, object]:
        state = "draining" if server.draining else "ready" if server.router.ready else "starting"
        replicas = [
            {"replica": one.index, "ready": one.ready, "failed_starts": one.failures} for one in server.router.replicas
        ]
        return {"status": state, "replicas": replicas}

    answers = {"/v1/completions": completions, "/v1/chat/completions": chat}
    return application(server, answers, server.metrics.write, readiness, server.metrics.refused)


async def _admitted(request: Request, server: Server) -> bytes:
    """Return the body of a request that may be answered. Raises ApiError 401, 408, 413, 415, 503."""
    authorise(request, server.api_key)
    if server.draining:
        raise ApiError(503, "the server is shutting down", retry_after=30)
    if not any(replica.ready for replica in server.router.replicas):
        failed = server.router.replicas[0].last_error
        raise ApiError(503, f"the model is being loaded{f' again: {failed}' if failed else ''}", retry_after=5)
    return await read_body(request, server.settings.limits)


async def _respond(
    request: Request,
    server: Server,
    service: Generation,
    wanted: GenerationRequest,
    form: ResponseForm,
    choices: list[GrowingChoice],
) -> Response:
    if wanted.stream:
        writer = chunk_writer(request.scope)
        stream = events(service, form, choices, wanted.stream_options, server.metrics.refused, writer)
        return EventStream(stream, lambda: service.end(choices))
    work = asyncio.ensure_future(whole(service, form, choices))
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(work.result())
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await task
        service.end(choices)
