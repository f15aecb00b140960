"""The `serve` workload: a server is started, requests are sent to it, and every one of them is timed.

workload: {kind: serve, rate: 4, new_tokens: 64, duration_seconds: 60}
workload: {kind: serve, users: 8, prompts: prompts.jsonl}
workload: {kind: serve, find: max_rate, objectives: {ttft_seconds: 0.5, tpot_seconds: 0.05}}
"""

from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.load.arrivals import (
    MIN_BURSTINESS,
    Arrivals,
    ClosedLoop,
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    TraceArrivals,
)
from configs.load.job import Caps, Contents, Endpoint, LoadJob
from configs.load.lengths import Lengths, LognormalLengths, UniformLengths
from configs.load.objectives import RequestObjectives
from configs.load.samples import SAMPLE_COLUMNS
from configs.load.search import SearchRequest
from configs.workloads.descriptor import BaseWorkload, Descriptor

DEFAULT_RATE = 1.0
MIN_RATE, MAX_RATE = 0.01, 10_000.0
"""Bounds of a search for the highest rate, where the target has no cap."""
RUN_COLUMNS = ("run_rate", "run_issuing_seconds", "run_wall_seconds", "run_requests", "run_lag_samples")
"""Of each run of the generator: one, or those of a search, in order. Rates are requests per second, NaN: none."""
PROBE_COLUMNS = ("probe_tokens", "probe_same_tokens", "probe_margin_nats")
"""Of each request that was sent alone and again under load: tokens of the longer answer, equal tokens up to the first
that differs, and the gap between the two most likely tokens there (NaN: none differs, or the server tells no gaps)."""
STATE_COLUMNS = ("state_seconds", "state_running", "state_waiting", "state_memory_bytes")
"""Of the server, once a second during a run: requests that it computes and that wait, memory of its processes."""


SERVER_FIELDS = frozenset(
    {
        "max_length", "max_sequences", "kv_cache_gib", "prefix_caching", "batch_invariant", "engine_options",
        "ready_seconds",
    }
)  # fmt: skip
"""Fields that say how a server is run; the others say what it is asked, and with which bounds."""


