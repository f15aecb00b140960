"""How a rank of a script ended, from its exit code and the end of its output.

    found = rank_end(exit_code=1, tail=b"...RuntimeError: CUDA out of memory...")      # RankEnd(OUT_OF_MEMORY, ...)

A user's script writes no part of a record, so its output is the only evidence besides the exit code: the text decides
between kinds of failure, and never that nothing failed.
"""

import re
import signal
from dataclasses import dataclass

from configs.common.failure_kinds import PEER_LOST
from configs.common.printable import printable
from configs.common.secrets import redacted
from configs.records.record import Status

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|HIP out of memory|\bMemoryError\b|std::bad_alloc|RESOURCE_EXHAUSTED"
    r"|Cannot allocate memory|DefaultCPUAllocator: (?:can't|not enough)|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'"
)
_TRACEBACK = re.compile(r"^(?:\[rank\d+\]:\s*)?Traceback \(most recent call last\):", re.M)
_UNCAUGHT_IN_CLEANUP = "Exception ignored"
# What comes between two tracebacks of which the first explains the second; a thread's explains that of the main one.
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_THREAD = "Exception in thread"
_PEER = re.compile(
    r"Connection (?:closed by peer|reset by peer|refused)|Broken pipe|ncclRemoteError|ncclSystemError"
    r"|NCCL.*remote process"
    r"|DistNetworkError|DistBackendError|Socket Timeout|store->get|Timed out waiting|connection was (?:closed|reset)",
    re.I,
)
_LAST_LINE = re.compile(
    rb"^(?:\[rank\d+\]:\s*)?((?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)):?(.*)$", re.M
)
_MESSAGE = 500


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, where it did not end well."""

    status: Status
    kind: str
    message: str


def rank_end(exit_code: int, tail: bytes) -> RankEnd | None:
    """None for exit code 0. A rank that its launcher ended, or that lost a peer, is of kind PeerLost."""
    if exit_code == 0:
        return None
    text = tail.decode("utf-8", "replace")
    said = _exception(tail)
    if (found := _OUT_OF_MEMORY.search(text, _last_failure(text))) is not None:
        kind = "MemoryError" if "MemoryError" in text and "OutOfMemory" not in text else "OutOfMemoryError"
        told = said[1] if said and _OUT_OF_MEMORY.search(said[1]) else _line_at(text, found.start())
        return RankEnd(Status.OUT_OF_MEMORY, kind, told)
    if exit_code < 0:
        name = _signal(-exit_code)
        if -exit_code == signal.SIGTERM:
            return RankEnd(Status.FAILED, PEER_LOST, "ended by its launcher after another rank ended")
        return RankEnd(Status.FAILED, name, f"killed by {name}")
    if said is not None:
        kind, message = said
        lost = _PEER.search(message) is not None
        return RankEnd(Status.FAILED, PEER_LOST if lost else kind, message)
    last = _last_line(text)
    return RankEnd(Status.FAILED, "ExitCode", f"exit code {exit_code}{f': {last}' if last else ''}")


def _last_failure(text: str) -> int:
    """Where the last traceback begins, with those that explain it; 0 where there is none.

    What a script reported before it, and went on from, is not how it ended.
    """
    begins, end = 0, len(text)
    for header in reversed(list(_TRACEBACK.finditer(text))):
        before = text[text.rfind("\n", 0, max(header.start() - 1, 0)) + 1 : header.start()]
        linked = end == len(text) or any(link in text[header.start() : end] for link in _LINKS) or _THREAD in before
        if _UNCAUGHT_IN_CLEANUP in before:
            continue
        if not linked:
            break
        begins = end = header.start()
    return begins


def _exception(tail: bytes) -> tuple[str, str] | None:
    """Class and message of the last exception that a Python traceback ends with."""
    if b"Traceback (most recent call last)" not in tail:
        return None
    found = list(_LAST_LINE.finditer(tail))
    if not found:
        return None
    kind = found[-1][1].decode("utf-8", "replace").rpartition(".")[2]
    message = " ".join(found[-1][2].decode("utf-8", "replace").split())
    return kind, recorded_line(f"{kind}: {message}" if message else kind)


def _last_line(text: str) -> str:
    return recorded_line(next((line.strip() for line in reversed(text.splitlines()) if line.strip()), ""))


def _line_at(text: str, position: int) -> str:
    return recorded_line(text[text.rfind("\n", 0, position) + 1 :].partition("\n")[0].strip())


def recorded_line(text: str) -> str:
    """A text of a script as a record keeps it: one line, without secrets."""
    return printable(redacted(text), _MESSAGE)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
