"""`rankwise export`: how it ends where its exporter does not end by itself. What it writes: tests/engine/tools."""

import signal
import subprocess
import sys

import pytest

from flows.cli import export

_STAND_IN = """
import sys, time, types
exporter = types.ModuleType("engine.tools.export")
def main(arguments):
    print("began", flush=True)
    time.sleep(600)
exporter.main = main
sys.modules["engine.tools.export"] = exporter
"""


def test_an_exporter_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory ran out nothing was printed, and the exit code was 247."""
    monkeypatch.setattr(export, "_EXPORTER", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(OSError, match=r"^the exporter was ended by SIGKILL: memory ran out, unless somebody ended it$"):
        export._exported([])
    monkeypatch.setattr(export, "_EXPORTER", "raise SystemExit(2)")
    assert export._exported([]) == 2


def test_an_interrupt_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _STAND_IN + export._EXPORTER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where a script runs the tests
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"began\n"
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (1, b"")
