"""A server without a token answers no page that reaches it through a name of its own."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from configs.serving.settings import ServingSettings
from engine.answering.app import AnsweringServer, Figures, answering_app
from engine.serving.http.app import Server, serving_app
from engine.serving.http.hosts import foreign_host
from engine.serving.http.listening import listen, listener_url
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.protocol import ApiProtocol
from engine.serving.http.replicas import Router

MODEL = ServedModel("m", 100, 32, frozenset(), None, None, {})


def decoder_app(folder: Path, key: str | None = None, host: str = "127.0.0.1") -> FastAPI:
    settings = ServingSettings(name="m", manifest="", folder=str(folder), max_length=32, blocks=8, host=host)
    metrics = ServerMetrics("m")
    return serving_app(Server(settings, MODEL, Router(settings, folder / "s.json", metrics), metrics, key))


def encoder_app(folder: Path, key: str | None = None, host: str = "127.0.0.1") -> FastAPI:
    settings = ServingSettings(name="m", manifest="", folder=str(folder), max_length=32, blocks=8, host=host)
    computing: Any = SimpleNamespace(waiting=0)
    return answering_app(AnsweringServer(settings, MODEL, computing, Figures("m"), key, encodes=True))


APPS = pytest.mark.parametrize("made", [decoder_app, encoder_app])


def asked(host: str, bound: str = "127.0.0.1", key: str | None = None) -> str | None:
    return foreign_host([(b"accept", b"*/*"), (b"host", host.encode("latin-1"))], bound, key)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:80", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "[::1]",
     "[::1]:8000", "10.0.0.5:9000", " localhost:1 "],
)  # fmt: skip
def test_localhost_and_addresses_are_taken(host: str) -> None:
    """An address cannot be pointed elsewhere, and a tunnel's end or a forwarded port has one."""
    assert asked(host) is asked(host, "::1") is asked(host, "localhost") is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example:8000", "127.0.0.1.nip.io", "", "[evil]:1", "a\xff"],
)
def test_other_names_are_not(host: str) -> None:
    assert asked(host) is not None and asked(host, "::1") is not None and asked(host, "localhost") is not None


def test_a_token_or_an_address_that_others_reach_takes_every_name() -> None:
    assert asked("evil.example", key="k") is None
    for bound in ("0.0.0.0", "::", "10.0.0.5", "gpu-1"):
        assert asked("gpu-1.cluster:8000", bound) is None
    assert foreign_host([], "127.0.0.1", None) is None, "HTTP/1.0 without one, which no browser sends"
    assert foreign_host([(b"host", b"localhost"), (b"host", b"evil.example")], "127.0.0.1", None) == "evil.example"


@APPS
def test_a_page_elsewhere_gets_an_error_of_the_api(made: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        for key, status in ((None, 403), ("k", 401)):
            transport = httpx.ASGITransport(made(tmp_path, key))
            async with httpx.AsyncClient(transport=transport, base_url="http://evil.example:8000") as client:
                for path in ("/v1/models", "/v1/models/m", "/metrics"):
                    answer = await client.get(path)
                    assert answer.status_code == status, path
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            if key is None:
                assert "Host: 'evil.example' is refused" in answer.json()["error"]["message"]
                for path in ("completions", "chat/completions", "embeddings"):
                    url = f"http://evil.example/v1/{path}"
                    posted = await httpx.AsyncClient(transport=transport).post(url, json={"model": "m", "prompt": "x"})
                    assert posted.status_code == 403
                page = (await httpx.AsyncClient(transport=transport).get("http://localhost/metrics")).text
                assert 'rankwise:requests_refused_total{model_name="m",status="403"} 6.0' in page

    asyncio.run(scenario())


@asynccontextmanager
async def listening(app: FastAPI, host: str) -> AsyncIterator[str]:
    http = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", http=ApiProtocol))
    listener = listen(host, 0)
    task = asyncio.create_task(http._serve(sockets=[listener]))
    try:
        yield listener_url(listener)
    finally:
        http.should_exit = http.force_exit = True
        await task


@APPS
@pytest.mark.parametrize(("bound", "names"), [("127.0.0.1", ("127.0.0.1", "localhost")), ("::1", ("[::1]",))])
def test_clients_of_this_machine_are_answered(made: Any, bound: str, names: tuple[str, ...], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(made(tmp_path, host=bound), bound) as url:
            port = url.rpartition(":")[2]
            for name in names:
                base = f"http://{name}:{port}/v1"
                async with httpx.AsyncClient(trust_env=False) as plain:
                    client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, http_client=plain)
                    assert [one.id async for one in client.models.list()] == ["m"]
                if curl := shutil.which("curl"):
                    command = [curl, "-sf", "--noproxy", "*", f"{base}/models"]
                    told = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
                    assert told.returncode == 0 and b'"m"' in told.stdout, told

    asyncio.run(scenario())
