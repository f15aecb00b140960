"""Refusals of requests name the field that is wrong."""

import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from engine.answering.app import EmbeddingRequest
from engine.serving.choosing import next_token
from engine.serving.http.errors import ApiError
from engine.serving.http.schema import ApiRequest, ChatRequest, CompletionRequest, read_request
from engine.serving.sampling import Sampling


def refused(kind: type[ApiRequest], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_request(json.dumps({"model": "m", **fields}).encode(), kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "where", "param"),
    [
        ({"stream": "yes"}, "stream", "stream"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "stream_options"),
        ({"str": 1}, "str", "str"),
        ({"prompt": [1, "a"]}, "prompt", "prompt"),
        ({"stop": 3}, "stop", "stop"),
        ({"logit_bias": {"7": 1e9}}, "logit_bias.7", "logit_bias"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty", "repetition_penalty"),
    ],
)
def test_a_completion_request_is_refused_by_its_field(fields: dict[str, Any], where: str, param: str) -> None:
    error = refused(CompletionRequest, **{"prompt": "a", **fields})
    assert (error.message.partition(":")[0], error.param) == (where, param)


def test_a_message_is_refused_by_its_place() -> None:
    error = refused(ChatRequest, messages=[{"role": "user", "content": None}])
    assert error.message.startswith("messages.0.content: got None")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, ".type: got 'image_url'; input should be 'text'"),
        ({"type": "text", "text": "a", "cache_control": {}}, ".cache_control: not supported by this server"),
        ({"type": "text"}, ".text: missing"),
    ],
)
def test_a_part_of_a_message_is_refused_by_its_field(part: dict[str, Any], message: str) -> None:
    """It was called no string, though a list of parts is taken."""
    content = [{"type": "text", "text": "x"}, part]
    assert refused(ChatRequest, messages=[{"role": "user", "content": content}]).message == (
        f"messages.0.content.1{message}"
    )


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CompletionRequest, {"prompt": [-1] * 5000}, "prompt: got [-1, -1"),
        (CompletionRequest, {"prompt": [[-1] * 5000]}, "prompt: got [[-1, -1"),
        (CompletionRequest, {"prompt": [[]] * 70_000}, "prompt: got [[], []"),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 5000}, "stop: got [1, 1"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * 1000}, "stop_token_ids.0: got -1"),
        (CompletionRequest, {"prompt": "a", **{f"x{number}": 1 for number in range(5000)}}, "x0: not supported"),
        (ChatRequest, {"messages": [1] * 4000}, "messages.0: got 1"),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 5000}]}, "messages.0.content.0: got 1"),
        (ChatRequest, {"messages": [dict.fromkeys(map(str, range(5000)))]}, "messages.0.role: missing"),
        (EmbeddingRequest, {"input": [-1] * 5000}, "input: got [-1, -1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_full_of_faults_is_refused_by_the_first(
    kind: type[ApiRequest], fields: dict[str, Any], message: str
) -> None:
    """To describe each of a million takes the HTTP process seconds and gigabytes."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "m", **fields})
    assert caught.value.error_count() < 20
    assert refused(kind, **fields).message.startswith(message)


def test_the_smallest_penalty_leaves_numbers() -> None:
    """Of a forbidden word too; an error while a token is chosen ends the ranks."""
    penalty = read_request(b'{"model": "m", "prompt": "a", "repetition_penalty": 0.01}', CompletionRequest)
    sampling = Sampling(
        temperature=1.0, top_k=1, repetition_penalty=penalty.repetition_penalty or 0.0, min_tokens=1, banned=(1,)
    )
    assert next_token(np.array([0.5, 2.0, -1.0], dtype=np.float32), sampling, [0, 1, 2], []).token == 0


def test_too_many_tokens_are_refused_before_their_values() -> None:
    given = {str(number): 1e9 for number in range(5000)}
    assert refused(CompletionRequest, prompt="a", logit_bias=given).message == "logit_bias: at most 1024 tokens"


def test_a_request_without_faults_keeps_all_its_fields() -> None:
    bias = {str(number): 1.0 for number in range(1024)}
    fields = {"model": "m", "prompt": [[1, 2]] * 300, "stop": ["a"], "logit_bias": bias, "stop_token_ids": [1] * 1024}
    read = read_request(json.dumps(fields).encode(), CompletionRequest)
    assert read.model_dump(include=set(fields)) == fields
    message = {"role": "user", "content": [{"type": "text", "text": "x"}] * 3, "name": "n"}
    assert read_request(json.dumps({"model": "m", "messages": [message] * 2}).encode(), ChatRequest).messages[1].name


def test_parts_of_a_message_are_lines_of_its_text() -> None:
    """Their words ran together; vLLM and llama.cpp put a line feed between them."""
    parts = [{"type": "text", "text": text} for text in ("All of it.", "Which part?")]
    asked = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    [message] = read_request(json.dumps(asked).encode(), ChatRequest).messages
    assert message.as_template_data() == {"role": "user", "content": "All of it.\nWhich part?"}


def test_null_asks_for_nothing() -> None:
    """Clients write what is not set so, and give a message back as it came."""
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    asked = {"model": "m", "messages": [said], "tools": None, "tool_choice": None, "store": None}
    assert read_request(json.dumps(asked).encode(), ChatRequest).messages[0].content == "x"
    assert refused(ChatRequest, **asked | {"tools": []}).param == "tools"
    assert refused(ChatRequest, **asked | {"messages": [said | {"tool_calls": []}]}).param == "messages.0.tool_calls"
