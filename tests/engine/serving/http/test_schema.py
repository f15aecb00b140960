"""Refusals of requests name the field that is wrong."""

import json
from typing import Any

import pytest

from engine.serving.http.errors import ApiError
from engine.serving.http.schema import ApiRequest, ChatRequest, CompletionRequest, read_request


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
    ],
)
def test_a_completion_request_is_refused_by_its_field(fields: dict[str, Any], where: str, param: str) -> None:
    error = refused(CompletionRequest, **{"prompt": "a", **fields})
    assert (error.message.partition(":")[0], error.param) == (where, param)


def test_a_message_is_refused_by_its_place() -> None:
    error = refused(ChatRequest, messages=[{"role": "user", "content": None}])
    assert error.message.startswith("messages.0.content: got None")
