"""What went wrong on a rank, in words: status, kind, one line for a person, the traceback for the log."""

import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.record import Status

PEER_LOST = "PeerLost"
_MESSAGE_CHARACTERS = 600
_NO_MEMORY = ("can't allocate memory", "not enough memory", "cannot allocate memory")
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
    """What an exception says, fit for a table."""
    text = " ".join(str(error).split())[:_MESSAGE_CHARACTERS] or type(error).__name__
    return text.encode(errors="replace").decode()


def classify(error: Exception, world_size: int) -> "tuple[Status, str]":
    """Status and kind of an exception; an error that a lost or silent peer caused is of kind PeerLost."""
    import torch

    from configs.record import Status

    text = str(error).lower()
    kind = type(error).__name__
    if kind == "PeerLostError":
        return (Status.TIMEOUT if getattr(error, "silent", False) else Status.FAILED), PEER_LOST
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Status.OUT_OF_MEMORY, kind
    if isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _NO_MEMORY):
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
    """A line for whoever reads the log, never read as data; a full disk must not stop us here."""
    from configs.base import utc_now

    with suppress(OSError):
        print(f"{utc_now()} {line}", file=sys.stderr, flush=True)


def report(headline: str) -> None:
    """Headline and traceback of what is being handled, to the log."""
    log_line(f"{headline}\n{traceback.format_exc()}")
