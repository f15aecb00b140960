"""How the tokens of an answer are to be chosen, as its request says. No numpy, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen. temperature 0: the most likely one.

    top_k 0 and top_p 1: all. seed, choice: of the random numbers. logprobs: how many of the most likely words are
    reported; None: no log-probabilities. banned: never chosen before `min_tokens` tokens. bias: added to logits by id.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    banned: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is all that is asked for. Filters leave that as it is."""
        return self.temperature == 0.0 and not self.needs_host

    @property
    def needs_host(self) -> bool:
        """Whether the first rank chooses: it needs more than logits, temperature, filters and a random number."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.logprobs is not None
            or bool(self.bias)
            or (self.min_tokens > 0 and bool(self.banned))
        )
