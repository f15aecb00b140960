"""Commands that are started with standard streams closed, as by `<&-` in a script."""

import os
import subprocess
import sys

import pytest

_RANKWISE = "from flows.cli.main import app; app()"


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
        [sys.executable, "-c", _RANKWISE, *words], stderr=subprocess.PIPE, text=True, preexec_fn=close, timeout=120
    )
    assert done.returncode == code and done.stderr.startswith(said) and "Traceback" not in done.stderr, done.stderr
