"""Processes of this machine, against psutil and against processes that were started and ended here."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs.common.system.proc import (
    command_line,
    environment_of,
    is_alive,
    network_namespace,
    parent_of,
    process_ids,
    read_fields,
    start_ticks,
)
from tests.support.cluster.launches import wait_until


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    process = subprocess.Popen(["sleep", "30"], env={"MARK": "a=b"})
    ticks = start_ticks(process.pid)
    assert is_alive(process.pid, ticks) and process.pid in process_ids() and os.getpid() not in process_ids()
    assert not is_alive(process.pid, ticks + 1), "another process with the same pid"
    wait_until(lambda: command_line(process.pid) == b"sleep\x0030\x00", "the program to begin")
    assert environment_of(process.pid) == {"MARK": "a=b"}
    assert parent_of(process.pid) == os.getpid() and network_namespace(process.pid) == network_namespace()
    process.kill()
    wait_until(lambda: not is_alive(process.pid, ticks), "a zombie to count as dead")
    process.wait()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        start_ticks(process.pid)
    assert network_namespace(process.pid) is None


def test_an_unreadable_proc_is_no_sign_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refused)
    assert is_alive(os.getpid(), 1)


def test_fields_of_a_file() -> None:
    resident = read_fields("/proc/self/status")["VmRSS"]
    assert int(resident.split()[0]) * 1024 == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert read_fields("/proc/no/such/file") == {}


def test_a_wrong_parent_ends_the_process_at_once() -> None:
    code = (
        "import sys; from configs.common.system.proc import end_with_parent; "
        "end_with_parent(int(sys.argv[1]), int(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run([*command, str(int(signal.SIGTERM)), str(os.getpid())]).returncode == 0
    assert subprocess.run([*command, str(int(signal.SIGKILL)), "1"]).returncode == -signal.SIGKILL


def test_the_module_needs_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import configs.common.system.proc; print(*(set(sys.modules) - before))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ours = {name.partition(".")[0] for name in told.split()} - set(sys.stdlib_module_names)
    assert ours == {"configs"}, "what starts in milliseconds imports it"


def test_the_signal_comes_when_the_parent_ends() -> None:
    child = (
        "import os, time; from configs.common.system.proc import end_with_parent; end_with_parent(15); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    ticks = start_ticks(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(pid, ticks), "the child's end")
    parent.stdout.close()
