"""The application without ranks: what it lists, and errors in the API's form."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from configs.serving.settings import ServingSettings
from engine.answering.app import AnsweringServer, Figures, answering_app
from engine.serving.http.app import Server, serving_app
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.replicas import Router

NAME = "owner/name"


def decoder_app(folder: Path, model: ServedModel) -> FastAPI:
    settings = ServingSettings(name=NAME, manifest="", folder=str(folder), max_length=32, blocks=8)
    metrics = ServerMetrics(NAME)
    return serving_app(Server(settings, model, Router(settings, folder / "s.json", metrics), metrics, None))


def encoder_app(folder: Path, model: ServedModel) -> FastAPI:
    settings = ServingSettings(name=NAME, manifest="", folder=str(folder), max_length=32, blocks=8)
    computing: Any = SimpleNamespace(waiting=0)
    return answering_app(AnsweringServer(settings, model, computing, Figures(NAME), None, encodes=True))


APPS = pytest.mark.parametrize("made", [decoder_app, encoder_app])


def client_of(app: FastAPI) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


@APPS
def test_openais_client_lists_and_finds_the_model(made: Any, tmp_path: Path) -> None:
    """A name with a slash is one name. Another is refused in the API's form."""
    model = ServedModel(NAME, 100, 32, frozenset(), None, None, {})

    async def scenario() -> None:
        client = client_of(made(tmp_path, model))
        assert [one.id for one in (await client.models.list()).data] == [NAME]
        assert (await client.models.retrieve(NAME)).created == model.created
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
        assert caught.value.code == "model_not_found" and NAME in str(caught.value)

    asyncio.run(scenario())


@APPS
def test_a_slash_at_the_end_of_a_path_changes_nothing(made: Any, tmp_path: Path) -> None:
    """It was a redirect to the address of the server itself, which clients behind a front do not reach."""
    app = made(tmp_path, ServedModel(NAME, 100, 32, frozenset(), None, None, {}))

    async def scenario() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/v1/models", f"/v1/models/{NAME}", "/healthz", "/metrics"):
                plain, slashed = await client.get(path), await client.get(f"{path}/")
                assert plain.status_code == slashed.status_code == 200
                assert path == "/metrics" or plain.json() == slashed.json()
            assert (await client.get("/none/")).status_code == 404
            posted = [await client.post(f"/v1/{name}/", content=b"") for name in ("completions", "embeddings")]
            assert {one.status_code for one in posted} <= {400, 404, 503}  # taken, or none of this server's

    asyncio.run(scenario())


@APPS
def test_an_error_of_the_program_itself_has_the_form_of_the_api(made: Any, tmp_path: Path) -> None:
    """Without the error's own words, which may hold what others have sent."""
    model = ServedModel(NAME, 100, 32, frozenset(), None, None, {})

    def broken(name: str) -> dict[str, object]:
        raise RuntimeError("words of somebody else's request")

    object.__setattr__(model, "entry_of", broken)

    async def scenario() -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await client_of(made(tmp_path, model)).models.retrieve(NAME)
        assert caught.value.type == "server_error"
        assert "internal error, RuntimeError" in str(caught.value) and "somebody" not in str(caught.value)

    asyncio.run(scenario())


@APPS
def test_every_error_is_counted_by_its_status(made: Any, tmp_path: Path) -> None:
    """Those of the program itself, which an operator has to hear of, were not."""
    model = ServedModel(NAME, 100, 32, frozenset(), None, None, {})

    def broken(name: str) -> dict[str, object]:
        raise RuntimeError

    object.__setattr__(model, "entry_of", broken)

    async def scenario() -> str:
        transport = httpx.ASGITransport(made(tmp_path, model), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert [(await client.get(path)).status_code for path in ("/v1/models/x", "/none")] == [500, 404]
            return (await client.get("/metrics")).text

    page = asyncio.run(scenario())
    for status in (500, 404):
        assert f'rankwise:requests_refused_total{{model_name="{NAME}",status="{status}"}}' in page
