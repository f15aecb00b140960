"""Requests that are sent alone and again under load, and how far their answers agree.

    probes = Probes(job, count, token, exact)
    probes.alone()
    probes.again(seconds, stop)          # in a thread of its own, spread over a run
    probes.columns()                     # configs.workloads.serve.PROBE_COLUMNS

They keep to the job's caps: both times together they ask for at most half of the tokens that a run may ask for, so
that there may be fewer, and where they are more than a burst may be they are sent at the capped rate.

Where the server tells log-probabilities, the gap between the two most likely tokens says how near a tie was.
"""

import threading
import time
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np

from configs.load.job import LoadJob
from engine.load.contents import RequestContent, RequestSource
from engine.workloads.servers.process import posted

_FIRST = 1 << 40
"""Number of the first conversation of probes: far from those of the traffic."""
_RICH: tuple[dict[str, Any], ...] = ({"logprobs": 2, "return_token_ids": True}, {"logprobs": 2}, {})
"""Fields that tell more of an answer, in the order in which they are tried: servers refuse those that they lack."""
_SECONDS = 120.0


@dataclass
class Answered:
    """An answer as a list of tokens, or of characters where a server tells no tokens; gaps: between the first two."""

    tokens: list[Any]
    gaps: list[float]


@dataclass
class Probes:
    """The requests of a job's kind, `count` of them or as many as its caps allow. token: the bearer token.

    asked_tokens: of prompts and answers, alone and again together.
    """

    job: LoadJob
    count: int
    token: str | None
    exact: bool
    alone_answers: list[Answered | None] = field(default_factory=list)
    rows: list[tuple[float, float, float]] = field(default_factory=list)
    _fields: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        source = RequestSource(self.job.contents, self.job.seed)
        turns = [source.conversation(_FIRST + number).first() for number in range(self.count)]
        asked, cap = 2 * np.cumsum([turn.asked_tokens for turn in turns]), self.job.caps.max_tokens
        self._turns = turns if cap is None else turns[: int((asked <= cap // 2).sum())]
        self.asked_tokens = int(asked[len(self._turns) - 1]) if self._turns else 0

    def alone(self) -> None:
        """Ask each, one after another. Raises RuntimeError with the server's own words where it answers none."""
        burst, rate = self.job.caps.burst, self.job.caps.max_rate
        every = 0.0 if burst is None or rate is None or len(self._turns) <= burst[0] else 1 / rate
        self.alone_answers, began = [], time.monotonic()
        for number, turn in enumerate(self._turns):
            time.sleep(max(0.0, began + number * every - time.monotonic()))
            self.alone_answers.append(self._asked(turn))
        if self._turns and not any(self.alone_answers):
            raise RuntimeError(f"the server answers no request: {self._refusal}")

    def again(self, seconds: float, stop: threading.Event) -> None:
        """Ask each again, spread over the middle of a run of so many seconds, and compare."""
        for number, (turn, before) in enumerate(zip(self._turns, self.alone_answers, strict=True)):
            if stop.wait(seconds * (0.15 if number == 0 else 0.7 / len(self._turns))):
                return
            now = self._asked(turn)
            if before is not None and now is not None:
                self.rows.append(compared(before, now))

    def columns(self) -> dict[str, np.ndarray]:
        """The columns of all comparisons."""
        rows = np.array(self.rows, dtype=np.float64).reshape(-1, 3)
        names = ("probe_tokens", "probe_same_tokens", "probe_margin_nats")
        return {name: rows[:, place].copy() for place, name in enumerate(names)}

    _refusal = "no answer"

    def _asked(self, turn: RequestContent) -> Answered | None:
        for fields in _RICH if self._fields is None else (self._fields,):
            try:
                status, data = posted(self._url, self._body(turn) | fields, self.token, _SECONDS)
            except OSError as error:
                late = isinstance(getattr(error, "reason", error), TimeoutError)
                self._refusal = f"no answer within {_SECONDS:g} s" if late else str(error)
                return None
            if status == 200:
                self._fields, found = fields, answered(data)
                if found is None:
                    self._refusal = "HTTP 200, but not with the JSON of a completion, to a request without `stream`"
                return found
            self._refusal = f"{status} {str(data)[:200]}"
        return None

    @property
    def _url(self) -> str:
        return f"{self.job.endpoint.url}/v1/completions"

    def _body(self, turn: RequestContent) -> dict[str, Any]:
        exact = {"ignore_eos": True, "min_tokens": turn.new_tokens} if self.exact else {}
        shared = {"model": self.job.endpoint.model, "prompt": turn.prompt, "max_tokens": turn.new_tokens}
        return {**shared, "temperature": 0, "stream": False, **exact}


def answered(data: Any) -> Answered | None:
    """Read an answer of `/v1/completions`; None for another form."""
    try:
        choice = data["choices"][0]
        told = choice.get("logprobs") or {}
        content = told.get("content") or []  # llama.cpp answers completions in the form of chats
        tokens = choice.get("token_ids") or told.get("tokens") or [one["token"] for one in content]
        tokens = tokens or list(choice["text"])
        tops = [sorted((top or {}).values(), reverse=True) for top in told.get("top_logprobs") or []]
        tops = tops or [sorted((top["logprob"] for top in one["top_logprobs"]), reverse=True) for one in content]
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    return Answered(list(tokens), [top[0] - top[1] if len(top) > 1 else nan for top in tops])


def compared(alone: Answered, loaded: Answered) -> tuple[float, float, float]:
    """Tokens of the longer answer, equal ones up to the first that differs, and the gap at that one.

    The gap is unknown where the server tells none; where the other answer only goes on, no tie explains it.
    """
    pairs, longer = list(zip(alone.tokens, loaded.tokens, strict=False)), max(len(alone.tokens), len(loaded.tokens))
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    differs = same < longer
    beyond = inf if alone.gaps else nan
    gap = (alone.gaps[same] if same < len(alone.gaps) else beyond) if differs else nan
    return float(longer), float(same), gap
