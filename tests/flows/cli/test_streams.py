"""Commands that are started with standard streams closed, as by `<&-` in a script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run_folders.studies import RANKWISE, write_study

_RANKWISE = "from flows.cli.main import app; app()"
_INTERRUPTED_DOCTOR = """import os, signal, sys
from flows.cli.doctor import command
from flows.cli.main import app
command.diagnose = lambda master: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["rankwise", "doctor"]
app()
"""


@pytest.mark.parametrize(
    ("closed", "words", "code", "said"),
    [
        ((0,), ["init"], 2, "--from: required where no terminal can be asked"),
        ((1,), ["examples"], 0, ""),
        ((0, 1), ["status", "/nosuch"], 2, "/nosuch: not a run folder"),
    ],
)
def test_a_closed_stream_is_the_null_device(closed: tuple[int, ...], words: list[str], code: int, said: str) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run(
        [sys.executable, "-c", _RANKWISE, *words], stderr=subprocess.PIPE, text=True, preexec_fn=close, timeout=600
    )
    assert done.returncode == code and done.stderr.startswith(said) and "Traceback" not in done.stderr, done.stderr


def test_what_the_encoding_of_a_stream_lacks_is_an_escape(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfor step in range(3):\n    print(f'größe step {step} – took {0.1} s')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", _RANKWISE, "init", "--from", "train.py"], capture_output=True, timeout=600,
        cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "größe step {step} \\u2013".encode("latin-1") in done.stdout


@pytest.mark.parametrize("words", [["catalog", "list", "links"], ["schema"]], ids=["of one buffer", "of several"])
def test_what_takes_no_more_output_ends_a_command_without_words_of_the_interpreter(words: list[str]) -> None:
    """What a command had printed was written when Python itself ended: `Exception ignored in`, and exit code 120."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "wb") as full, os.fdopen(write, "wb") as unread:
        for stdout, said in ((full, "No space left on device"), (unread, "")):
            done = subprocess.run(
                [sys.executable, "-c", _RANKWISE, *words], stdout=stdout, stderr=subprocess.PIPE, text=True,
                timeout=600, env=buffered,
            )  # fmt: skip
            assert done.returncode == 1, done.stderr
            assert {line.removeprefix("standard output: ") for line in done.stderr.splitlines()} == {said} - {""}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor"]])
def test_a_full_disk_without_a_buffer_is_one_line(words: list[str]) -> None:
    """PYTHONUNBUFFERED is set in most containers: there a print fails, not the end, and that was a traceback."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", _RANKWISE, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=600,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()) == (1, ["No space left on device"])


_LASTING = """import sys, threading
from flows.cli.console import lasting_console
console = lasting_console("the run goes on")
console.print("first")
sys.stdin.readline()
thread = threading.Thread(target=lambda: [console.print("x" * 100_000) for _ in range(3)])
thread.start()
thread.join()
console.print("y" * 100_000)
print("z" * 100_000, flush=True)
sys.stdin.readline()
sys.exit(3)
"""


@pytest.mark.parametrize("both", [False, True])
def test_a_run_goes_on_whose_output_is_read_no_more(both: bool) -> None:
    """`| head -1` ended it: with exit code 1, without a word, or silenced the thread that printed its progress."""
    run = subprocess.Popen(
        [sys.executable, "-c", _LASTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE, text=True,
    )  # fmt: skip
    with run:
        assert run.stdin is not None and run.stdout is not None
        assert run.stdout.readline() == "first\n"
        run.stdout.close()
        run.stdin.write("\n\n")
        run.stdin.close()
        said = "" if run.stderr is None else run.stderr.read()
    assert (run.returncode, said) == (3, "" if both else "standard output is closed; the run goes on\n")


@pytest.mark.slow
def test_a_study_is_measured_to_its_end_behind_a_reader_that_has_gone(tmp_path: Path) -> None:
    write_study(tmp_path)
    environment = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "RANKWISE_DATA": str(tmp_path / "data")}
    command = [RANKWISE, "run", "s.yaml", "--no-calibrate"]
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline().startswith("Rankwise ")
        run.stdout.close()
        said = run.stderr.read()
    assert run.returncode == 0, said
    assert said.count("standard output is closed; the run goes on, Ctrl-C ends it. Its report: runs/s/report.md") == 1
    assert (tmp_path / "runs" / "s" / "report.md").is_file()


def test_what_ends_the_doctor_is_told_without_a_traceback() -> None:
    """It goes without the guard of other commands, whose packages it may find shadowed."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as unread:
        done = subprocess.run(
            [sys.executable, "-c", _RANKWISE, "doctor"], stdout=unread, stderr=subprocess.PIPE, text=True, timeout=600,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    doctor = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED_DOCTOR], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, said = doctor.communicate(timeout=600)
    assert (doctor.returncode, said) == (1, "interrupted\n")


def test_a_working_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    """The system's `No such file or directory` names none."""
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.rmdir(os.getcwd()); {_RANKWISE}", "validate", "study.yaml"],
        stderr=subprocess.PIPE, text=True, timeout=600, cwd=gone,
    )  # fmt: skip
    assert done.stderr.startswith("note: the working folder was removed. Change to another one\n")
    assert done.returncode == 2
