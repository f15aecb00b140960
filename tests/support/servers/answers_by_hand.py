"""Answers of a server without ranks: a test gives them their tokens.

generation, router = service(tmp_path)
form, choices = await generation.complete(completion(max_tokens=4))
give(choices[0], new(5), new(6, "length"))
"""

import json
from pathlib import Path
from typing import Any

from configs.serving.settings import ServingSettings
from engine.prompts.tokenizer import load_tokenizer
from engine.serving.http.answers import GrowingChoice
from engine.serving.http.endpoints import Generation
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.replicas import Router
from engine.serving.http.schema import CompletionRequest, read_request
from engine.serving.messages import NewToken
from tests.support.servers.inference_server import TINY


def service(tmp_path: Path, tokenizer: bool = False) -> tuple[Generation, Router]:
    """Return both endpoints over a replica that is not started."""
    settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=32, blocks=8)
    made = load_tokenizer(TINY / "tokenizer.json") if tokenizer else None
    model = ServedModel("m", 4096, 32, frozenset(), made, None, {})
    metrics = ServerMetrics("m")
    router = Router(settings, tmp_path / "settings.json", metrics)
    return Generation(model, settings, router, metrics), router


def completion(**fields: Any) -> CompletionRequest:
    """Return a request for completions of a prompt of two tokens."""
    return read_request(json.dumps({"model": "m", "prompt": [1, 2], **fields}).encode(), CompletionRequest)


def give(choice: GrowingChoice, *tokens: NewToken) -> None:
    """Let an answer have tokens, one after the other."""
    for token in tokens:
        choice.answer.put([token])


def new(token: int, reason: str | None = None, **fields: Any) -> NewToken:
    """Return a token as the ranks report it."""
    return NewToken("", token, reason, **fields)
