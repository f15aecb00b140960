"""A server's processes import the installed packages, wherever a user starts them."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from configs.serving.settings import ServingSettings
from tasks.serving.process import ServerFailedError, ServerProcess


def test_a_folder_of_the_user_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "engine" / "__init__.py"
    own.parent.mkdir()
    own.write_text("open('imported', 'w').close()")
    monkeypatch.chdir(tmp_path)
    settings = ServingSettings(name="m", manifest="none.json", folder=str(tmp_path), max_length=8, blocks=8, port=0)
    with ServerProcess(settings, None) as server, pytest.raises(ServerFailedError):
        server.wait_until_ready()
    assert not (tmp_path / "imported").exists()


WAITING = """
import json, signal, sys, time
told = set()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: told.add(number))
print(json.dumps({"ready": {"url": "http://x", "replicas": [{}]}}), flush=True)
while len(told) < 2:
    time.sleep(0.01)
"""


def test_a_server_that_is_busy_hears_that_it_is_to_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal signals are one to a process that has not run between them: it drained, and was killed for it."""
    (tmp_path / "waiting_program.py").write_text(WAITING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    settings = ServingSettings(name="m", manifest="none.json", folder=str(tmp_path), max_length=8, blocks=8, port=0)
    with ServerProcess(settings, None, "waiting_program") as server:
        server.wait_until_ready()
        held = psutil.Process(server.pid)
        held.suspend()
        threading.Timer(0.5, held.resume).start()
    assert server.wait() == 0
