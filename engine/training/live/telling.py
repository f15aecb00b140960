"""The rank's end of the live streams: a pipe to a process of its own, which does all that could be slow.

    live = open_live(visit, context)      # a no-op unless measuring.live asks, and on all ranks but the first
    if live.wants:
        live.tell(step=10, seconds=0.21, tokens=4096, loss=2.1, exposed_seconds=0.01)
    live.close()

What training pays is a line into a pipe about once a second. The libraries live in the process at the other end
(`engine.training.live.streamer`): they neither hold this process's interpreter lock nor grow its memory, they run at
the lowest priority once training begins, and one that fails or hangs takes nothing with it. A full pipe is never
waited for: what does not fit is counted in `live_dropped`. Imports no torch by itself.
"""

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from engine.measure import resident_memory_bytes

if TYPE_CHECKING:
    import torch

    from configs.job import Visit
    from configs.record import Figure
    from engine.context import Context

EVERY_SECONDS = 1.0
OPEN_SECONDS = 30.0
"""How long the first step waits for the libraries: MLflow alone may take ten seconds to make its database."""
CLOSE_SECONDS = 10.0
_GAUGES = ("loss", "gradient_norm", "learning_rate", "validation_loss")


def open_live(visit: "Visit", context: "Context") -> "Live":
    """The streams that `measuring.live` asks for, ready to be told; nothing in passes that time nothing."""
    if not context.job.measuring.live or context.rank != 0 or context.measuring_pass != "timed":
        return Live()
    # Other ranks may already wait for this one in a collective.
    limit = min(OPEN_SECONDS, context.job.measuring.group_timeout_seconds / 2)
    return Live(_about(visit, context) | {"open_seconds": limit}, context.device)


def _about(visit: "Visit", context: "Context") -> dict[str, Any]:
    """What the streamer must know of the visit."""
    cell, measuring = visit.cell, context.job.measuring
    root = context.paths.live
    name = f"{re.sub(r'[^A-Za-z0-9.=]+', '-', cell.label).strip('-')}-{cell.key[:8]}-r{visit.repeat}"
    return {
        "sinks": list(measuring.live),
        "study": context.job.study,
        "cell": cell.label,
        "key": cell.key,
        "repeat": visit.repeat,
        "attempt": visit.attempt,
        "name": name,
        "root": str(root.absolute()),
        "folder": str((root / name).absolute()),
        "host": socket.gethostname(),
        "port": measuring.prometheus_port,
        "config": cell.model_dump(mode="json"),
    }


class Live:
    """The streams of one visit. Nothing that it does raises: training is worth more than what is told of it."""

    def __init__(self, about: dict[str, Any] | None = None, device: "torch.device | None" = None) -> None:
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._dropped = 0
        self._figures: dict[str, Figure] = {}
        self._told_at = 0.0
        self._kept: dict[str, Any] = {}
        self._exposed: float | None = 0.0
        self._forget()
        if about is not None:
            try:
                self._open(about)
            except OSError as error:
                _say(f"nothing is told: {error}")
                self._end()

    @property
    def wants(self) -> bool:
        """Whether anybody listens."""
        return self._process is not None

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def tell(
        self,
        *,
        step: int,
        seconds: float | None = None,
        tokens: int = 0,
        exposed_seconds: float | None = None,
        **values: float | None,
    ) -> None:
        """What a step, or an evaluation after it, came to. Sent about once a second, the last one always.

        step: steps done. seconds: of this step; tokens: of this step, over all ranks; exposed_seconds: of this step,
        in which this rank waited for others. values: loss, gradient_norm, learning_rate, validation_loss.
        """
        if self._process is None:
            return
        self._kept["step"] = step
        if seconds is not None:
            self._steps += 1
            self._seconds += seconds
            self._tokens += tokens
            self._exposed = (
                None if exposed_seconds is None or self._exposed is None else self._exposed + exposed_seconds
            )
        self._kept |= {name: values[name] for name in _GAUGES if values.get(name) is not None}
        if time.monotonic() - self._told_at >= EVERY_SECONDS:
            self._send()

    def close(self, failed: bool = False) -> None:
        """Send what was kept, and give the streams up to CLOSE_SECONDS to be written. Never waits for longer."""
        if self.wants and self._kept:
            self._send()
        if not self.wants:
            return
        with suppress(OSError):
            self._write({"end": "failed" if failed else "finished"})
        reply = self._reply("closed", CLOSE_SECONDS)
        if reply is None:
            _say(f"the streams were not written within {CLOSE_SECONDS:g} s and are left as they are")
        else:
            self._dropped += reply["dropped"]
            self._figures["live_cpu_seconds"] = reply["cpu_seconds"]
        self._end()

    def figures(self) -> "dict[str, Figure]":
        """After `close`: how much was not told, and what the other process cost. Empty where nothing was asked for."""
        return self._figures

    def _open(self, about: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "engine.training.live.streamer"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._figures = {"live_dropped": 0}
        began = time.monotonic()
        self._write(about)
        os.set_blocking(self._stdin.fileno(), False)
        if self._reply("opened", about["open_seconds"] + 1) is None:
            _say(f"not ready after {time.monotonic() - began:.0f} s; training begins without waiting for it")

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin

    def _write(self, line: dict[str, Any]) -> None:
        # One write of less than PIPE_BUF bytes goes into a pipe whole or not at all (pipe(7)).
        os.write(self._stdin.fileno(), json.dumps(line).encode() + b"\n")

    def _send(self) -> None:
        line = {name: value for name, value in self._kept.items() if value is not None}
        line |= self._rates() | self._memory() | {"time": time.time()}
        try:
            self._write(line)
        except BlockingIOError:
            self._dropped += 1
        except OSError as error:
            _say(f"nothing more is told: {error}")
            self._end()
        self._forget()

    def _forget(self) -> None:
        self._told_at = time.monotonic()
        self._kept = {}
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._exposed = 0.0

    def _rates(self) -> dict[str, float]:
        if self._seconds <= 0:
            return {}
        rates = {"steps_per_second": self._steps / self._seconds, "tokens_per_second": self._tokens / self._seconds}
        return rates if self._exposed is None else rates | {"communication_share": self._exposed / self._seconds}

    def _memory(self) -> dict[str, int]:
        memory = {"memory_bytes": resident_memory_bytes()}
        if self._device is not None and self._device.type == "cuda":
            import torch

            memory["device_memory_bytes"] = torch.cuda.memory_allocated(self._device)
        return {name: value for name, value in memory.items() if value is not None}

    def _reply(self, said: str, limit_seconds: float) -> dict[str, Any] | None:
        """The streamer's line of that kind, or None where there is none in time. Its lines are short and come whole."""
        assert self._process is not None and self._process.stdout is not None
        ends = time.monotonic() + limit_seconds
        while select.select([self._process.stdout], [], [], max(0.0, ends - time.monotonic()))[0]:
            line = self._process.stdout.readline()
            if not line:
                return None  # it has ended, and its log says why
            reply: dict[str, Any] = json.loads(line)
            if reply["said"] == said:
                return reply
        return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._figures["live_dropped"] = self._dropped
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.kill()
        process.wait()


def _say(what: str) -> None:
    print(f"live: {what}", file=sys.stderr, flush=True)
