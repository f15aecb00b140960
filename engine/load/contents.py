"""Contents of requests: prompts and lengths of each conversation, from the job and its seed alone.

source = RequestSource(job.contents, job.seed)
talk = source.conversation(7)             # the same in every run with this seed
turn = talk.first()
turn = talk.following(" its answer", 12)  # the next prompt repeats the one before and the answer
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.inputs.prompts import PromptLine, numbered_prompts
from configs.load.job import Contents, LoadJob
from configs.load.lengths import Lengths
from engine.load.arrivals import TraceRow
from engine.load.lengths import draw_length

_CONVERSATION, _PREFIX, _FIRST_PROMPT = 1, 2, 5
"""Streams of random numbers of one seed."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """One request: a text or token ids, and the tokens to ask for. prompt_tokens: None where it is a text."""

    prompt: str | list[int]
    new_tokens: int

    @property
    def prompt_tokens(self) -> int | None:
        return None if isinstance(self.prompt, str) else len(self.prompt)

    @property
    def asked_tokens(self) -> int:
        """Tokens of prompt and answer, at most: a text has no more than bytes."""
        return self.new_tokens + len(self.prompt.encode() if isinstance(self.prompt, str) else self.prompt)


class RequestSource:
    """Draws conversations. Raises ValueError for a file of prompts that cannot be used."""

    def __init__(self, contents: Contents, seed: int) -> None:
        self.contents = contents
        self.seed = seed
        self.prompts = None if contents.prompts is None else _prompts(Path(contents.prompts), contents.turns)
        # A run that began with the same prompt as the one before would find its prompts in the server's cache.
        self.first_prompt = int(np.random.default_rng((seed, _FIRST_PROMPT)).integers(len(self.prompts or "1")))

    def conversation(self, number: int, row: TraceRow | None = None) -> "Conversation":
        """The conversation of this number; lengths of the trace's row, where it has them, are those of its turns."""
        rng = np.random.default_rng((self.seed, _CONVERSATION, number))
        return Conversation(self, rng, number, row)

    def random_ids(self, count: int, rng: np.random.Generator) -> list[int]:
        """So many token ids of the vocabulary."""
        ids: list[int] = rng.integers(*self.contents.vocabulary, size=count).tolist()
        return ids

    def prefix(self, rng: np.random.Generator) -> list[int]:
        """One of the shared prefixes, drawn at random."""
        contents = self.contents
        if not contents.shared_prefix_tokens:
            return []
        which = int(rng.integers(contents.prefixes))
        stream = np.random.default_rng((self.seed, _PREFIX, which))
        return self.random_ids(contents.shared_prefix_tokens, stream)


class Conversation:
    """The turns of one user, each of whose prompts begins with the one before."""

    def __init__(self, source: RequestSource, rng: np.random.Generator, number: int, row: TraceRow | None) -> None:
        self._source, self._rng, self._number, self._row = source, rng, number, row
        self._turns = 0
        self._history: str | list[int] = ""

    def first(self) -> RequestContent:
        """The first request."""
        self._history = self._own_part() if self._source.prompts else self._source.prefix(self._rng) + self._random()
        return self._turn()

    def following(self, answer: str, answer_tokens: int) -> RequestContent:
        """The next request, after an answer.

        A text is continued by the answer itself. Token ids are continued by as many random ids as the answer had,
        since a server need not tell the answer's own: its cached prefix then ends with the prompt.
        """
        history = self._history
        if isinstance(history, str):
            following = self._own_part()
            assert isinstance(following, str)
            self._history = f"{history}{answer}\n{following}"
        else:
            self._history = history + self._source.random_ids(answer_tokens, self._rng) + self._random()
        return self._turn()

    def _turn(self) -> RequestContent:
        self._turns += 1
        asked = self._row.new_tokens if self._row else None
        return RequestContent(self._history, asked or self._drawn(self._source.contents.new_tokens))

    def _own_part(self) -> str | list[int]:
        """A prompt of the file: all in turn from the seed's first one on, so that each is asked equally often."""
        prompts, first = self._source.prompts, self._source.first_prompt
        assert prompts is not None
        prompt = prompts[(first + self._number * self._source.contents.turns + self._turns) % len(prompts)]
        return prompt.text if prompt.tokens is None else list(prompt.tokens)

    def _random(self) -> list[int]:
        asked = self._row.prompt_tokens if self._row else None
        return self._source.random_ids(asked or self._drawn(self._source.contents.prompt_tokens), self._rng)

    def _drawn(self, lengths: Lengths) -> int:
        return draw_length(lengths, self._rng)


def _prompts(path: Path, turns: int) -> list[PromptLine]:
    prompts = numbered_prompts(path)
    tokens = next((prompt for prompt in prompts if prompt.tokens is not None), None)
    if turns > 1 and tokens is not None:
        raise ValueError(f"{path}, line {tokens.line}: `tokens`: several turns take prompts of text only")
    return prompts


def body_of(turn: RequestContent, job: LoadJob) -> bytes:
    """The JSON body of a streamed completion request."""
    contents = job.contents
    fields: dict[str, object] = {
        **contents.fields,
        "model": job.endpoint.model,
        "prompt": turn.prompt,
        "max_tokens": turn.new_tokens,
        "temperature": contents.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if contents.exact:
        fields |= {"ignore_eos": True, "min_tokens": turn.new_tokens}
    return json.dumps(fields, separators=(",", ":")).encode()
