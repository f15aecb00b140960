"""A server whose ranks or whose parent die: no request hangs, no answer is wrong, nothing is left."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.serving.process import ServerFailedError, ServerProcess
from tests.support.servers.inference_server import RunningServer, running_server, wait_until

pytestmark = pytest.mark.slow
FIELDS: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}
PROMPTS = [f"def f{number}(" for number in range(8)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("served"), tp=2) as running:
        yield running


def ready(server: RunningServer) -> bool:
    return server.client.get("/readyz").status_code == 200


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_no_answer(server: RunningServer, victim: int) -> None:
    expected = [server.tokens(prompt=prompt, **FIELDS) for prompt in PROMPTS]
    pids = {process.pid for process in server.ranks()}
    streamed: list[dict[str, Any]] = []
    begun = threading.Event()

    def stream() -> None:
        body = {"model": "tiny", "prompt": "x = ", **FIELDS, "max_tokens": 400, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    streamed.append(json.loads(line.removeprefix("data: ")))
                    begun.set()

    watcher = threading.Thread(target=stream)
    watcher.start()
    assert begun.wait(600)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.tokens, prompt=prompt, **FIELDS) for prompt in PROMPTS]
        time.sleep(0.1)
        server.ranks()[victim].kill()
        wait_until(lambda: not ready(server), "the failure to be seen")
        assert [one.result() for one in asked] == expected
    watcher.join(600)
    assert not watcher.is_alive()
    text = "".join(event["choices"][0]["text"] for event in streamed)
    wait_until(lambda: ready(server), "the ranks to be back")
    # What was begun went on where it was.
    assert text == server.complete(prompt="x = ", **{**FIELDS, "max_tokens": 400})["choices"][0]["text"]
    assert not pids & {process.pid for process in server.ranks()}
    assert server.metric("rankwise:replica_restarts_total") > 0


def test_sigterm_lets_requests_end(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        expected = server.tokens(prompt="a = ", **FIELDS)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.tokens, prompt="a = ", **FIELDS)
            wait_until(lambda: server.metric("vllm:num_requests_running") == 1, "the request to run")
            server.process.signal(signal.SIGTERM)
            assert asked.result() == expected
        assert server.process.wait() == 0


def test_ranks_that_cannot_start_end_the_server(tmp_path: Path) -> None:
    """A checkpoint that goes bad after it was found."""
    with running_server(tmp_path) as server:
        settings = server.process.settings
    weights = tmp_path / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    folder = tmp_path / "again"
    folder.mkdir()
    with (
        ServerProcess(settings.model_copy(update={"folder": str(folder)}), None) as broken,
        pytest.raises(ServerFailedError),
    ):
        broken.wait_until_ready()
    assert "model.safetensors" in (folder / "replica-0.log").read_text()
