"""Streamer process of a rank: reads metrics from the pipe and passes them to each sink, in a thread for each.

    python -m engine.training.live.streamer        (started by engine.training.live.sender)

The first line on standard input describes the measurement (`sender._about`). Then follows a line for each report, and a
last one with the outcome of the measurement; end of file without it means that the rank was killed. Replies on standard
output with `opened` once and `closed` once; all other output goes to the rank's log. A sink that fails to open is
abandoned; one that fails later is retried, with one log line; one that hangs fills only its own queue.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.common.files.reading import read_text
from configs.common.live_variables import SOCKET_VARIABLE, hidden
from engine.training.live.sinks import SINKS, Write

WAITING = 64
"""Length of a slow sink's queue: a minute."""
CLOSE_SHARE = 0.9
"""Of the time that the rank waits for the streams to be closed."""
NICE = 10
"""Of every thread and process once training begins. Not lower: beside busy processes a thread at nice 19 waits for
seconds, and the others with it where it holds the interpreter's lock."""
_MAX_LOOKS, _MAX_BYTES = 20, 1 << 20
_VARIABLES_SECONDS = 5.0
_given: dict[str, str] = {}
"""Variables of the libraries that the run's process has given, secrets among them."""


def get_variables() -> None:
    """Ask the run's process for the libraries' variables, such as credentials, which ranks do not have."""
    name = os.environ.pop(SOCKET_VARIABLE, None)
    if name is None:
        return
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_VARIABLES_SECONDS)
            connection.connect(f"\0{name}")
            with connection.makefile("rb") as answer:
                _given.update(json.loads(answer.read()))
    except (OSError, ValueError) as error:
        print(f"live: no credentials: the run's process does not answer ({error})", file=sys.stderr, flush=True)
    os.environ.update(_given)


class SinkStream:
    """One sink with its thread and its queue."""

    def __init__(self, name: str, about: dict[str, Any]) -> None:
        self.name = name
        self.dropped = 0
        self._failed = False
        self.opened = threading.Event()
        self._about = about
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue(WAITING)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, told: dict[str, Any]) -> None:
        """Queue a report for the thread; if the queue is full, the oldest is dropped."""
        while True:
            try:
                return self._waiting.put_nowait(told)
            except queue.Full:
                self._drop()

    def _drop(self) -> None:
        with suppress(queue.Empty):
            self._waiting.get_nowait()
            self.dropped += 1

    def _run(self) -> None:
        try:
            with SINKS[self.name](self._about) as write:
                self.opened.set()
                while "end" not in (told := self._waiting.get()):
                    self._try(write, told)
                self._about["end"] = told["end"]
        except Exception as error:
            self._say(f"is given up: {type(error).__name__}: {error}")
        finally:
            self.opened.set()
            self._discard()

    def _try(self, write: Write, told: dict[str, Any]) -> None:
        """Write to the sink; a failure is logged once and retried, as a server may be down for a while."""
        try:
            write(told)
        except Exception as error:
            if not self._failed:
                self._say(f"fails: {type(error).__name__}: {error}")
            self._failed = True
            self.dropped += 1

    def _say(self, what: str) -> None:
        print(f"live: {self.name} {hidden(what, _given)}", file=sys.stderr, flush=True)

    def _discard(self) -> None:
        """Drop all further reports after a failure, until the end."""
        while "end" not in self._about:
            if "end" in self._waiting.get():
                return
            self.dropped += 1


def yield_to_training() -> None:
    """Lower the priority of every thread of this process and its children; Linux keeps it by thread (sched(7))."""
    # A thread that was not reached yet may start another one meanwhile, which has its priority.
    for _ in range(_MAX_LOOKS):
        if not any([_lowered(int(thread.name)) for thread in _threads(os.getpid())]):
            break


def _threads(pid: int) -> list[Path]:
    """Threads of a process and of all that it started and that has not ended, as folders of /proc."""
    found: list[Path] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found.append(thread)
            with suppress(OSError, ValueError):
                for child in read_text(thread / "children", _MAX_BYTES).split():
                    found += _threads(int(child))
    return found


def _lowered(thread: int) -> bool:
    """Whether the thread had a higher priority until now."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpriority(os.PRIO_PROCESS, thread) < NICE:
            os.setpriority(os.PRIO_PROCESS, thread, NICE)
            return True
    return False


def main() -> int:
    """Stream one measurement. Returns the exit code."""
    # Libraries print to standard output; that must not mix with the replies.
    answers = os.dup(1)
    os.dup2(2, 1)
    about = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not about:
        return 1
    get_variables()
    streams = [SinkStream(name, dict(about)) for name in about["sinks"]]
    ends = time.monotonic() + about["open_seconds"]
    for stream in streams:
        if not stream.opened.wait(max(0.0, ends - time.monotonic())):
            print(f"live: {stream.name} is not open after {about['open_seconds']:g} s", file=sys.stderr, flush=True)
    _answer(answers, {"said": "opened"})
    yield_to_training()
    ended = False
    for line in sys.stdin.buffer:
        told = json.loads(line)
        for stream in streams:
            stream.put(told)
        if ended := "end" in told:
            break
    if not ended:
        for stream in streams:
            stream.put({"end": "killed"})
    ends = time.monotonic() + CLOSE_SHARE * about["close_seconds"]
    for stream in streams:
        stream.thread.join(max(0.0, ends - time.monotonic()))
        if stream.thread.is_alive():
            print(f"live: {stream.name} hangs and is left behind", file=sys.stderr, flush=True)
    times = os.times()
    cpu_seconds = times.user + times.system + times.children_user + times.children_system
    _answer(answers, {"said": "closed", "dropped": sum(each.dropped for each in streams), "cpu_seconds": cpu_seconds})
    return 0


def _answer(descriptor: int, line: dict[str, Any]) -> None:
    with suppress(OSError):  # the rank has ended
        os.write(descriptor, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a hanging library must not keep this process alive
