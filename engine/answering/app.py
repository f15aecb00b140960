"""Requests of OpenAI's API for models that do not chat: embeddings of encoders, completions of encoder-decoders.

    app = answering_app(service)  # POST /v1/embeddings or /v1/completions, /v1/models, /metrics, /healthz, /readyz

Completions are greedy: `temperature` other than 0 is refused, as is every field that is not listed below.
"""

import asyncio
import base64
import secrets
import struct
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import Field

from configs.plans.pooling import TextRules
from configs.serving.settings import ServingSettings
from engine.answering.computing import Computing
from engine.serving.http.admission import application, authorise, read_body
from engine.serving.http.errors import ApiError, other_model
from engine.serving.http.model import LONG_TEXT, ServedModel
from engine.serving.http.schema import ApiRequest, Prompts, read_request
from engine.serving.http.streaming import disconnected


class EmbeddingRequest(ApiRequest):
    """Texts or token ids, one or several. base64: of float32, little-endian, as OpenAI's client asks by itself."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"


class SourceRequest(ApiRequest):
    """Sources of an encoder-decoder. ignore_eos: exactly max_tokens tokens. n, stream, top_p: as clients send them by
    themselves, with the one value that is supported."""

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=1)
    temperature: float | None = Field(0.0, ge=0, le=0)
    n: int | None = Field(1, ge=1, le=1)
    stream: Literal[False] | None = False
    top_p: float | None = Field(1.0, ge=1, le=1)
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False


class Figures:
    """What /metrics answers."""

    def __init__(self, model: str) -> None:
        self.registry, label = CollectorRegistry(), ("model_name",)
        self._model = model
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests in the queue", label, registry=self.registry)
        self._success = Counter("vllm:request_success", "Finished requests", label, registry=self.registry)
        self._refused = Counter(
            "rankwise:requests_refused", "Requests answered with an error", (*label, "status"), registry=self.registry
        )
        self._whole = Histogram("vllm:e2e_request_latency_seconds", "Time of a request", label, registry=self.registry)
        for metric in (self._success, self._whole):
            metric.labels(model)  # there, as 0, before the first request

    def finished(self, seconds: float) -> None:
        """Note an answer."""
        self._success.labels(self._model).inc()
        self._whole.labels(self._model).observe(seconds)

    def refused(self, status: int) -> None:
        """Note a refusal."""
        self._refused.labels(self._model, str(status)).inc()

    def write(self, waiting: int) -> bytes:
        """Return the figures as text."""
        self._waiting.labels(self._model).set(waiting)
        return generate_latest(self.registry)


@dataclass
class AnsweringServer:
    """A running server. encodes: it answers with vectors; draining: it takes no more.

    in_progress: see `application`. rules: what is done to texts to be encoded.
    """

    settings: ServingSettings
    model: ServedModel
    computing: Computing
    figures: Figures
    api_key: str | None
    encodes: bool
    draining: bool = False
    in_progress: int = 0
    rules: TextRules = field(default_factory=TextRules)


def answering_app(service: AnsweringServer) -> FastAPI:
    """Return the application."""
    path, work = ("/v1/embeddings", _embed) if service.encodes else ("/v1/completions", _complete)

    async def answer(request: Request) -> Response:
        began = time.perf_counter()
        body = await _admitted(request, service)
        found = await _while_wanted(work(body, service), request, service.settings.limits.request_seconds)
        if found is None:
            return Response(status_code=499)  # nobody reads it
        service.figures.finished(time.perf_counter() - began)
        return JSONResponse(found)

    def metrics() -> bytes:
        return service.figures.write(service.computing.waiting)

    def readiness() -> dict[str, object]:
        return {"status": "draining" if service.draining else "ready" if service.computing.ready else "starting"}

    return application(service, {path: answer}, metrics, readiness, service.figures.refused)


async def _while_wanted(
    work: Coroutine[Any, Any, dict[str, object]], request: Request, limit_seconds: float
) -> dict[str, object] | None:
    """Return what `work` finds; None: the client has gone away, and its further batches are not computed.

    Raises ApiError 504, and what `work` raises.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, timeout=limit_seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if gone.done():
            return None
        raise ApiError(504, f"no answer within {limit_seconds:.0f} s")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _embed(body: bytes, service: AnsweringServer) -> dict[str, object]:
    wanted = read_request(body, EmbeddingRequest)
    prompts = await _prompts(body, wanted.model, wanted.input, service, "input", 0)
    vectors: list[list[float]] = []
    for first in range(0, len(prompts), service.settings.max_sequences):
        some = prompts[first : first + service.settings.max_sequences]
        vectors += (await service.computing.ask(some, 0))["vectors"]
    written: list[list[float] | str] = [*vectors]
    if wanted.encoding_format == "base64":
        written = [base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(written)]
    return {"object": "list", "model": service.model.name, "data": data, "usage": _usage(prompts, 0)}


