"""Figures of a server for Prometheus, under vLLM's names where the meaning is the same.

    metrics = ServerMetrics("my-model")
    metrics.write()                       # text of GET /metrics

Names and meanings: https://docs.vllm.ai/en/stable/design/metrics.html. Names of our own begin with `rankwise:`.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.serving.scheduling import FinishReason

_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_GAP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class _Tokens(Collector):
    """Generated tokens and the time between them.

    They are noted up to tens of thousands of times a second: prometheus_client's counter and histogram take ten times
    as long for each.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._generated, self._seconds = 0, 0.0
        self._gaps = [0] * (len(_GAP) + 1)

    def note(self, count: int, gap_seconds: float | None) -> None:
        self._generated += count
        if gap_seconds is not None:
            self._seconds += gap_seconds
            self._gaps[bisect_left(_GAP, gap_seconds)] += 1
        self._gaps[0] += count - 1

    def collect(self) -> Iterator[Metric]:
        generated = CounterMetricFamily("vllm:generation_tokens", "Generated tokens", labels=["model_name"])
        generated.add_metric([self._model], self._generated)
        yield generated
        gaps = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Time between tokens", labels=["model_name"])
        bounds = [*map(str, _GAP), "+Inf"]
        gaps.add_metric([self._model], list(zip(bounds, accumulate(self._gaps), strict=True)), self._seconds)
        yield gaps


class ServerMetrics:
    """All figures; `replica` is a label of those that belong to one. Each is there, as 0, before anything happens."""

    def __init__(self, model: str, replicas: int = 1) -> None:
        self.registry = CollectorRegistry()
        label = ("model_name",)
        own = (*label, "engine")
        self._model = model
        self._children: dict[tuple[int, str | None], Any] = {}
        self._running = Gauge("vllm:num_requests_running", "Requests in execution", own, registry=self.registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests in the queue", own, registry=self.registry)
        self._usage = Gauge(
            "vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1", own, registry=self.registry
        )
        self._preempted = Counter("vllm:num_preemptions", "Preemptions", own, registry=self.registry)
        self._queries = Counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the cache", own, registry=self.registry
        )
        self._hits = Counter("vllm:prefix_cache_hits", "Tokens found in the cache", own, registry=self.registry)
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts", label, registry=self.registry)
        self._success = Counter(
            "vllm:request_success", "Finished requests", (*label, "finished_reason"), registry=self.registry
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Time to first token", label, buckets=_TTFT, registry=self.registry
        )
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds", "Time of a request", label, buckets=_WHOLE, registry=self.registry
        )
        self._steps = Counter("rankwise:steps", "Steps of the engine", own, registry=self.registry)
        self._compute = Counter("rankwise:compute_seconds", "Time in steps", own, registry=self.registry)
        self._other = Counter(
            "rankwise:between_steps_seconds", "Time between steps while there was work", own, registry=self.registry
        )
        self._changes = {
            "preemptions": self._preempted,
            "prefix_tokens": self._queries,
            "cached_tokens": self._hits,
            "compute_seconds": self._compute,
            "other_seconds": self._other,
        }
        self._restarts = Counter("rankwise:replica_restarts", "Starts after a failure", own, registry=self.registry)
        self._refused = Counter(
            "rankwise:requests_refused", "Requests answered with an error", (*label, "status"), registry=self.registry
        )
        self._tokens = _Tokens(model)
        self.registry.register(self._tokens)
        for metric in (self._prompt, self._ttft, self._whole):
            self._of(metric)
        for reason in get_args(FinishReason):
            self._of(self._success, reason)
        for replica in range(replicas):
            self.state(replica, 0, 0, 0.0)
            self.step(replica, 0, dict.fromkeys(self._changes, 0.0))
            self._of(self._restarts, str(replica))

    def state(self, replica: int, running: int, waiting: int, usage: float) -> None:
        """Note the state of a replica. usage: share of the cache's blocks that sequences have."""
        self._of(self._running, str(replica)).set(running)
        self._of(self._waiting, str(replica)).set(waiting)
        self._of(self._usage, str(replica)).set(usage)

    def step(self, replica: int, steps: int, changes: dict[str, float]) -> None:
        """Note one step or none: increases of preemptions, prefix tokens and seconds since the last one."""
        self._of(self._steps, str(replica)).inc(steps)
        for name, counter in self._changes.items():
            self._of(counter, str(replica)).inc(changes[name])

    def restarted(self, replica: int) -> None:
        """Note that a replica is started again."""
        self._of(self._restarts, str(replica)).inc()

    def started(self, prompt_tokens: int) -> None:
        """Note an accepted request."""
        self._of(self._prompt).inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """Note the time to first token."""
        self._of(self._ttft).observe(seconds)

    def tokens(self, count: int, gap_seconds: float | None) -> None:
        """Note generated tokens that are sent together, and the time since the one before (None: there is none)."""
        self._tokens.note(count, gap_seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """Note a finished answer."""
        self._of(self._success, reason).inc()
        self._of(self._whole).observe(seconds)

    def refused(self, status: int) -> None:
        """Note an answer with an error."""
        self._of(self._refused, str(status)).inc()

    def _of(self, metric: Any, label: str | None = None) -> Any:
        """Return a metric's child for this model and its second label; a lookup of prometheus_client takes longer."""
        key = (id(metric), label)
        child = self._children.get(key)
        if child is None:
            labels = (self._model,) if label is None else (self._model, label)
            child = self._children[key] = metric.labels(*labels)
        return child

    def write(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self.registry)
