"""Describe a rank's failure: status, kind, one line for the user, traceback for the log."""

import re
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from configs.common.failure_kinds import PEER_LOST, says_no_memory
from configs.common.printable import printable

if TYPE_CHECKING:
    from configs.records.record import Status

_MESSAGE_CHARACTERS = 600
_SOURCE_PLACE = re.compile(
    r"\[enforce fail at [^\[\]]*\]\s*(err == 0\.\s*)?"
    # From the beginning of a word or of white space: to try each place in it takes the square of its length.
    r"|(?:\[|(?<![\w./+-]))[\w./+-]*/[\w.+-]+\.(cc|cpp|cu|cuh|h|hpp):\d+\]?:?\s*"
    r"|(?<!\s)\s*Exception raised from .*",
    re.DOTALL,
)
"""Where in the C++ source of a library an error was raised: the traceback in the log has it."""
_PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out",
    "timeout",
)


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line, for a table."""
    text = " ".join(_SOURCE_PLACE.sub("", str(error)).split()) or type(error).__name__
    return printable(text, _MESSAGE_CHARACTERS)


def classify(error: Exception, world_size: int) -> "tuple[Status, str]":
    """Return status and kind of an exception; errors caused by a lost or silent peer have kind PeerLost."""
    import torch

    from configs.records.record import Status

    text = str(error).lower()
    kind = type(error).__name__
    if kind == "PeerLostError":
        return (Status.TIMEOUT if getattr(error, "silent", False) else Status.FAILED), PEER_LOST
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Status.OUT_OF_MEMORY, kind
    if isinstance(error, (RuntimeError, OSError)) and says_no_memory(text):
        return Status.OUT_OF_MEMORY, kind
    if world_size > 1 and isinstance(error, RuntimeError):
        distributed = type(error).__module__ == "torch.distributed" or kind.startswith("Dist")
        if distributed or any(words in text for words in _PEER_GONE):
            silent = "timed out" in text or "timeout" in text
            return (Status.TIMEOUT if silent else Status.FAILED), PEER_LOST
    if isinstance(error, NotImplementedError):
        return Status.UNSUPPORTED, kind
    return Status.FAILED, kind


def log_line(line: str) -> None:
    """Write a line to the log for reading; never fails, even on a full disk."""
    from configs.common.base import utc_now

    with suppress(OSError):
        print(f"{utc_now()} {line}", file=sys.stderr, flush=True)


def report(headline: str) -> None:
    """Write headline and traceback of the current exception to the log."""
    log_line(f"{headline}\n{traceback.format_exc()}")
