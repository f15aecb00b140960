"""Text of an answer as it comes, token by token.

    text = AnswerText(model.tokenizer, stops=("\\n\\n",))
    piece = text.add(token)                 # what may be sent now; text.stopped: a stop string has come
    piece = text.end()                      # the rest

Characters of several tokens wait until they are whole, and what may be the beginning of a stop string waits until it is
known not to be one. Without a tokenizer the text is the numbers of the tokens.
"""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class AnswerText:
    """The text of one answer."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._decoded = ""
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
        if self._tokenizer is None:
            piece = f" {token}"
        else:
            piece = self._stream.step(self._tokenizer, token) or ""
        return self._grow(piece, self._held)

    def end(self) -> str:
        """Return what is left, incomplete characters included."""
        piece = ""
        if self._tokenizer is not None and not self.stopped:
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
            piece = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        return self._grow(piece, 0)

    def _grow(self, piece: str, held: int) -> str:
        if self.stopped:
            return ""
        searched = max(0, len(self._decoded) - self._held)
        self._decoded += piece
        found = [place for place in (self._decoded.find(stop, searched) for stop in self._stops) if place >= 0]
        if found:
            self.stopped = True
            self._decoded = self._decoded[: min(found)]
            held = 0
        until = max(self._sent, len(self._decoded) - held)
        ready, self._sent = self._decoded[self._sent : until], until
        return ready


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return the text of one token alone."""
    return f" {token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
