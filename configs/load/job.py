"""The job of a load generator: endpoint, traffic, contents of requests and caps, in one JSON file.

    job = LoadJob(endpoint=Endpoint(url="http://127.0.0.1:8000", model="m"), arrivals=PoissonArrivals(rate=4),
                  duration_seconds=60)

`python -m engine.load JOB.json FOLDER` reads it and writes `configs.load.samples` beside it.
"""

import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.common.base import Frozen
from configs.common.secrets import shown_url
from configs.load.arrivals import Arrivals, ClosedLoop, TraceArrivals
from configs.load.lengths import Lengths

_ROUNDING = 1 + 1e-9
"""A rate is divided by the turns of a conversation and multiplied again."""
_BURST, _BURST_REQUESTS, _BURST_SECONDS = 3, 10, 1.0
"""By chance a Poisson process sends thirty requests in the time of ten once in a hundred million times."""
_OWN_FIELDS = frozenset(
    {"model", "prompt", "max_tokens", "min_tokens", "ignore_eos", "temperature", "stream", "stream_options"}
)


class Endpoint(Frozen):
    """An OpenAI-compatible server. A bearer token is read from the environment, never written to a file."""

    url: str = Field(description="http(s)://host[:port][/path]; /v1/completions is appended")
    model: str = Field(min_length=1, description="name of the model at the server")
    token_variable: str | None = Field(None, description="environment variable that holds the bearer token")

    @field_validator("url")
    @classmethod
    def _an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"got {shown_url(url)!r}, whose port is not a number up to 65535") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(f"got {shown_url(url)!r}, expected http://HOST:PORT or https://HOST")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("expected no user, password, query or fragment. Pass a token by `token_variable`")
        if not re.fullmatch(r"[!-~]+", url):
            raise ValueError("expected printable ASCII without spaces")
        return url.rstrip("/").removesuffix("/v1")

    @field_validator("token_variable")
    @classmethod
    def _a_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"got {name[:60]!r}, expected the name of an environment variable")
        return name


class Contents(Frozen):
    """What the requests ask for. Without a file, prompts are random token ids of the wished length."""

    prompts: str | None = Field(None, description="JSONL file with one `prompt`, or `tokens`, per line")
    prompt_tokens: Lengths = Field(128, description="length of random prompts, without the shared prefix")
    vocabulary: tuple[int, int] = Field((10, 1000), description="random token ids, from and below")
    shared_prefix_tokens: int = Field(0, ge=0, le=1 << 20, description="random ids before each prompt")
    prefixes: PositiveInt = Field(1, description="number of different shared prefixes, drawn at random")
    turns: PositiveInt = Field(1, le=1000, description="requests of a conversation; each repeats those before it")
    think_seconds: float = Field(0.0, ge=0, le=3600, description="mean exponential time between turns")
    new_tokens: Lengths = Field(128, description="`max_tokens` of a request")
    exact: bool = Field(False, description="ask for exactly `new_tokens`: sends ignore_eos and min_tokens")
    temperature: float = Field(0.0, ge=0, le=2)
    fields: dict[str, Any] = Field({}, description="further fields of every request, for example top_p")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        first, end = self.vocabulary
        if not 0 <= first < end:
            raise ValueError(f"vocabulary: got {first} to {end}, expected a range of token ids, FROM below TO")
        if self.prompts is not None and self.shared_prefix_tokens:
            raise ValueError("shared_prefix_tokens: random prompts only. Write the prefix into the file of `prompts`")
        own = sorted(_OWN_FIELDS & self.fields.keys())
        if own:
            raise ValueError(f"fields: {own[0]} is set by the generator. Leave it out")
        if self.fields.get("n") not in (None, 1):  # their tokens would count as those of one answer
            raise ValueError("fields: n: one answer to a request is measured. Leave it out, and send more requests")
        return self


class Caps(Frozen):
    """Limits that protect the server; a generator stops or waits, and says that it did."""

    max_rate: PositiveFloat | None = Field(
        None, description="mean requests/s; a schedule above it, or with a burst of three times it, is refused"
    )
    max_tokens: PositiveInt | None = Field(None, description="tokens asked for in all, prompts and answers")
    spent_tokens: NonNegativeInt = Field(0, description="of max_tokens: what requests beside the generator's ask for")
    spent_samples: NonNegativeInt = Field(0, description="numbers kept of earlier runs, which this one's are read with")
    max_in_flight: PositiveInt = Field(4096, le=60_000, description="requests at once; later ones are dropped")
    timeout_seconds: PositiveFloat = Field(300.0, description="of a request")

    @property
    def burst(self) -> tuple[float, float] | None:
        """How many requests are sent at most within how many seconds, by the cap of rate; None: any number."""
        if self.max_rate is None:
            return None
        seconds = max(_BURST_SECONDS, _BURST_REQUESTS / self.max_rate)
        return _BURST * max(float(_BURST_REQUESTS), self.max_rate * _BURST_SECONDS), seconds

    def problem_of(self, users: int | None, rate: float | None) -> str | None:
        """Why traffic is refused under the cap of rate, with the field's name; None where it is not."""
        if self.max_rate is not None and users:
            return f"users: their rate is the server's speed, and max_rate caps it at {self.max_rate:g}. Use a rate"
        if self.max_rate is not None and rate is not None and rate > self.max_rate * _ROUNDING:
            return f"rate: {rate:g} requests/s, above the cap of {self.max_rate:g}"
        return None


class LoadJob(Frozen):
    """One run of a generator: so many seconds of traffic, then the requests in flight are awaited."""

    endpoint: Endpoint
    arrivals: Arrivals
    contents: Contents = Contents()
    caps: Caps = Caps()
    duration_seconds: PositiveFloat | None = Field(None, le=7 * 86400, description="no request is due later")
    max_requests: PositiveInt | None = Field(None, le=5_000_000)
    seed: int = Field(0, ge=0)
    kind: Literal["load"] = "load"

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.duration_seconds is None and self.max_requests is None and not isinstance(self.arrivals, TraceArrivals):
            raise ValueError("duration_seconds: expected a duration or `max_requests`")
        users = self.arrivals.users if isinstance(self.arrivals, ClosedLoop) else 0
        if users > self.caps.max_in_flight:
            raise ValueError(
                f"arrivals.users: got {users:,}, expected at most {self.caps.max_in_flight:,}: as many requests are in "
                "flight at once, and those of the others would not be sent"
            )
        problem = self.caps.problem_of(users, self.requested_rate)
        if problem is not None:
            raise ValueError(f"arrivals.{problem}")
        return self

    @property
    def requested_rate(self) -> float | None:
        """Requests per second of an open loop; None where a trace or the server's speed decides."""
        if isinstance(self.arrivals, ClosedLoop | TraceArrivals):
            return None
        return self.arrivals.rate * self.contents.turns