class ServeWorkload(BaseWorkload):
    """Traffic against a server of the cell's engine and layout, which the launch starts, or against an endpoint."""

    kind: Literal["serve"] = "serve"
    arrivals: Literal["poisson", "gamma", "constant"] = Field("poisson", description="gaps of an open loop")
    rate: PositiveFloat | None = Field(
        None, le=MAX_RATE, description="requests per second of an open loop; a search begins there; default 1"
    )
    burstiness: float = Field(0.5, ge=MIN_BURSTINESS, le=1000, description="shape of gamma gaps; 1 is Poisson")
    users: PositiveInt | None = Field(
        None, le=Caps().max_in_flight, description="closed loop: users who wait for each answer"
    )
    trace: str | None = Field(None, description="open loop of a JSONL file with times and lengths of requests")
    speed: PositiveFloat = Field(1.0, le=1000, description="factor on the rate of the trace")
    think_seconds: float = Field(0.0, ge=0, le=3600, description="mean pause of a user, and between turns")
    duration_seconds: PositiveFloat = Field(60.0, le=86_400, description="of a run; no request is due later")
    max_requests: PositiveInt | None = Field(None, le=5_000_000, description="ends a run earlier")

    prompts: str | None = Field(None, description="JSONL file with one `prompt`, or `tokens`, per line; none: random")
    prompt_tokens: Lengths = Field(128, description="length of random prompts")
    new_tokens: Lengths = Field(128, description="length of answers")
    shared_prefix_tokens: NonNegativeInt = Field(0, le=1 << 20, description="random ids before each random prompt")
    prefixes: PositiveInt = Field(1, description="number of different shared prefixes")
    turns: PositiveInt = Field(1, le=1000, description="requests of a conversation; each repeats those before it")
    exact: bool = Field(True, description="answers of exactly `new_tokens`, where the engine can")
    temperature: float = Field(0.0, ge=0, le=2)

    find: Literal["max_rate"] | None = Field(None, description="search for the highest rate under the objectives")
    objectives: RequestObjectives | None = Field(None, description="bounds on the latencies of one request")
    tolerance: float = Field(0.05, gt=0, lt=1, description="width of the interval that a search looks for")
    max_runs: PositiveInt = Field(40, le=1000, description="runs of a search")

    judged_requests: NonNegativeInt = Field(
        8, le=1000, description="requests that are sent alone and again under load, to compare their answers"
    )
    max_length: PositiveInt | None = Field(None, description="tokens of a sequence, prompt and answer")
    max_sequences: PositiveInt = Field(32, description="sequences that the server computes at once")
    kv_cache_gib: PositiveFloat | None = Field(None, description="key-value cache of each rank; none: the engine's own")
    prefix_caching: bool = True
    batch_invariant: bool = Field(False, description="rankwise: refuse where company could change an answer's bits")
    engine_options: dict[str, str | int | float | bool] = Field({}, description="passed to the server as they are")
    ready_seconds: float = Field(300.0, ge=1, le=86_400, description="time in which the server must be ready")

    @model_validator(mode="after")
    def _one_kind_of_traffic(self) -> Self:
        given = [name for name in ("rate", "users", "trace") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: {given[0]} is given too. Use one of rate, users, trace")
        if self.find is not None and self.objectives is None:
            raise ValueError("objectives: expected bounds for `find: max_rate`, for example {ttft_seconds: 0.5}")
        if self.find is not None and (self.users or self.trace):
            raise ValueError("find: max_rate is for open loops. Leave out users and trace")
        if self.prompts is not None and self.shared_prefix_tokens:
            raise ValueError("shared_prefix_tokens: random prompts only. Write the prefix into the file of prompts")
        longest = longest_of(self.new_tokens)
        if self.max_length is not None and longest >= self.max_length:
            raise ValueError(f"new_tokens: up to {longest} tokens, but max_length is {self.max_length}")
        return self

    @property
    def first_rate(self) -> float:
        """Requests per second of an open loop, or of the first run of a search."""
        return DEFAULT_RATE if self.rate is None else self.rate

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        if self.find is not None:
            return "highest rate"
        if self.users is not None:
            return f"{self.users} user{'' if self.users == 1 else 's'}"
        if self.trace is not None:
            return "trace" if self.speed == 1 else f"trace at {self.speed:g} times"
        return f"{self.first_rate:g} requests/s" + ("" if self.arrivals == "poisson" else f" {self.arrivals}")

    @property
    def server_tokens(self) -> int | None:
        """Tokens of the longest sequence that the fields can ask for; None where a file decides."""
        if self.max_length is not None:
            return self.max_length
        if self.prompts is not None or self.trace is not None:
            return None
        one = longest_of(self.prompt_tokens) + longest_of(self.new_tokens)
        return self.shared_prefix_tokens + one * self.turns

    @property
    def longest_sequence(self) -> tuple[str, int, str] | None:
        tokens = self.server_tokens
        field = "new_tokens" if self.max_length is None else "max_length"
        return None if tokens is None else (field, tokens, f"a sequence takes up to {tokens} positions")

    @property
    def process_state(self) -> dict[str, Any]:
        """What the server is started with."""
        names = (
            "max_sequences", "kv_cache_gib", "prefix_caching", "batch_invariant", "engine_options", "ready_seconds",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "tokens": self.server_tokens}

    @property
    def passes(self) -> int | None:
        return 1

    def known_seconds(self, ranks: int) -> float | None:
        return None if self.find is not None or self.max_requests is not None else self.duration_seconds

    @property
    def min_timeout_seconds(self) -> float:
        runs = self.max_runs if self.find is not None else 1
        return self.ready_seconds + runs * (1.5 * self.duration_seconds + 10) + 30 * self.judged_requests

    @property
    def server_only(self) -> dict[str, str]:
        names = [name for name in type(self).model_fields if name in SERVER_FIELDS]
        what = "a server that the study starts, which a target of kind endpoint is not"
        return dict.fromkeys(self._set_among(names), what)

    def _set_among(self, names: Iterable[str]) -> list[str]:
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]

    @property
    def without_effect(self) -> dict[str, str]:
        is_open = self.users is None and self.trace is None
        needed = {
            "arrivals": (is_open, "an open loop, such as rate"),
            "burstiness": (is_open and self.arrivals == "gamma", "arrivals: gamma"),
            "speed": (self.trace is not None, "trace"),
            "think_seconds": (self.users is not None or self.turns > 1, "users or turns"),
            "prompt_tokens": (self.prompts is None, "random prompts, which prompts are not"),
            "prefixes": (self.shared_prefix_tokens > 0, "shared_prefix_tokens"),
            "tolerance": (self.find is not None, "find: max_rate"),
            "max_runs": (self.find is not None, "find: max_rate"),
        }
        return {name: needed[name][1] for name in self._set_among(needed) if not needed[name][0]}

    def scaled(self, factor: int) -> Self:
        """Traffic is not a rank's work: it stays."""
        return self

    def requests(self, endpoint: Endpoint, vocabulary: int | None, folder: str | None, max_rate: float | None,
                 max_tokens: int | None, seed: int, rate: float | None = None) -> LoadJob:  # fmt: skip
        """Return the job of one run of the generator. rate: of a run of a search; none: of its first one. folder: of
        the input files.

        Raises ValueError for a rate above the target's cap.
        """
        if rate is None and self.find is not None:
            rate = self.search(max_rate).first_rate
        first, end = Contents().vocabulary
        contents = Contents(
            prompts=self.prompts and _placed(self.prompts, folder),
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            vocabulary=(first, end) if vocabulary is None else (min(first, vocabulary - 1), min(end, vocabulary)),
            shared_prefix_tokens=self.shared_prefix_tokens,
            prefixes=self.prefixes,
            turns=self.turns,
            think_seconds=self.think_seconds,
            exact=self.exact,
            temperature=self.temperature,
        )
        return LoadJob(
            endpoint=endpoint,
            arrivals=self._arrivals(rate, folder),
            contents=contents,
            caps=Caps(max_rate=max_rate, max_tokens=max_tokens, timeout_seconds=min(300.0, 5 * self.duration_seconds)),
            duration_seconds=self.duration_seconds,
            max_requests=self.max_requests,
            seed=seed,
        )

    def search(self, cap: float | None) -> SearchRequest:
        """What a search of these fields looks for. cap: of the target, in requests per second."""
        assert self.objectives is not None
        first = min(self.first_rate, cap or MAX_RATE)
        return SearchRequest(
            objectives=self.objectives,
            first_rate=first,
            tolerance=self.tolerance,
            min_rate=min(MIN_RATE, first),
            max_rate=max(first, cap or MAX_RATE),
            max_runs=self.max_runs,
        )

    def _arrivals(self, rate: float | None, folder: str | None) -> Arrivals:
        if self.users is not None:
            return ClosedLoop(users=self.users, think_seconds=self.think_seconds)
        if self.trace is not None:
            return TraceArrivals(file=_placed(self.trace, folder), speed=self.speed)
        conversations = (rate or self.first_rate) / self.turns
        if self.arrivals == "gamma":
            return GammaArrivals(rate=conversations, burstiness=self.burstiness)
        return (
            ConstantArrivals(rate=conversations) if self.arrivals == "constant" else PoissonArrivals(rate=conversations)
        )


def longest_of(lengths: Lengths) -> int:
    """Return the largest length that can be drawn."""
    if isinstance(lengths, UniformLengths):
        return lengths.high
    return lengths.max if isinstance(lengths, LognormalLengths) else lengths


def _placed(name: str, folder: str | None) -> str:
    return name if folder is None else f"{folder}/{name}.jsonl"


DESCRIPTOR = Descriptor(
    kind="serve",
    model=ServeWorkload,
    unit="token",
    throughput="tokens_per_second",
    columns=("pass_seconds", *SAMPLE_COLUMNS, *RUN_COLUMNS, *PROBE_COLUMNS, *STATE_COLUMNS),
    latencies={},
    latency=None,
    axes=("dp", "tp", "pp"),
    engines=("rankwise", "transformers", "vllm", "sglang", "llama.cpp", "endpoint"),
    compressible=True,
    needs_model=True,
    input_fields=("prompts", "trace"),
    starts_server=True,
    compared=False,
    shown_by="load",
    unpredicted="load on a server is not predicted",
    verb="Serve",
)
"""Its figures are those of single requests: `reports.experiments.load.text` has its tables."""
