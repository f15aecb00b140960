"""What a reader of foreign bytes may do: return, or raise ValueError with a short printable message, soon.

judge(target, data)          # None, or the fault: "TypeError at configs/spec/plain.py:31: ..."
"""

import re
import resource
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

Target = Callable[[bytes], object]

MAX_SECONDS = 2.0
MAX_BYTES = 500 << 20
MAX_MESSAGE_CHARACTERS = 2000
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_FOREIGN = re.compile(r"errors\.pydantic\.dev|sys\.set_int_max_str_digits|Traceback \(most recent")
"""What other libraries say to their own users."""
_ROOT = Path(__file__).parents[2]


def warm_up(target: Target) -> None:
    """Call a target once without judging it: what its first call imports is not the input's time."""
    with suppress(Exception):
        target(b"")


def judge(target: Target, data: bytes) -> str | None:
    """Run a target on some bytes. Returns the fault, its first line the same for the same cause; None: none.

    Time is this process's CPU time, because the machine may be busy.
    """
    began, memory = time.process_time(), _peak_bytes()
    try:
        target(data)
        fault = None
    except ValueError as error:
        fault = _fault_of_message(error)
    except Exception as error:
        fault = _located(type(error).__name__, error)
    except BaseException as error:  # a panic of a library in Rust
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        fault = _located(type(error).__name__, error)
    seconds, grown = time.process_time() - began, _peak_bytes() - memory
    if fault is None and seconds > MAX_SECONDS:
        fault = f"slow\n{seconds:.1f} s of CPU time, expected at most {MAX_SECONDS:.0f} s"
    if fault is None and grown > MAX_BYTES:
        fault = f"memory\npeak grew by {grown >> 20} MiB, expected at most {MAX_BYTES >> 20} MiB"
    return fault


def _fault_of_message(error: ValueError) -> str | None:
    text = str(error)
    if len(text) > MAX_MESSAGE_CHARACTERS:
        return _located(f"message of more than {MAX_MESSAGE_CHARACTERS} characters", error)
    if _CONTROL.search(text):
        return _located("control character in a message", error)
    if not text.strip():
        return _located("empty message", error)
    if isinstance(error, ValidationError) or _FOREIGN.search(text):
        return _located("message of another library", error)
    return None


def _located(what: str, error: BaseException) -> str:
    """The kind of fault and our last line of code, then the message."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_ours(frame.filename)]
    place = f"{Path(ours[-1].filename).relative_to(_ROOT)}:{ours[-1].lineno}" if ours else "unknown place"
    return f"{what} at {place}\n{type(error).__name__}: {str(error)[:500]!r}"


def _is_ours(name: str) -> bool:
    path = Path(name)
    return path.is_relative_to(_ROOT) and ".venv" not in path.parts and "fuzz" not in path.parts


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def cause(fault: str) -> str:
    """What two inputs with the same cause share."""
    return fault.partition("\n")[0]
