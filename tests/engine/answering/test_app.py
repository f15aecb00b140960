"""Completions of an encoder-decoder: what is counted."""

import asyncio
import json
import re
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from configs.common.files.project_files import ROOT
from configs.plans.pooling import TextRules
from configs.serving.settings import ServingLimits
from engine.answering.app import (
    AnsweringServer,
    EmbeddingRequest,
    Figures,
    SourceRequest,
    _complete,
    _embed,
    _tokenised,
    answering_app,
)
from engine.serving.http.errors import ApiError
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.schema import ChatRequest, CompletionRequest, read_request


def test_tokens_behind_the_end_of_an_answer_are_not_counted() -> None:
    """The decoder always computes `max_tokens`; 1 ends an answer."""

    async def ask(tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        return {"tokens": [[7, 1, 9, 9], [7, 8, 9, 9]]}

    service: Any = SimpleNamespace(
        settings=SimpleNamespace(limits=ServingLimits(), max_length=16, max_sequences=4),
        model=SimpleNamespace(name="m", tokenizer=None, end_tokens={1}, check_tokens=lambda ids: None),
        computing=SimpleNamespace(ask=ask),
    )

    def usage(**fields: Any) -> Any:
        body = json.dumps({"model": "m", "prompt": [[2, 3], [4]], "max_tokens": 4, **fields}).encode()
        given: AnsweringServer = service
        answer: Any = asyncio.run(_complete(body, given))
        Completion.model_validate(answer)  # as strict clients read it: `id` was missing
        return answer["usage"]

    assert usage() == {"prompt_tokens": 3, "completion_tokens": 2 + 4, "total_tokens": 9}
    assert usage(ignore_eos=True)["completion_tokens"] == 8


@pytest.mark.parametrize(("texts", "elsewhere"), [(["a" * 900] * 30, True), (["a" * 900] * 3, False)])
def test_long_texts_are_tokenised_in_another_thread(texts: list[str], elsewhere: bool) -> None:
    """Every other request, of health too, waited for them."""
    threads: set[int] = set()

    def encode(text: str, field: str) -> list[int]:
        threads.add(threading.get_ident())
        return [1]

    async def ask(tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        return {"vectors": [[1.0]] * len(tokens)}

    service: Any = SimpleNamespace(
        settings=SimpleNamespace(limits=ServingLimits(), max_length=16, max_sequences=4),
        model=SimpleNamespace(name="m", check_tokens=lambda ids: None, encode=encode),
        computing=SimpleNamespace(ask=ask),
        rules=TextRules(),
    )
    answer = asyncio.run(_embed(json.dumps({"model": "m", "input": texts}).encode(), service))
    assert len(answer["data"]) == len(texts)  # type: ignore[arg-type]
    assert (threading.get_ident() not in threads) is elsewhere


def test_openais_client_gets_embeddings_without_naming_a_form() -> None:
    """It asks for base64 where the caller names none."""
    vectors = [[0.5, -0.25, 1.0], [1 / 3, 0.0, 2.0]]

    async def ask(tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        return {"vectors": vectors[: len(tokens)]}

    service: Any = SimpleNamespace(
        settings=SimpleNamespace(limits=ServingLimits(), max_length=16, max_sequences=4),
        model=SimpleNamespace(name="m", check_tokens=lambda ids: None),
        computing=SimpleNamespace(ask=ask),
    )

    def answered(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=asyncio.run(_embed(request.content, service)))

    client = openai.OpenAI(
        base_url="http://x/v1", api_key="k", http_client=httpx.Client(transport=httpx.MockTransport(answered))
    )
    for given in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model="m", input=[[1, 2], [3]], **given)  # type: ignore[call-overload]
        assert [one.embedding for one in found.data] == [pytest.approx(vector) for vector in vectors]
        assert found.usage.prompt_tokens == found.usage.total_tokens == 3


def test_texts_are_encoded_by_the_models_own_rules() -> None:
    asked: list[str] = []

    def encode(text: str, field: str) -> list[int]:
        asked.append(text)
        return [1]

    settings: Any = SimpleNamespace(name="m", limits=ServingLimits(), max_length=16, max_sequences=4)
    model: Any = SimpleNamespace(name="m", check_tokens=lambda ids: None, encode=encode)
    rules = TextRules(prompt="query: ", lower=True)
    service = AnsweringServer(settings, model, None, Figures("m"), None, encodes=True, rules=rules)  # type: ignore[arg-type]
    assert _tokenised("m", ["How", "B"], service, "input", 0) == [[1], [1]]
    assert asked == ["query: how", "query: b"]


@pytest.mark.parametrize(("leaves", "batches"), [(True, 1), (False, 2)])
def test_a_request_is_given_up_when_its_client_goes_or_its_time_is_over(leaves: bool, batches: int) -> None:
    """Every batch of it was computed, and each had the time of a whole request."""
    asked: list[int] = []
    begun = asyncio.Event()

    async def ask(tokens: list[list[int]], new_tokens: int) -> dict[str, Any]:
        asked.append(len(tokens))
        begun.set()
        await asyncio.sleep(600 if leaves or len(asked) == 2 else 0.01)
        return {"vectors": [[1.0]] * len(tokens)}

    limits = ServingLimits(request_seconds=600 if leaves else 3.0)
    settings: Any = SimpleNamespace(name="m", host="127.0.0.1", limits=limits, max_length=16, max_sequences=4)
    model: Any = SimpleNamespace(name="m", check_tokens=lambda ids: None)
    computing: Any = SimpleNamespace(ask=ask, ready=True)
    figures = Figures("m")
    app = answering_app(AnsweringServer(settings, model, computing, figures, None, encodes=True))
    body = json.dumps({"model": "m", "input": [[1]] * 12}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [], "query_string": b""}
    sent: list[Any] = []

    async def scenario() -> None:
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await begun.wait()
            await asyncio.sleep(0 if leaves else 600)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(app(scope, receive, send), 60)

    asyncio.run(scenario())
    assert (sent[0]["status"], asked) == (499 if leaves else 504, [4] * batches)
    assert b'vllm:request_success_total{model_name="m"} 0.0' in figures.write(0)


def test_the_fields_of_requests_are_in_the_page_on_serving() -> None:
    page = (ROOT / "docs" / "how-to" / "serving" / "serve.md").read_text()
    paragraph = re.split(r"\n\n", page.partition("Supported fields of requests to decoders: ")[2])[0]
    decoders, _, others = paragraph.partition("Encoder-decoders take ")
    of_two, _, of_encoders = others.partition("encoders `encoding_format`")
    named = set(re.findall(r"`(\w+)", paragraph))
    fields = (CompletionRequest.model_fields | ChatRequest.model_fields).keys() - {"model", "prompt", "messages"}
    assert fields - named == set()
    assert set(re.findall(r"`(\w+)", decoders)) - fields == set()
    assert set(re.findall(r"`(\w+)", of_two)) == SourceRequest.model_fields.keys() - {"model", "prompt", "user"}
    assert EmbeddingRequest.model_fields.keys() == {"model", "input", "encoding_format", "user"} and of_encoders


def test_the_page_on_serving_names_the_metrics_that_there_are() -> None:
    page = (ROOT / "docs" / "how-to" / "serving" / "serve.md").read_text().partition("## Metrics")[2]
    of_all, _, of_few = page.partition("Servers of encoders")
    for registry, text in ((ServerMetrics("m").registry, of_all), (Figures("m").registry, of_few)):
        there = {metric.name + "_total" * (metric.type == "counter") for metric in registry.collect()}
        assert there == set(re.findall(r"`((?:vllm|rankwise):\w+)`", text))


@pytest.mark.parametrize("fields", [{"stream": False, "n": 1, "top_p": 1}, {"stream": None, "n": None}])
def test_what_clients_send_by_themselves_is_taken(fields: dict[str, Any]) -> None:
    """A client that always sends `stream: false` was told that it is no field."""
    read_request(json.dumps({"model": "m", "prompt": [1], **fields}).encode(), SourceRequest)
    for name, value in (("stream", True), ("n", 2), ("top_p", 0.9)):
        with pytest.raises(ApiError, match=name):
            read_request(json.dumps({"model": "m", "prompt": [1], name: value}).encode(), SourceRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": [1], "max_tokens": 16}, "max_tokens"), ({"prompt": [1] * 17, "max_tokens": 4}, "prompt")],
)
def test_what_is_too_long_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    """Too many new tokens were a fault of the prompt, and neither had the code by which clients know it."""
    service: Any = SimpleNamespace(
        settings=SimpleNamespace(limits=ServingLimits(), max_length=16, max_sequences=4),
        model=SimpleNamespace(name="m", tokenizer=None, end_tokens={1}, check_tokens=lambda ids: None),
    )
    with pytest.raises(ApiError, match=rf"^{param}: ") as caught:
        asyncio.run(_complete(json.dumps({"model": "m", **fields}).encode(), service))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "context_length_exceeded")