async def _complete(body: bytes, service: AnsweringServer) -> dict[str, object]:
    wanted = read_request(body, SourceRequest)
    count = wanted.max_tokens or 16
    prompts = await _prompts(body, wanted.model, wanted.prompt, service, "prompt", count)
    answers: list[list[int]] = []
    for first in range(0, len(prompts), service.settings.max_sequences):
        some = prompts[first : first + service.settings.max_sequences]
        answers += (await service.computing.ask(some, count))["tokens"]
    choices, written = [], 0
    for index, tokens in enumerate(answers):
        end = len(tokens)
        if not wanted.ignore_eos:
            end = next((place for place, token in enumerate(tokens) if token in service.model.end_tokens), end)
        tokenizer = service.model.tokenizer
        text = " ".join(map(str, tokens[:end])) if tokenizer is None else tokenizer.decode(tokens[:end])
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None}
        choice["finish_reason"] = "length" if end == len(tokens) else "stop"
        written += min(end + 1, len(tokens))  # an end-of-text token counts, what was computed after it does not
        choices.append(choice | ({"token_ids": tokens[:end]} if wanted.return_token_ids else {}))
    usage = _usage(prompts, written)
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model.name,
        "choices": choices,
        "usage": usage,
    }


def _usage(prompts: list[list[int]], written: int) -> dict[str, int]:
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


async def _prompts(
    body: bytes, model: str, given: Prompts, service: AnsweringServer, field: str, new_tokens: int
) -> list[list[int]]:
    """Return token ids of all prompts; of a long body in another thread. Raises as `_tokenised`."""
    if len(body) > LONG_TEXT:
        return await asyncio.to_thread(_tokenised, model, given, service, field, new_tokens)
    return _tokenised(model, given, service, field, new_tokens)


def _tokenised(model: str, given: Prompts, service: AnsweringServer, field: str, new_tokens: int) -> list[list[int]]:
    """Return token ids of all prompts. Raises ApiError 400, 404."""
    if model != service.model.name:
        raise other_model(service.model.name)
    one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    each: list[Any] = [given] if one else list(given)
    if not 1 <= len(each) <= service.settings.limits.max_queue:
        raise ApiError(400, f"{field}: expected 1 to {service.settings.limits.max_queue} prompts", field)
    found = [
        service.model.encode(service.rules.applied(prompt), field=field) if isinstance(prompt, str) else list(prompt)
        for prompt in each
    ]
    limit, code = service.settings.max_length, "context_length_exceeded"
    if new_tokens >= limit:
        raise ApiError(400, f"max_tokens: {new_tokens} new tokens; at most {limit - 1}", "max_tokens", code)
    for ids in found:
        service.model.check_tokens(ids)
        if len(ids) > limit:
            raise ApiError(400, f"{field}: {len(ids)} tokens exceed the {limit} of this server", field, code)
    return found


async def _admitted(request: Request, service: AnsweringServer) -> bytes:
    """Return the body of a request that may be answered. Raises ApiError 401, 408, 413, 415, 503."""
    authorise(request, service.api_key)
    if service.draining:
        raise ApiError(503, "the server is shutting down", retry_after=30)
    return await read_body(request, service.settings.limits)
