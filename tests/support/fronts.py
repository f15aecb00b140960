"""A front as a process, for tests."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from configs.serving.deployment import FrontConfig
from tests.support.run_folders.studies import wait_until


@contextmanager
def running_front(folder: Path, config: FrontConfig) -> Iterator[str]:
    """Yield the address of a front whose files lie in a folder."""
    (folder / "front.json").write_text(config.model_dump_json())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "engine.routing.main", str(folder / "front.json"), str(folder / "state.json")]
    process = subprocess.Popen([*command, str(port)])
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, 60, "the front")
        yield url
    finally:
        process.terminate()
        process.wait(600)
