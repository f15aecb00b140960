"""`rankwise serve` and `generate` without a server: the token that is told, and a server that is gone."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.cli.serving import server
from tasks.serving.settings import ServerRequest


@pytest.mark.parametrize(
    ("given", "key", "told"), [(None, None, True), ("", None, True), (" \n", None, True), ("own\n", "own", False)]
)
def test_a_token_that_is_made_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str | None, key: str | None, told: bool
) -> None:
    used: list[str | None] = []

    class Process:
        def __init__(self, settings: Any, key: str | None, program: str) -> None:
            used.append(key)

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def wait_until_ready(self) -> dict[str, Any]:
            return {"url": "http://0.0.0.0:8000", "replicas": []}

        def wait(self) -> int:
            return 0

    if given is None:
        monkeypatch.delenv("RANKWISE_API_KEY", raising=False)
    else:
        monkeypatch.setenv("RANKWISE_API_KEY", given)
    settings = SimpleNamespace(name="m", dtype="float32", blocks=1, block=16, max_length=16)
    monkeypatch.setattr(server, "make_settings", lambda *_: settings)
    monkeypatch.setattr(server, "program_of", lambda _: "")
    monkeypatch.setattr(server, "ServerProcess", Process)
    assert server.run_server(ServerRequest(model=str(Path("m")), host="0.0.0.0"), no_token=False) == 0
    assert used[0] and (key is None or used[0] == key)
    assert (used[0] in capsys.readouterr().err) is told


def test_a_server_that_ends_while_it_answers_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, settings: Any, key: str | None) -> None:
            return

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def wait_until_ready(self) -> dict[str, Any]:
            with socket.create_server(("127.0.0.1", 0)) as free:
                return {"url": f"http://127.0.0.1:{free.getsockname()[1]}"}

    monkeypatch.setattr(server, "make_settings", lambda *_: SimpleNamespace(name="m"))
    monkeypatch.setattr(server, "program_of", lambda _: server.DECODERS)
    monkeypatch.setattr(server, "ServerProcess", Process)
    for as_json in (True, False):
        with pytest.raises(OSError, match="the server ended while it answered"):
            server.run_generate(ServerRequest(model="m"), ["a"], {}, chat=False, as_json=as_json)
