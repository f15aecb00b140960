"""The rank's end of the live streams: a pipe to a separate process, which does all slow work.

    live = open_live(measurement, context)      # a no-op without measuring.live, and on all ranks but a node's first
    if live.wants:
        live.tell(step=10, seconds=0.21, tokens=4096, loss=2.1, exposed_seconds=0.01)
    live.close()

The cost for training is a line into a pipe about once a second. The libraries run in a separate process
(`engine.training.live.streamer`), so they hold no interpreter lock and use no memory of this one. They run at a
low priority once training begins, and their failures do not affect training. Writes never block on a full pipe:
dropped lines are counted in `live_dropped`. Imports no torch.
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

from configs.targets.target import LocalTarget
from engine.rank.host_usage import resident_memory_bytes
from engine.training.live.metrics import OF_NODE
from engine.training.network import NetworkBytes, network_bytes

if TYPE_CHECKING:
    import torch

    from configs.plans.job import Measurement
    from configs.records.record import Figure
    from engine.context import Context
    from engine.profiling.gpu import PowerMeter

EVERY_SECONDS = 1.0
OPEN_SECONDS = 30.0
"""Time-out of the first step for opening the libraries: MLflow alone may take ten seconds to create its database."""
CLOSE_SECONDS = 30.0
"""For what was told last to be written: on a busy machine that takes long, and what is not written is lost."""
_GAUGES = ("loss", "gradient_norm", "learning_rate", "validation_loss")


LOOPBACK = "127.0.0.1"


def open_live(measurement: "Measurement", context: "Context") -> "LiveStreams":
    """Open the streams configured in `measuring.live`; none in passes without timing.

    The first rank of each node has streams: that of the first node tells everything, others what is of their node.
    """
    if not context.job.measuring.live or context.local_rank != 0 or context.measuring_pass != "timed":
        return LiveStreams()
    # Other ranks may already wait for this one in a collective.
    limit = min(OPEN_SECONDS, context.job.measuring.group_timeout_seconds / 2)
    return LiveStreams(_about(measurement, context) | {"open_seconds": limit}, context.device, _meter(context))


def _meter(context: "Context") -> "PowerMeter | None":
    """Return a meter of the GPUs of this node's ranks; None without GPUs, or where not all of them are in sight."""
    if context.device.type != "cuda":
        return None
    from engine.planner.accelerators import local_accelerators
    from engine.profiling.gpu import PowerMeter

    ranks = context.job.ranks_per_node
    found = local_accelerators()[:ranks]
    return PowerMeter([device.uuid for device in found]) if len(found) == ranks else None


def _about(measurement: "Measurement", context: "Context") -> dict[str, Any]:
    """Return the description of the measurement for the streamer."""
    cell, measuring = measurement.cell, context.job.measuring
    root = context.paths.live
    name = f"{re.sub(r'[^A-Za-z0-9.=]+', '-', cell.label).strip('-')}-{cell.key[:8]}-r{measurement.repeat}"
    node = context.rank // context.job.ranks_per_node
    name += f"-node{node}" if node else ""
    return {
        # MLflow's runs of a study share a database file, which nodes must not write at once.
        "sinks": [sink for sink in measuring.live if not node or sink != "mlflow"],
        "node": node,
        "study": context.job.study,
        "cell": cell.label,
        "key": cell.key,
        "repeat": measurement.repeat,
        "attempt": measurement.attempt,
        "name": name,
        "root": str(root.absolute()),
        "folder": str((root / name).absolute()),
        "host": LOOPBACK if isinstance(context.job.target, LocalTarget) else socket.gethostname(),
        "port": measuring.prometheus_port,
        # Other ranks may already wait for this one in a collective.
        "close_seconds": min(CLOSE_SECONDS, measuring.group_timeout_seconds / 2),
        "config": cell.model_dump(mode="json"),
    }


