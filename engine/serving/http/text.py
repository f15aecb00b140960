"""Text of an answer as it comes, token by token.

    text = AnswerText(model.tokenizer, stops=("\\n\\n",))
    piece = text.add(token)                 # what may be sent now; text.stopped: a stop string has come
    piece = text.end()                      # the rest

Characters of several tokens wait until they are whole, and what may be the beginning of a stop string waits until it is
known not to be one. Stop strings in the text of the first `min_tokens` tokens do not count, as with vLLM. Without a
tokenizer the text is the numbers of the tokens.

Decoders as Llama 2's drop the blank of the first word. An answer that continues a text, `prompt`, keeps it: the answer
is decoded behind the prompt's last tokens, as vLLM does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_LEAST_CONTEXT, _MOST_CONTEXT = 4, 24
"""Tokens of a prompt that an answer is decoded behind: the fewest that begin and end with whole characters."""


class AnswerText:
    """The text of one answer. prompt: token ids of the text that it continues; none: it begins a text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self.stops, self._unsearched = tokenizer, stops, min_tokens
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._context = ""
        if tokenizer is not None:
            self._decode_behind(tokenizer, prompt)
        self._count = self._waiting = 0
        self._decoded = ""
        self._before = 0
        self._sent = 0
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, up to a stop string."""
        return self._decoded

    def add(self, token: int) -> str:
        """Add a token; return the text that may be sent now."""
        self._tokens.append(token)
        self._count += 1
        if self._tokenizer is None:
            piece = f" {token}"
        else:
            piece = self._step(self._tokenizer, token)
        return self._grow(piece, self._held)

    def end(self) -> str:
        """Return what is left, incomplete characters included."""
        piece = ""
        if self._tokenizer is not None and self._waiting and not self.stopped:
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
            known = self._context + self._decoded[self._before :]
            if whole.startswith(known):
                piece = whole[len(known) :]
            else:  # as in `_step`: what was sent is decoded otherwise with the tokens that wait
                piece = self._tokenizer.decode(self._tokens[-self._waiting :], skip_special_tokens=True)
        return self._grow(piece, 0)

    def _decode_behind(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Let the stream begin with the last tokens of a prompt, where these are whole characters."""
        for count in range(min(_LEAST_CONTEXT, len(prompt)), min(_MOST_CONTEXT, len(prompt)) + 1):
            tokens = list(prompt[len(prompt) - count :])
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            if not text or "\ufffd" in text:
                continue
            stream = DecodeStream(skip_special_tokens=True)
            try:
                pieces = [stream.step(tokenizer, token) or "" for token in tokens]
            except Exception:  # the library raises plain Exception, see `_step`
                return
            if "".join(pieces) == text:
                self._stream, self._tokens, self._context = stream, tokens, text
            return

    def _step(self, tokenizer: Tokenizer, token: int) -> str:
        """Return the characters that are complete with this token, the last of `_tokens`."""
        self._waiting += 1
        try:
            piece = self._stream.step(tokenizer, token) or ""
        except Exception:  # the library raises plain Exception
            # Bytes that make no character change how a byte fallback decodes the bytes before them, which were sent:
            # decoding goes on with the tokens after those.
            self._tokens = self._tokens[-self._waiting :]
            self._before, self._context = len(self._decoded), ""
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = "".join(self._stream.step(tokenizer, one) or "" for one in self._tokens)
        if piece:
            self._waiting = 0
        return piece

    def _grow(self, piece: str, held: int) -> str:
        if not self.stops:
            self._decoded += piece
            return piece
        if self.stopped:
            return ""
        before = len(self._decoded)
        self._decoded += piece
        places = [self._decoded.find(stop, max(0, before - len(stop) + 1)) for stop in self.stops]
        found = [place for place in places if place >= 0]
        if found and self._count > self._unsearched:
            self.stopped = True
            self._decoded = self._decoded[: min(found)]
            held = 0
        until = max(self._sent, len(self._decoded) - held)
        ready, self._sent = self._decoded[self._sent : until], until
        return ready


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that belongs to the answer. offsets: where each token's text begins; none where nobody asked."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, given: str | None, tokens: Sequence[int], offsets: bool) -> "EchoedPrompt":
        """Return a prompt as it was given, or what its tokens are decoded to."""
        whole = AnswerText(tokenizer)
        places = []
        for token in tokens if offsets or given is None else ():
            places.append(len(whole.text))
            whole.add(token)
        whole.end()
        text = whole.text if given is None else given
        return cls(text, tuple(tokens), tuple(min(place, len(text)) for place in places) if offsets else ())


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return the text of one token, as it is within a text."""
    if tokenizer is None:
        return f" {token}"
    alone: str = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in alone:
        return alone
    # Behind itself: alone, it may lack the blank that its decoder drops at the beginning of a text.
    twice: str = tokenizer.decode([token, token], skip_special_tokens=False)
    return twice[len(alone) :] if twice.startswith(alone) else alone
