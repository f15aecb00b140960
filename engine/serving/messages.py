"""What the HTTP process and the first rank of a replica tell each other: JSON lines over a Unix socket. No torch.

To the rank:    {"add": {...}}  {"cancel": key}  {"end": true}
From the rank:  {"ready": {...}}  {"step": {...}}  {"refused": {"key": ..., "message": ...}}
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.serving.sampling import Sampling
from engine.serving.scheduling import Request


@dataclass(frozen=True)
class WantedAnswer:
    """One answer to one prompt, as the rank gets it. done: its first tokens, chosen before the ranks failed.

    scored: with log-probabilities of the prompt's own tokens.
    """

    key: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    done: tuple[int, ...] = ()
    scored: bool = False

    def message(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"add": {**vars(self), "sampling": vars(self.sampling)}}

    @classmethod
    def read(cls, data: dict[str, Any]) -> "WantedAnswer":
        """Read what `message` wrote."""
        sampling = data["sampling"]
        bias = tuple((int(word), float(value)) for word, value in sampling["bias"])
        return cls(
            key=data["key"],
            prompt=tuple(data["prompt"]),
            max_tokens=data["max_tokens"],
            stop_tokens=tuple(data["stop_tokens"]),
            min_tokens=data["min_tokens"],
            sampling=Sampling(**{**sampling, "banned": tuple(sampling["banned"]), "bias": bias}),
            done=tuple(data["done"]),
            scored=data["scored"],
        )

    def request(self) -> Request:
        """Return what the scheduler needs of it."""
        stops = frozenset(self.stop_tokens)
        return Request(self.key, self.prompt, self.max_tokens, stops, self.min_tokens, self.done, self.scored)


class ScoredToken(NamedTuple):
    """A prompt's token after those before it: its log-probability, and the most likely words with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class NewToken(NamedTuple):
    """A token of an answer. reason: why the answer ends with it. top: the most likely words, of those asked for.

    A named tuple, as a server makes tens of thousands a second.
    """

    key: str
    token: int
    reason: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepReport:
    """What a step gave, and the replica's state after it. cached: tokens found in the cache, of prompts that started.

    scores: of prompts, all but their first token, told with the answer's first.

    compute_seconds: in the step; other_seconds: since the one before, while no rank computed. What the first rank does
    while others compute already belongs to the step.
    """

    tokens: tuple[NewToken, ...]
    running: int
    waiting: int
    free_blocks: int
    preemptions: int
    prefix_tokens: int
    cached_tokens: int
    computed_tokens: int
    compute_seconds: float
    other_seconds: float
    cached: dict[str, int] = field(default_factory=dict)
    scores: dict[str, tuple[ScoredToken, ...]] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """Return it as JSON data."""
        fields = {name: value for name, value in vars(self).items() if name != "tokens"}
        return {"step": {**fields, "tokens": self.tokens}}

    @classmethod
    def read(cls, data: dict[str, Any]) -> "StepReport":
        """Read what `message` wrote."""
        tokens = tuple(
            NewToken(key, token, reason, logprob, tuple((word, value) for word, value in top) if top else ())
            for key, token, reason, logprob, top in data["tokens"]
        )
        scores = {
            key: tuple(
                ScoredToken(token, value, tuple((word, top) for word, top in best)) for token, value, best in one
            )
            for key, one in data["scores"].items()
        }
        return cls(**{**data, "tokens": tokens, "scores": scores})