class LiveStreams:
    """The streams of one measurement. No method raises, because training has priority over live metrics."""

    def __init__(
        self,
        about: dict[str, Any] | None = None,
        device: "torch.device | None" = None,
        meter: "PowerMeter | None" = None,
    ) -> None:
        self._device, self._meter = device, meter
        self._of_node = about is not None and about["node"] > 0
        self._close_seconds: float = CLOSE_SECONDS if about is None else about["close_seconds"]
        self._process: subprocess.Popen[bytes] | None = None
        self._dropped = 0
        self._figures: dict[str, Figure] = {}
        self._told_at = 0.0
        self._kept: dict[str, Any] = {}
        self._exposed: float | None = 0.0
        self._forget()
        self._network: tuple[float, NetworkBytes | None] = (0.0, None)
        if about is not None:
            try:
                self._open(about)
                self._network = time.monotonic(), network_bytes()
            except OSError as error:
                _say(f"nothing is told: {error}")
                self._end()

    @property
    def wants(self) -> bool:
        """Whether any stream is open."""
        return self._process is not None

    def __enter__(self) -> "LiveStreams":
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
        """Report a step, or an evaluation after it. Sent about once a second; the last one always.

        step: steps done. seconds: of this step; tokens: of this step, over all ranks; exposed_seconds: of this step,
        waiting for other ranks. values: loss, gradient_norm, learning_rate, validation_loss.
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
        """Send the rest, and wait up to CLOSE_SECONDS for the streams to be written."""
        if self.wants and self._kept:
            self._send()
        if not self.wants:
            return
        with suppress(OSError):
            self._write({"end": "failed" if failed else "finished"})
        reply = self._reply("closed", self._close_seconds)
        if reply is None:
            _say(f"the streams were not written within {self._close_seconds:g} s and are left as they are")
        else:
            self._dropped += reply["dropped"]
            self._figures["live_cpu_seconds"] = reply["cpu_seconds"]
        self._end()

    def figures(self) -> "dict[str, Figure]":
        """Return, after `close`, the dropped lines and the other process's cost. Empty without streams."""
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
        # A write of less than PIPE_BUF bytes to a pipe is atomic (pipe(7)).
        os.write(self._stdin.fileno(), json.dumps(line).encode() + b"\n")

    def _send(self) -> None:
        line = {name: value for name, value in self._kept.items() if value is not None}
        line |= self._rates() | self._hardware() | self._traffic() | {"time": time.time()}
        if self._of_node:
            line = {name: value for name, value in line.items() if name in (*OF_NODE, "time")}
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

    def _hardware(self) -> dict[str, float]:
        memory: dict[str, float | None] = {"memory_bytes": resident_memory_bytes()}
        if self._meter is not None:
            memory["device_power_watts"] = self._meter.watts()
        if self._device is not None and self._device.type == "cuda":
            import torch

            memory["device_memory_bytes"] = torch.cuda.memory_allocated(self._device)
        return {name: value for name, value in memory.items() if value is not None}

    def _traffic(self) -> dict[str, float]:
        """Return what the node's network interfaces moved in a second since the last message."""
        (began, before), (now, counters) = self._network, (time.monotonic(), network_bytes())
        self._network = now, counters
        if before is None or counters is None or now <= began:
            return {}
        moved = counters.since(before)
        return {
            "network_sent_bytes_per_second": moved.sent / (now - began),
            "network_received_bytes_per_second": moved.received / (now - began),
        }

    def _reply(self, said: str, limit_seconds: float) -> dict[str, Any] | None:
        """Return the streamer's line of that kind, or None on time-out. Its lines are short and arrive whole."""
        assert self._process is not None and self._process.stdout is not None
        ends = time.monotonic() + limit_seconds
        while select.select([self._process.stdout], [], [], max(0.0, ends - time.monotonic()))[0]:
            line = self._process.stdout.readline()
            if not line:
                return None  # it has ended; its log has the reason
            reply: dict[str, Any] = json.loads(line)
            if reply["said"] == said:
                return reply
        return None

    def _end(self) -> None:
        if self._meter is not None:
            self._meter.close()
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
