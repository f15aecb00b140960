"""What a server says of itself during a run: requests that it computes and that wait, memory, preemptions, cache hits.

    watch = Watch(url, token, server)
    with watch: ...
    watch.columns(), watch.figures()

Counters begin at zero where a server is started again in between; what happened is unknown then.
Names are those of vLLM's and SGLang's Prometheus metrics; a server without `/metrics` leaves them unknown.
"""

import threading
import time
from math import nan

import numpy as np

from configs.records.record import Figure
from engine.workloads.servers.process import RunningServer, fetched

EVERY_SECONDS = 1.0
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_tokens": ("vllm:prefix_cache_queries_total",),
    "cached_tokens": ("vllm:prefix_cache_hits_total",),
    "compute_seconds": ("rankwise:compute_seconds_total",),
    "between_steps_seconds": ("rankwise:between_steps_seconds_total",),
}


class Watch:
    """Looks at a server once a second, in a thread, while a run goes on. server: None for an endpoint."""

    def __init__(self, url: str, token: str | None, server: RunningServer | None) -> None:
        self._url, self._token, self._server = url, token, server
        self._rows: list[tuple[float, float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._before: dict[str, float | None] = {}
        self._after: dict[str, float | None] = {}
        self._last: dict[str, float] = {}
        self._restarted = False

    def __enter__(self) -> "Watch":
        self._before = self._counted(self._page())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._after = self._counted(self._page())

    def columns(self) -> dict[str, np.ndarray]:
        """Columns of `configs.workloads.serve.STATE_COLUMNS`."""
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, 4)
        names = ("state_seconds", "state_running", "state_waiting", "state_memory_bytes")
        return {name: rows[:, place].copy() for place, name in enumerate(names)}

    def figures(self) -> dict[str, Figure]:
        """What happened during the run; None where the server does not say, or was started again meanwhile."""
        found: dict[str, Figure] = {}
        for name in _COUNTERS:
            before, after = self._before.get(name), self._after.get(name)
            found[name] = None if before is None or after is None or self._restarted else after - before
        return found

    def _look(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(EVERY_SECONDS):
            page = self._page()
            self._counted(page)
            memory = None if self._server is None else self._server.memory_bytes()
            running, waiting = _value(page, _RUNNING), _value(page, _WAITING)
            state = [nan if one is None else float(one) for one in (running, waiting, memory)]
            self._rows.append((time.monotonic() - began, state[0], state[1], state[2]))

    def _page(self) -> dict[str, float]:
        return read_metrics(fetched(f"{self._url}/metrics", self._token) or b"")

    def _counted(self, page: dict[str, float]) -> dict[str, float | None]:
        """The counters of a page; notes where one has become less since the last page that had it."""
        counts = {name: _value(page, names) for name, names in _COUNTERS.items()}
        for name, value in counts.items():
            if value is not None:
                self._restarted |= value < self._last.get(name, value)
                self._last[name] = value
        return counts


def read_metrics(page: bytes) -> dict[str, float]:
    """Return the metrics of a page in Prometheus' text format, each summed over its labels."""
    found: dict[str, float] = {}
    for line in page.decode("utf-8", "replace").splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if line.startswith("#") or not name:
            continue
        try:
            value = float(rest.rpartition("}")[2].split()[0])  # a timestamp may follow
        except (ValueError, IndexError):
            continue
        found[name.strip()] = found.get(name.strip(), 0.0) + value
    return found


def _value(page: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((page[name] for name in names if name in page), None)
