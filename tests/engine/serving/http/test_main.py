"""The end of a server: streams that clients still read are finished first."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from starlette.types import Message

from configs.serving.settings import ServingLimits, ServingSettings
from engine.serving.http.app import Server, serving_app
from engine.serving.http.main import _drain, _Signals
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.replicas import Router
from engine.serving.messages import NewToken


def test_a_stream_that_its_client_reads_slowly_is_finished(tmp_path: Path) -> None:
    """All tokens are there, so no replica works for it any more."""
    body = json.dumps({"model": "m", "prompt": [1], "max_tokens": 2, "stream": True}).encode()
    sent: list[bytes] = []

    async def scenario() -> tuple[bool, float]:
        limits = ServingLimits(drain_seconds=30.0)
        settings = ServingSettings(name="m", manifest="", folder=str(tmp_path), max_length=8, blocks=8, limits=limits)
        metrics = ServerMetrics("m")
        router = Router(settings, tmp_path / "settings.json", metrics)
        model = ServedModel("m", 10, 8, frozenset(), None, None, {})
        server = Server(settings, model, router, metrics, None)
        router.replicas[0].ready, router.replicas[0]._tell = True, lambda message: None  # type: ignore[method-assign]
        reads = asyncio.Event()
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()
            return asked.pop()

        async def send(message: Any) -> None:
            await reads.wait()  # the client's window is full
            sent.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        answering = asyncio.create_task(serving_app(server)(scope, receive, send))
        while not router.answers:
            await asyncio.sleep(0.01)
        [answer] = router.replicas[0].answers.values()
        answer.put([NewToken(answer.key, 5)])
        answer.put([NewToken(answer.key, 6, "length")])
        router.replicas[0].answers.clear()
        began = time.monotonic()
        draining = asyncio.create_task(_drain(server, _Signals(asyncio.Event())))
        await asyncio.sleep(0.5)
        waited = not draining.done()
        reads.set()
        await asyncio.gather(draining, answering)
        return waited, time.monotonic() - began

    waited, seconds = asyncio.run(scenario())
    assert waited and seconds < 20
    assert b"".join(sent).endswith(b"data: [DONE]\n\n")
