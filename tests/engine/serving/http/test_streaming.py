"""A stream ends quietly with its client, also with one that stays and does not read."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from engine.serving.http.streaming import EventStream


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
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 30)

    asyncio.run(scenario())
    assert ended == [True]
