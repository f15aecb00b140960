"""Programs that start by fork: how they end, what they get of their parent, when a process may not be forked."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.common.system import forking
from configs.common.system.forking import COMMAND_LINE_BYTES, Forked, binds_threads, wait_for_exit
from tests.support.patience import patient

PROGRAM = """
import json, os, signal, sys, threading

def main(arguments):
    print(json.dumps({
        "arguments": arguments,
        "environment": dict(os.environ),
        "command": open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode().split("\\0"),
        "input": sys.stdin.buffer.raw.read(1).decode(),
        "signals": [signal.getsignal(number).name for number in (signal.SIGTERM, signal.SIGHUP)],
    }))
    return 7
"""
PARENT = """
import signal, sys
from configs.common.system.forking import fork, run_module

signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
child = fork(lambda: run_module("program", ["a b", "/jobs/1/job.json"], {"ONLY": "this"}))
sys.exit(child.wait(600))
"""


def run_script(script: str, *arguments: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """The script in a fresh process, which may be forked."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, input="typed")


def test_a_forked_program_gets_its_own_environment_command_line_and_signals(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_script(PARENT, "-" * 500, folder=tmp_path)
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout)
    assert said["arguments"] == ["a b", "/jobs/1/job.json"]
    assert said["environment"] == {"ONLY": "this"}
    assert said["command"] == [sys.executable, "-m", "program", "a b", "/jobs/1/job.json"]
    assert said["input"] == "", "nothing of what the parent could read"
    assert said["signals"] == ["SIG_DFL", "SIG_IGN"], "a handler is gone, an ignored signal stays ignored"


def test_a_command_line_is_cut_to_its_room() -> None:
    script = """
from configs.common.system.forking import set_command_line
set_command_line(["x" * 100_000])
print(len(open("/proc/self/cmdline", "rb").read().rstrip(b"\\0")))
"""
    assert 50 < int(run_script(script).stdout) < COMMAND_LINE_BYTES


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("fork(lambda: 3).wait()", 3),
        ("fork(lambda: sys.exit(4)).wait()", 4),
        ("fork(lambda: sys.exit('text')).wait()", 1),
        ("fork(lambda: 1 // 0).wait()", 1),
        ("fork(lambda: os.kill(os.getpid(), signal.SIGKILL)).wait(600)", -signal.SIGKILL),
    ],
)
def test_exit_codes_are_those_of_popen(body: str, expected: int) -> None:
    script = f"import os, signal, sys\nfrom configs.common.system.forking import fork\nprint({body})"
    done = run_script(script)
    assert int(done.stdout) == expected
    assert ("ZeroDivisionError" in done.stderr) is ("//" in body)


@pytest.mark.parametrize(
    "moment",
    [
        "os.register_at_fork(after_in_child=told)",
        "sys.stdout.flush = told",
        "sys.stderr.flush = told",
        "import traceback; traceback.print_exc = told",
    ],
    ids=["before its program", "after its program", "after its output", "while it says what failed"],
)
def test_a_child_whose_handler_raises_never_returns_to_the_callers_code(moment: str) -> None:
    """torchrun's handler of SIGTERM raises wherever its process is; the callers of `fork` would run a second time."""
    script = f"""
import os, signal, sys
from configs.common.system.forking import fork

def handler(number, frame):
    raise RuntimeError("signalled")

def told(*_):
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)

def program():
    signal.signal(signal.SIGTERM, handler)
    return 1 // 0

parent = os.getpid()
signal.signal(signal.SIGTERM, handler)
{moment}
try:
    code = fork(program).wait(600)
finally:
    os.write(1, b"reached by " + (b"the parent" if os.getpid() == parent else b"the child") + b"\\n")
"""
    assert run_script(script).stdout == "reached by the parent\n"


def test_waiting_ends_at_the_limit_or_with_the_process() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = Forked(sleeper.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    assert child.poll() is None and not wait_for_exit(sleeper.pid, 0.05)
    child.kill()
    began = time.monotonic()
    assert wait_for_exit(sleeper.pid, 600)
    assert time.monotonic() - began < patient(20)
    assert (child.wait(600), child.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert wait_for_exit(sleeper.pid, 0), "nobody has this pid any more"
    child.terminate()  # says nothing to a stranger
    assert sleeper.stdin is not None
    sleeper.stdin.close()
    sleeper.wait()


def test_waiting_without_descriptors_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError("a kernel before 5.3")

    monkeypatch.setattr(forking.os, "pidfd_open", missing)
    sleeper = subprocess.Popen(["sleep", "30"])
    assert not wait_for_exit(sleeper.pid, 0.03)
    sleeper.kill()
    assert wait_for_exit(sleeper.pid, 600)
    sleeper.wait()
    assert wait_for_exit(sleeper.pid, 0)


def test_what_forbids_to_fork() -> None:
    script = """
import threading
from configs.common.system import forking
print(forking.unfit_to_fork())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(forking.unfit_to_fork())
"""
    fit, thread = run_script(script).stdout.splitlines()
    assert fit == "None"
    assert thread == "2 threads run in it"
    driver = "from configs.common.system import forking\nforking._DRIVERS = ('/dev/zero',)\nheld = open('/dev/zero')\n"
    assert run_script(driver + "print(forking.unfit_to_fork())").stdout == "it has opened /dev/zero\n"


def test_threads_that_a_library_ends_at_a_fork_do_no_harm() -> None:
    script = """
import os
os.environ["OPENBLAS_NUM_THREADS"] = "2"
import numpy
from configs.common.system.forking import unfit_to_fork
print(unfit_to_fork())
"""
    assert run_script(script).stdout == "None\n"


def test_openmp_that_binds_threads_is_noticed() -> None:
    assert binds_threads({"OMP_PROC_BIND": "close"})
    assert not binds_threads({"OMP_NUM_THREADS": "2"})
