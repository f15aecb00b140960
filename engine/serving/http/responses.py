"""How answers are written: a whole response, or the events of a stream.

form = ResponseForm(model, wanted, chat=False)
data = form.whole(choices, pieces)          # JSON data
line = form.encoded(piece)                  # a server-sent event
"""

import functools
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.serving.http.answers import ChoicePiece, GrowingChoice
from engine.serving.http.model import ServedModel
from engine.serving.http.schema import GenerationRequest
from engine.serving.http.text import token_text
from engine.serving.messages import NewToken, ScoredToken

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_MARK = "\x00text\x00"
"""Stands for the text of an event."""


class ResponseForm:
    """How answers look: `/v1/completions` or `/v1/chat/completions`."""

    def __init__(self, model: ServedModel, wanted: GenerationRequest, chat: bool) -> None:
        self._model, self._wanted, self._chat = model, wanted, chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, choices: Sequence[GrowingChoice], pieces: Sequence[list[ChoicePiece]]) -> dict[str, Any]:
        """Return the complete response."""
        parts = []
        for choice, own in zip(choices, pieces, strict=True):
            text = "".join((piece.echo.text if piece.echo else "") + piece.text for piece in own)
            body: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            parts.append(self._choice(choice, body, own, choice.reason))
        kind = "chat.completion" if self._chat else "text_completion"
        return self._frame(kind, parts) | {"usage": usage_of(choices, sum(len(answered(own)) for own in pieces))}

    def opening(self, choice: GrowingChoice) -> dict[str, Any] | None:
        """Return the first event of a choice; only conversations have one."""
        if not self._chat:
            return None
        body = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._frame("chat.completion.chunk", [body])

    def event(self, piece: ChoicePiece) -> dict[str, Any]:
        """Return the event of a piece."""
        body: dict[str, Any] = {"delta": {"content": piece.text} if piece.text else {}}
        body = body if self._chat else {"text": (piece.echo.text if piece.echo else "") + piece.text}
        part = self._choice(piece.choice, body, [piece], piece.reason)
        return self._frame("chat.completion.chunk" if self._chat else "text_completion", [part])

    def encoded(self, piece: ChoicePiece) -> bytes:
        """Return the event of a piece as bytes: the same as all others of its choice, but for the text."""
        if (
            not piece.text
            or piece.reason is not None
            or piece.token.logprob is not None
            or piece.echo is not None
            or self._wanted.return_token_ids
        ):
            return event_bytes(self.event(piece))
        around = self._around.get(piece.choice.index)
        if around is None:
            whole = event_bytes(self.event(piece._replace(text=_MARK)))
            before, _, after = whole.rpartition(_ENCODER.encode(_MARK).encode())  # the text follows the model's name
            around = self._around[piece.choice.index] = before, after
        return around[0] + _ENCODER.encode(piece.text).encode() + around[1]

    def usage_event(self, choices: Sequence[GrowingChoice], generated: int) -> dict[str, Any]:
        """Return the event with the counts of tokens."""
        frame = self._frame("chat.completion.chunk" if self._chat else "text_completion", [])
        return frame | {"usage": usage_of(choices, generated)}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def _choice(
        self, choice: GrowingChoice, body: dict[str, Any], pieces: list[ChoicePiece], reason: str | None
    ) -> dict[str, Any]:
        part = {"index": choice.index, **body, "logprobs": self._logprobs(pieces), "finish_reason": reason}
        if self._wanted.return_token_ids:
            part["token_ids"] = [piece.token.token for piece in answered(pieces)]
        return part

    def _logprobs(self, pieces: list[ChoicePiece]) -> dict[str, Any] | None:
        if not pieces or pieces[0].token.logprob is None:
            return None

        @functools.cache
        def text(token: int) -> str:
            return token_text(self._model.tokenizer, token)

        if not self._chat:
            return self._completion_logprobs(pieces, text)
        tokens = [piece.token for piece in pieces]

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            shown = text(token)
            # A part of a character has other bytes than its text, which is U+FFFD.
            return {"token": shown, "logprob": logprob, "bytes": None if "\ufffd" in shown else list(shown.encode())}

        return {
            "content": [
                entry(one.token, one.logprob) | {"top_logprobs": [entry(word, value) for word, value in one.top]}
                for one in tokens
            ]
        }

    def _completion_logprobs(self, pieces: list[ChoicePiece], text: Callable[[int], str]) -> dict[str, Any]:
        """Return the log-probabilities of a completion's tokens, and of its prompt's where that belongs to it."""
        tokens: list[NewToken | ScoredToken] = []
        # As OpenAI counts, from the prompt's beginning, also where the prompt is not part of the answer.
        offsets: list[int] = []
        echo, first = pieces[0].echo, []
        if echo is not None:
            first, offsets = [text(echo.tokens[0])], list(echo.offsets)
            tokens += pieces[0].choice.answer.scores
        tokens += (piece.token for piece in answered(pieces))
        offsets += (piece.offset for piece in answered(pieces))
        # Nothing is before a prompt's first token, so that it has no probability.
        unknown = [None] * len(first)
        return {
            "tokens": first + [text(one.token) for one in tokens],
            "token_logprobs": unknown + [one.logprob for one in tokens],
            # Of words with equal texts, such as parts of characters, the most likely one stands. The drawn one is
            # always among them, as with OpenAI.
            "top_logprobs": unknown
            + [{text(word): value for word, value in ((one.token, one.logprob), *reversed(one.top))} for one in tokens],
            "text_offset": offsets,
        }


def answered(pieces: Sequence[ChoicePiece]) -> Sequence[ChoicePiece]:
    """Return the pieces of answered tokens: none where the prompt alone was asked for."""
    return () if pieces and pieces[0].choice.only_echo else pieces


def event_bytes(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _ENCODER.encode(data).encode() + b"\n\n"


def usage_of(choices: Sequence[GrowingChoice], generated: int) -> dict[str, Any]:
    """Return the counts of tokens; a prompt with several answers counts once."""
    first_answers = [choice.answer for choice in choices if choice.choice == 0]
    prompt = sum(answer.prompt_tokens for answer in first_answers)
    cached = sum(answer.cached_tokens or 0 for answer in first_answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
