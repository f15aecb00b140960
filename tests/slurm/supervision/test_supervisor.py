"""A supervisor keeps a process running, on one port, until it is told to end or its time is over."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from configs.common.files import logs
from configs.serving.deployment import ServiceState, SupervisedProcess
from slurm.supervision.supervisor import Supervisor, main
from tests.support.run_folders.studies import wait_until

SERVER = "import sys, time; print('serving', sys.argv[1], flush=True); time.sleep(600)"


def service(folder: Path, *argv: str, **fields: object) -> None:
    told = SupervisedProcess.model_validate({"argv": (sys.executable, "-c", *argv), **fields})
    (folder / "service.json").write_text(told.model_dump_json())


def supervised(folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "slurm.supervision.supervisor", str(folder)])


def state(folder: Path) -> ServiceState | None:
    path = folder / "state.json"
    return ServiceState.model_validate_json(path.read_text()) if path.exists() else None


def running(folder: Path, starts: int = 1) -> bool:
    told = state(folder)
    return told is not None and told.pid is not None and told.starts >= starts


def test_it_is_started_again_on_the_same_port_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    service(tmp_path, SERVER, "{port}")
    process = supervised(tmp_path)
    wait_until(lambda: running(tmp_path), 60, "the service")
    first = state(tmp_path)
    assert first is not None and first.pid is not None and first.port > 0
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: running(tmp_path, 2), 60, "the second start")
    second = state(tmp_path)
    assert second is not None and second.pid is not None
    assert second.port == first.port and "exit code -9" in second.reason
    assert main([str(tmp_path)]) == 1  # another supervisor has the folder
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not psutil.pid_exists(second.pid or 0), 60, "the service to end")


def test_sigterm_ends_both(tmp_path: Path) -> None:
    service(tmp_path, SERVER, "x")
    process = supervised(tmp_path)
    wait_until(lambda: running(tmp_path), 60, "the service")
    told = state(tmp_path)
    assert told is not None and told.pid is not None
    process.terminate()
    assert process.wait(600) == 0
    ended = state(tmp_path)
    assert ended is not None and ended.state == "ended" and not psutil.pid_exists(told.pid)


def test_it_ends_when_its_time_is_over(tmp_path: Path) -> None:
    service(tmp_path, SERVER, "x", expires_at=time.time() + 2)
    process = supervised(tmp_path)
    assert process.wait(600) == 0
    ended = state(tmp_path)
    assert ended is not None and (ended.state, ended.reason) == ("ended", "expired")


def test_a_service_whose_end_comes_while_it_runs_has_ended_before_its_supervisor(tmp_path: Path) -> None:
    service(tmp_path, SERVER, "x", expires_at=time.time() + 600)
    process = supervised(tmp_path)
    wait_until(lambda: running(tmp_path), 60, "the service")
    told = state(tmp_path)
    assert told is not None and told.pid is not None
    (tmp_path / "expires_at").write_text(str(time.time()))
    assert process.wait(600) == 0
    ended = state(tmp_path)
    assert ended is not None and ended.reason == "expired" and not psutil.pid_exists(told.pid)


def test_the_key_is_in_the_environment_only_and_a_missing_one_ends_it(tmp_path: Path) -> None:
    told = "import os; print(len(os.environ['RANKWISE_API_KEY']), open('/proc/self/cmdline').read())"
    service(tmp_path, told, key_file="key")
    (tmp_path / "key").write_text("canary-key\n")
    process = supervised(tmp_path)
    log = tmp_path / "server.log"
    wait_until(lambda: log.exists() and log.read_text().startswith("10"), 60, "the key's length")
    process.terminate()
    process.wait(600)
    written = [path for path in tmp_path.iterdir() if path.name != "key" and b"canary" in path.read_bytes()]
    assert not written
    (tmp_path / "key").unlink()
    failed = subprocess.run(
        [sys.executable, "-m", "slurm.supervision.supervisor", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert failed.returncode == 1 and "key" in failed.stderr and "Traceback" not in failed.stderr


def test_the_log_of_a_service_that_runs_on_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    monkeypatch.setattr(logs, "KEPT_BYTES", 100)
    service(tmp_path, "import time; print('early', 'x' * 2000, flush=True); print('last', flush=True); time.sleep(60)")
    watched, log = Supervisor(tmp_path), tmp_path / "server.log"
    thread = threading.Thread(target=watched.run)
    thread.start()
    try:
        wait_until(lambda: log.exists() and log.read_text().endswith("last\n"), 60, "the output")
        wait_until(lambda: "early" not in log.read_text(), 60, "the cut")
        assert log.read_text().endswith("last\n") and log.stat().st_size < 200
    finally:
        watched.stop()
        watched.stop()
        thread.join(600)


@pytest.mark.parametrize("argv", ["/no/such/program"])
def test_a_program_that_is_missing_is_named(tmp_path: Path, argv: str) -> None:
    (tmp_path / "service.json").write_text(SupervisedProcess(argv=(argv,)).model_dump_json())
    process = supervised(tmp_path)
    wait_until(lambda: (told := state(tmp_path)) is not None and told.starts > 1, 60, "two starts")
    told = state(tmp_path)
    process.terminate()
    process.wait(600)
    assert told is not None and "No such file" in told.reason


def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service(tmp_path, SERVER, "x")
    watched, tries = Supervisor(tmp_path), []

    def start() -> None:
        tries.append(watched._reason)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        watched.stop()

    monkeypatch.setattr(watched, "_start", start)
    assert watched.run() == 0
    assert len(tries) == 2 and "No space left on device" in tries[1]


def test_a_full_disk_does_not_keep_a_supervisor_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert main([str(tmp_path)]) == 1
    assert "service.json" in capsys.readouterr().err  # the next thing that it needs


def test_a_folder_on_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder that a cluster's nodes share may be: the end of a traceback was all that `deploy` could show."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"{tmp_path}: this file system has no locks (No locks available)")
