"""Answers to one request as they end: each frees its slot, and an error of one ends all of them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from configs.serving.settings import ServingSettings
from engine.prompts.tokenizer import load_tokenizer
from engine.serving.http.endpoints import Generation, GrowingChoice, whole
from engine.serving.http.errors import ApiError
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.replicas import Router
from engine.serving.http.schema import ChatRequest, CompletionRequest, read_request
from engine.serving.messages import NewToken
from tests.support.servers.inference_server import TINY


def service(tmp_path: Path, tokenizer: bool = False) -> tuple[Generation, Router]:
    """Both endpoints over a replica that is not started: tokens are given by hand."""
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=32, blocks=8)
    made = load_tokenizer(TINY / "tokenizer.json") if tokenizer else None
    model = ServedModel("m", 4096, 32, frozenset(), made, None, {})
    metrics = ServerMetrics("m")
    router = Router(settings, tmp_path / "settings.json", metrics)
    return Generation(model, settings, router, metrics), router


def completion(**fields: Any) -> CompletionRequest:
    return read_request(json.dumps({"model": "m", "prompt": [1, 2], **fields}).encode(), CompletionRequest)


def give(choice: GrowingChoice, *tokens: NewToken) -> None:
    for token in tokens:
        choice.answer.put(token)


def new(token: int, reason: str | None = None, **fields: Any) -> NewToken:
    return NewToken("", token, reason, **fields)


def test_a_stop_string_frees_the_slot_while_other_answers_go_on(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[bool], dict[str, Any]]:
        generation, router = service(tmp_path)
        form, choices = await generation.complete(completion(n=2, stop=[" 7"]))
        working = asyncio.create_task(whole(generation, form, choices))
        give(choices[0], new(5), new(7), new(8))
        give(choices[1], new(5))
        await asyncio.sleep(0.01)
        held = [choice.answer.key in router.replicas[0].answers for choice in choices]
        give(choices[1], new(6, "length"))
        return held, await working

    held, answer = asyncio.run(scenario())
    assert held == [False, True]
    assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [(" 5", "stop"), (" 5 6", "length")]
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 4


def test_an_unexpected_error_in_one_answer_ends_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        generation, router = service(tmp_path)
        form, choices = await generation.complete(completion(n=2))
        choices[1].text.add = _broken  # type: ignore[method-assign]
        give(choices[1], new(5))
        try:
            await asyncio.wait_for(whole(generation, form, choices), 30)
        finally:
            assert not router.answers

    with pytest.raises(OverflowError):
        asyncio.run(scenario())


def _broken(token: int) -> str:
    raise OverflowError


def test_parts_of_characters_keep_the_likeliest_log_probability_and_have_no_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TINY / "tokenizer.json")
    first, second = [one for one in range(300) if tokenizer.decode([one]) == "\ufffd"][:2]

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        generation, _ = service(tmp_path, tokenizer=True)
        form, choices = await generation.complete(completion(logprobs=2))
        give(choices[0], new(first, "length", logprob=-0.5, top=((first, -0.5), (second, -3.0))))
        answer = await whole(generation, form, choices)
        form._chat = True
        return answer, form._choice(choices[0], {}, [new(first, logprob=-0.5)], None)

    answer, chat = asyncio.run(scenario())
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]
    assert chat["logprobs"]["content"][0]["bytes"] is None


def test_a_conversation_without_room_for_an_answer_is_refused_by_its_length(tmp_path: Path) -> None:
    async def scenario() -> None:
        generation, _ = service(tmp_path)
        object.__setattr__(generation._model, "encode_chat", lambda messages: list(range(40)))
        asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        await generation.chat(read_request(json.dumps(asked).encode(), ChatRequest))

    with pytest.raises(ApiError, match=r"^messages: 40 tokens leave no room"):
        asyncio.run(scenario())
