"""A stream has its tokens in order, whatever way they take, and ends quietly with its client, also with one that stays
and does not read."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from engine.serving.http.errors import ApiError
from engine.serving.http.schema import StreamOptions
from engine.serving.http.streaming import EventStream, events
from tests.support.servers.answers_by_hand import completion, give, new, service


def test_the_time_limit_ends_a_stream_that_nobody_reads() -> None:
    ended: list[bool] = []

    async def source() -> AsyncGenerator[bytes, None]:
        async with asyncio.timeout(0.05):
            yield b"data: 1\n\n"

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the client's window is full

    async def scenario() -> None:
        stream = EventStream(source(), lambda: ended.append(True))
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 300)

    asyncio.run(scenario())
    assert ended == [True]


def test_tokens_that_came_together_are_sent_together_each_with_its_event(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[bytes], str]:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion(max_tokens=4))
        sent: list[bytes] = []

        async def read() -> None:
            async for piece in events(generation, form, choices, None, lambda status: None, None):
                sent.append(piece)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        give(choices[0], new(5))
        await asyncio.sleep(0.01)
        give(choices[0], new(6), new(7), new(8, "length"))
        await asyncio.wait_for(reading, 300)
        return sent, generation._metrics.write().decode()

    sent, metrics = asyncio.run(scenario())
    assert [piece.count(b"data: ") for piece in sent] == [1, 4] and sent[1].endswith(b"data: [DONE]\n\n")
    lines = [line for line in b"".join(sent).splitlines() if line]
    told = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
    assert [one["text"] for one in told] == [" 5", " 6", " 7", " 8"]
    assert [one["finish_reason"] for one in told] == [None, None, None, "length"]
    assert 'vllm:generation_tokens_total{model_name="m"} 4.0' in metrics
    assert 'vllm:inter_token_latency_seconds_count{model_name="m"} 3.0' in metrics


def test_a_stream_of_several_answers_that_end_together_ends_once_after_all_of_them(tmp_path: Path) -> None:
    """As they do where each has its `max_tokens`; a client reads no further than the end."""

    async def scenario() -> bytes:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion(n=3))
        options = StreamOptions(include_usage=True)
        source = events(generation, form, choices, options, lambda status: None, None)
        following = asyncio.create_task(_whole(source))
        await asyncio.sleep(0.01)
        for token in (new(5), new(6, "length")):
            for choice in choices:
                give(choice, token)
            await asyncio.sleep(0.01)
        return await asyncio.wait_for(following, 300)

    *told, end = [line[6:] for line in asyncio.run(scenario()).splitlines() if line]
    *tokens, usage = map(json.loads, told)
    found = [(one["choices"][0]["index"], one["choices"][0]["finish_reason"]) for one in tokens]
    assert sorted(found, key=str) == [(index, reason) for index in range(3) for reason in ("length", None)]
    assert usage["usage"]["completion_tokens"] == 6 and end == b"[DONE]"


async def _whole(source: AsyncGenerator[bytes, None]) -> bytes:
    return b"".join([piece async for piece in source])


def test_an_error_comes_after_the_tokens_before_it(tmp_path: Path) -> None:
    async def scenario() -> list[bytes]:
        generation, _ = service(tmp_path)
        form, choices = await generation.complete(completion())
        give(choices[0], new(5))
        choices[0].answer.fail(ApiError(500, "the engine failed", code="engine_failed"))
        return [piece async for piece in events(generation, form, choices, None, lambda status: None, None)]

    token, error = asyncio.run(scenario())
    assert json.loads(token[6:])["choices"][0]["text"] == " 5"
    assert json.loads(error[6:])["error"]["code"] == "engine_failed"


class Client:
    """What a client has got, of a server with chunks; one that does not read takes them no more, and no pieces."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.direct = 0
        self.reads = asyncio.Event()
        self.reads.set()

    @property
    def ready(self) -> bool:
        return self.reads.is_set()

    def write(self, body: bytes) -> None:
        assert self.ready
        self.direct += 1
        self.got.append(body)

    async def follow(self, source: AsyncGenerator[bytes, None]) -> None:
        async for piece in source:
            await self.reads.wait()
            self.got.append(piece)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_keep_their_order_between_those_sent_at_once_and_those_that_waited(seed: int, tmp_path: Path) -> None:
    """The client stops and goes on reading at any moment, and the tasks run at any moment."""
    rng = random.Random(seed)

    async def scenario() -> Client:
        generation, router = service(tmp_path)
        client = Client()
        form, choices = await generation.complete(completion(max_tokens=30))
        options = StreamOptions(include_usage=True, continuous_usage_stats=rng.random() < 0.5)
        source = events(generation, form, choices, options, lambda status: None, client)  # type: ignore[arg-type]
        following = asyncio.create_task(client.follow(source))
        for number in range(30):
            if rng.random() < 0.3:
                client.reads.clear() if client.ready else client.reads.set()
            for _ in range(rng.choice((0, 0, 1, 2, 5))):
                await asyncio.sleep(0)
            give(choices[0], new(number, "length" if number == 29 else None))
        client.reads.set()
        await asyncio.wait_for(following, 300)
        assert not router.answers
        assert 'vllm:generation_tokens_total{model_name="m"} 30.0' in generation._metrics.write().decode()
        return client

    client = asyncio.run(scenario())
    *told, end = [line[6:] for line in b"".join(client.got).splitlines() if line]
    *tokens, usage = map(json.loads, told)
    assert [one["choices"][0]["text"] for one in tokens] == [f" {number}" for number in range(30)]
    assert usage["usage"]["completion_tokens"] == 30 and end == b"[DONE]"
    assert client.direct > 0


def test_a_token_that_cannot_be_sent_at_once_ends_its_own_answer_alone(tmp_path: Path) -> None:
    async def scenario() -> bytes:
        generation, _ = service(tmp_path)
        client = Client()
        form, choices = await generation.complete(completion())
        source = events(generation, form, choices, None, lambda status: None, client)  # type: ignore[arg-type]
        following = asyncio.create_task(client.follow(source))
        await asyncio.sleep(0)
        give(choices[0], new(5))
        choices[0].text.add = _broken  # type: ignore[method-assign]
        give(choices[0], new(6))  # as the replica does it, whose loop must go on
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(following, 300)
        return b"".join(client.got)

    got = asyncio.run(scenario())
    assert got.count(b"data: ") == 1 and b'" 5"' in got


def _broken(token: int) -> str:
    raise ZeroDivisionError
