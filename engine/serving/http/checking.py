"""What a server would refuse of some requests, found out without its ranks: loading a model may take minutes.

    python -m engine.serving.http.checking SETTINGS_JSON < BODIES_JSON        # a list of bodies of requests

Prints the first refusal, {"number": 1, "message": ..., "field": ...}, or null. Exit code 1: the model cannot be read.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.serving.settings import ServingSettings
from engine.serving.http.errors import ApiError
from engine.serving.http.model import ServedModel
from engine.serving.http.schema import ChatRequest, CompletionRequest, read_request


def first_refusal(model: ServedModel, bodies: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first body that is refused, from 1, and why."""
    for number, body in enumerate(bodies, 1):
        chat = "messages" in body
        try:
            read_request(json.dumps(body).encode(), ChatRequest if chat else CompletionRequest)
            prompt = model.encode_chat(body["messages"]) if chat else model.encode(body["prompt"])
            model.check_tokens(prompt)
            model.check_room(prompt, body.get("max_tokens", 1))
        except ApiError as error:
            return {"number": number, "message": error.message, "field": error.param}
    return None


def main(arguments: list[str]) -> int:
    """Check the bodies on standard input. Returns the exit code."""
    try:
        model = ServedModel.read(read_model(Path(arguments[0]), ServingSettings, PLAN_BYTES))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(first_refusal(model, json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
