"""A streamed response as it arrives: server-sent events of completion chunks.

    reply = Reply(keep_text=False)
    reply.begin(200, "text/event-stream")
    reply.receive(piece, now)                 # pieces as the network cuts them
    reply.end()
    reply.outcome, reply.chunk_seconds, reply.new_tokens

Format of events: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import re
from codecs import BOM_UTF8
from typing import Any

from pydantic_core import from_json

from configs.common.files.reading import parse_json
from configs.common.printable import printable
from configs.load.samples import FinishCode, RequestOutcome

_MAX_EVENT_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 16
_SHOWN = 160
_FINISH = {"length": FinishCode.LENGTH, "stop": FinishCode.STOP}
_GIVEN_UP = ("abort", "error")
"""Reasons of vLLM and SGLang for an answer that the server broke off."""


_PLAIN = re.compile(rb"[ !#-\[\]-~]+")
"""Text that is the same in JSON: printable ASCII, but for quotes and backslashes."""


class MalformedReplyError(ValueError):
    """A response that is not a stream of completion chunks."""


class Events:
    """Splits a byte stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = False

    @property
    def between(self) -> bool:
        """Whether the next byte begins an event."""
        return not self._rest and not self._data

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that this piece completes. Raises MalformedReplyError for an event without an end."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise MalformedReplyError(f"an event of more than {_MAX_EVENT_BYTES:,} bytes")
        if lines and not self._begun:
            self._begun, lines[0] = True, lines[0].removeprefix(BOM_UTF8)
        complete = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                complete.append(b"\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        if sum(map(len, self._data)) > _MAX_EVENT_BYTES:
            raise MalformedReplyError(f"an event of more than {_MAX_EVENT_BYTES:,} bytes")
        return complete


def _around_text(event: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and after the text of an event that is nothing but text; None for others.

    Between the two any plain text makes an event that differs in its text alone.
    """
    try:
        text = from_json(event.removeprefix(b"data:"))["choices"][0]["text"]
        before, after = event.split(b'"%b"' % text.encode())
        before, after = before + b'"', b'"' + after
        other = from_json(before.removeprefix(b"data:") + b"~" + after)
        (choice,) = other["choices"]
        alone = choice["text"] == "~" and choice.get("finish_reason") is None and other.get("object") != "error"
        return (before, after) if alone and not (other.get("error") or other.get("usage")) else None
    except (ValueError, TypeError, AttributeError, LookupError):
        return None


class Reply:
    """What is known of one response. Token counts are None until the server's usage has come.

    Events that differ in their text alone, as most of a stream do, are parsed once.
    """

    __slots__ = (
        "_around", "_done", "_error_body", "_events", "_keep_text", "_streams", "chunk_seconds", "finish",
        "http_status", "message", "new_tokens", "outcome", "prompt_tokens", "text",
    )  # fmt: skip

    def __init__(self, keep_text: bool = False) -> None:
        self.outcome: RequestOutcome | None = None
        self.message = ""
        self.http_status: int | None = None
        self.prompt_tokens: int | None = None
        self.new_tokens: int | None = None
        self.finish = FinishCode.UNKNOWN
        self.chunk_seconds: list[float] = []
        self.text: list[str] = []
        self._keep_text = keep_text
        self._events = Events()
        self._around: tuple[bytes, bytes] | None = None
        self._error_body = b""
        self._streams = False
        self._done = False

    def begin(self, http_status: int, content_type: str) -> None:
        """Take the head of the response."""
        self.http_status = http_status
        self._streams = http_status == 200 and content_type.lower().startswith("text/event-stream")

    def receive(self, piece: bytes, now: float) -> None:
        """Take a piece of the body that arrived at `now`."""
        if not self._streams:
            self._error_body = (self._error_body + piece)[:_MAX_ERROR_BYTES]
            return
        if self._around is not None and self._events.between:
            before, after = self._around
            text = piece[len(before) : -len(after)]
            if piece.startswith(before) and piece.endswith(after) and _PLAIN.fullmatch(text):
                self._take_text(text.decode("ascii"), now)
                return
        try:
            events = self._events.feed(piece)
            for data in events:
                self._take(data, now)
        except ValueError as error:
            self.fail(RequestOutcome.MALFORMED, str(error))
        else:
            if self._around is None and len(events) == 1 and self._events.between:
                self._around = _around_text(piece)

    def end(self) -> None:
        """Take the end of the response; afterwards `outcome` is known."""
        if self.outcome is not None:
            return
        if not self._streams:
            kind = RequestOutcome.MALFORMED if self.http_status == 200 else RequestOutcome.REFUSED
            text = self._error_body.decode("utf-8", "replace")
            self.fail(
                kind, f"HTTP {self.http_status}: {text}" if kind == RequestOutcome.REFUSED else f"not a stream: {text}"
            )
        elif not self._done and self.finish == FinishCode.UNKNOWN:
            self.fail(RequestOutcome.CONNECTION, "the stream ended before the answer did")
        elif self.finish == FinishCode.UNKNOWN and not self.chunk_seconds and self.new_tokens is None:
            self.fail(RequestOutcome.MALFORMED, "not a stream of completions: no text, finish_reason or usage came")
        else:
            self.outcome = RequestOutcome.COMPLETED

    def fail(self, outcome: RequestOutcome, message: str) -> None:
        """Record the first error."""
        if self.outcome is None:
            self.outcome, self.message = outcome, printable(" ".join(message[: 4 * _SHOWN].split()), _SHOWN)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = parse_json(data, "event")
        if not isinstance(event, dict):
            raise MalformedReplyError(f"event: got {type(event).__name__}, expected an object")
        problem = event if event.get("object") == "error" else event.get("error")  # older servers: the event itself
        if problem:
            self.fail(RequestOutcome.REFUSED, f"error in the stream: {problem}")
            return
        self._take_usage(event.get("usage"))
        choices = event.get("choices")
        if choices:
            self._take_choice(choices, now)

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        # Some servers send running counts with every chunk: the last ones stand.
        for mine, theirs in (("prompt_tokens", "prompt_tokens"), ("new_tokens", "completion_tokens")):
            value = usage.get(theirs)
            if type(value) is int and 0 <= value < 1 << 40:
                setattr(self, mine, value)

    def _take_choice(self, choices: Any, now: float) -> None:
        choice = choices[0] if isinstance(choices, list) else None
        text = choice.get("text") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(text, str | None):
            raise MalformedReplyError("choices: expected a list of objects with `text`")
        if text is None and choice.get("delta"):  # its tokens would count as none, and its answers as complete
            raise MalformedReplyError("choices: got `delta`, chunks of a chat, expected completions with `text`")
        if text:
            self._take_text(text, now)
        reason = choice.get("finish_reason")
        if reason in _GIVEN_UP:
            self.fail(RequestOutcome.REFUSED, f"the server broke the answer off: finish_reason {reason}")
        elif reason not in (None, ""):  # empty while the answer goes on, of servers written in Go
            self.finish = _FINISH.get(reason, FinishCode.OTHER) if isinstance(reason, str) else FinishCode.OTHER

    def _take_text(self, text: str, now: float) -> None:
        self.chunk_seconds.append(now)
        if self._keep_text:
            self.text.append(text)
