"""Completions of an encoder-decoder: what is counted."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from configs.serving.settings import ServingLimits
from engine.answering.app import AnsweringServer, _complete


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
        return answer["usage"]

    assert usage() == {"prompt_tokens": 3, "completion_tokens": 2 + 4, "total_tokens": 9}
    assert usage(ignore_eos=True)["completion_tokens"] == 8
