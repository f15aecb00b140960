import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load.samples import FinishCode, RequestOutcome
from engine.load.replies import Events, Reply


def stream(*events: object, end: str = "\n") -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}{end}{end}" for text in texts).encode()


def chunk(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def replied(body: bytes, status: int = 200, kind: str = "text/event-stream; charset=utf-8") -> Reply:
    reply = Reply(keep_text=True)
    reply.begin(status, kind)
    reply.receive(body, 1.0)
    reply.end()
    return reply


@given(st.lists(st.integers(0, 400)), st.sampled_from(["\n", "\r\n"]))
def test_the_cuts_of_the_network_change_nothing(cuts: list[int], end: str) -> None:
    body = stream(chunk("é"), chunk(" b"), chunk("", "length"), USAGE, "[DONE]", end=end)
    reply, begin = Reply(keep_text=True), 0
    reply.begin(200, "text/event-stream")
    for cut in sorted({min(cut, len(body)) for cut in [*cuts, len(body)]}):
        reply.receive(body[begin:cut], float(cut))
        begin = cut
    reply.end()
    assert "".join(reply.text) == "é b" and len(reply.chunk_seconds) == 2
    assert (reply.outcome, reply.finish) == (RequestOutcome.COMPLETED, FinishCode.LENGTH)
    assert (reply.prompt_tokens, reply.new_tokens) == (5, 3)
    assert reply.chunk_seconds == sorted(reply.chunk_seconds)


TEXTS = st.sampled_from(
    ["a", " b", "text", "é", 'a "', "\\", "\n", "", "~", "[DONE]", "data: x", "stop", "\x7f", "error"]
)
FORMS = st.sampled_from(
    [
        lambda text, number: {"id": "text", "created": 7, **chunk(text), "usage": None},
        lambda text, number: {"created": number, **chunk(text)},
        lambda text, number: chunk(text) | {"usage": {"completion_tokens": number}},
        lambda text, number: chunk(text, "stop" if number > 2 else None),
        lambda text, number: chunk(text, "abort" if number > 2 else None),
        lambda text, number: {"error": {"message": text}, **chunk(text)} if number > 2 else chunk(text),
        lambda text, number: {"choices": [{"text": text}, {"text": text}]},
    ]
)


@given(st.lists(TEXTS, min_size=1, max_size=8), FORMS, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_events_that_come_alone_are_read_as_those_that_come_in_parts(
    texts: list[str], form: Callable[[str, int], object], end: str, ascii_only: bool
) -> None:
    """Most of those that come alone are not parsed."""
    events = [form(text, number) for number, text in enumerate(texts)]
    pieces = [f"data: {json.dumps(one, ensure_ascii=ascii_only)}{end}{end}".encode() for one in events]
    alone, in_parts = Reply(keep_text=True), Reply(keep_text=True)
    for reply, cut in ((alone, None), (in_parts, 9)):
        reply.begin(200, "text/event-stream")
        for now, piece in enumerate(pieces):
            for part in (piece,) if cut is None else (piece[:cut], piece[cut:]):
                reply.receive(part, float(now))
        reply.end()
    for name in ("outcome", "message", "text", "chunk_seconds", "new_tokens", "finish"):
        assert getattr(alone, name) == getattr(in_parts, name), name


@pytest.mark.parametrize(
    "event",
    [
        rb'{"choices": [{"text": "\u0074ext"}]}',
        rb'{"choices": [{"text": "\u0063hoices"}]}',
        rb'{"choices": [{"text": "\u0061"}], "a": 1}',
    ],
)
def test_a_text_that_is_written_as_a_name_is_elsewhere_is_no_pattern(event: bytes) -> None:
    reply = Reply(keep_text=True)
    reply.begin(200, "text/event-stream")
    for _ in range(2):
        reply.receive(b"data: " + event + b"\n\n", 1.0)
    assert reply.outcome is None and reply._around is None and len(reply.text) == 2


def test_events_that_differ_in_their_text_alone_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    taken = Reply._take

    def take(reply: Reply, data: bytes, now: float) -> None:
        parsed.append(data)
        taken(reply, data, now)

    monkeypatch.setattr(Reply, "_take", take)
    reply = Reply(keep_text=True)
    reply.begin(200, "text/event-stream")
    for text in ("a", "bc", " d", "é", "e"):
        reply.receive(stream(chunk(text)), 1.0)
    assert len(parsed) == 2  # the first, and the one with another character than printable ASCII
    assert "".join(reply.text) == "abc dée"


def test_comments_and_other_fields_are_skipped() -> None:
    assert Events().feed(b": ping\n\nevent: x\nid: 1\ndata: a\ndata: b\n\ndata:c\n\n") == [b"a\nb", b"c"]


@pytest.mark.parametrize("cut", [1, 3, 40, 1000])
def test_a_byte_order_mark_hides_no_chunk(cut: int) -> None:
    """The first one was left out, so that the second token's arrival was the TTFT."""
    body, reply = b"\xef\xbb\xbf" + stream(chunk(" a"), chunk(" b", "stop")), Reply(keep_text=True)
    reply.begin(200, "text/event-stream")
    for piece in (body[:cut], body[cut:]):
        reply.receive(piece, 1.0)
    reply.end()
    assert (reply.outcome, reply.text) == (RequestOutcome.COMPLETED, [" a", " b"])


def test_an_empty_finish_reason_ends_no_answer() -> None:
    assert replied(stream(chunk(" a", ""), chunk(" b", ""))).outcome is RequestOutcome.CONNECTION
    assert replied(stream(chunk(" a", ""), chunk(" b", "stop"))).finish is FinishCode.STOP


def test_without_usage_the_count_is_unknown() -> None:
    reply = replied(stream(chunk(" a"), chunk(" b", "stop"), "[DONE]"))
    assert (reply.new_tokens, len(reply.chunk_seconds), reply.finish) == (None, 2, FinishCode.STOP)


@pytest.mark.parametrize("events", [({"token": {"text": "a"}}, {"token": {"text": "b"}}), (chunk(""),), ()], ids=str)
def test_a_stream_without_an_answer_is_not_complete(events: tuple[object, ...]) -> None:
    """Events of another API, ended by [DONE], were answers of 0 tokens that met every objective."""
    reply = replied(stream(*events, "[DONE]"))
    assert reply.outcome == RequestOutcome.MALFORMED and "not a stream of completions" in reply.message


@pytest.mark.parametrize("event", [chunk("", "stop"), USAGE | {"usage": {"completion_tokens": 0}}], ids=str)
def test_an_empty_answer_is_complete(event: object) -> None:
    assert replied(stream(event, "[DONE]")).outcome == RequestOutcome.COMPLETED


def test_running_usage_counts_end_with_the_last() -> None:
    first = chunk(" a") | {"usage": {"completion_tokens": 1}}
    reply = replied(stream(first, chunk(" b", "stop"), USAGE, "[DONE]"))
    assert reply.new_tokens == 3


@pytest.mark.parametrize(
    ("body", "status", "kind", "outcome", "message"),
    [
        (
            b'{"error": "no\x1b[31m"}',
            429,
            "application/json",
            RequestOutcome.REFUSED,
            'HTTP 429: {"error": "no\\x1b[31m"}',
        ),
        (b"{}", 200, "application/json", RequestOutcome.MALFORMED, "not a stream: {}"),
        (
            stream({"error": {"message": "out of memory"}}),
            200,
            "text/event-stream",
            RequestOutcome.REFUSED,
            "out of memory",
        ),
        (stream("{nonsense"), 200, "text/event-stream", RequestOutcome.MALFORMED, "not JSON"),
        (stream([1]), 200, "text/event-stream", RequestOutcome.MALFORMED, "expected an object"),
        (stream({"choices": [{"text": 3}]}), 200, "text/event-stream", RequestOutcome.MALFORMED, "choices"),
        (
            stream({"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            200,
            "text/event-stream",
            RequestOutcome.MALFORMED,
            "choices: got `delta`, chunks of a chat",
        ),
        (stream({"choices": 3}), 200, "text/event-stream", RequestOutcome.MALFORMED, "choices"),
        (b"data: " + b"x" * (2 << 20), 200, "text/event-stream", RequestOutcome.MALFORMED, "more than"),
        (stream(chunk(" a")), 200, "text/event-stream", RequestOutcome.CONNECTION, "ended before"),
        (b"", 200, "text/event-stream", RequestOutcome.CONNECTION, "ended before"),
    ],
)
def test_what_is_no_answer_is_named(body: bytes, status: int, kind: str, outcome: RequestOutcome, message: str) -> None:
    reply = replied(body, status, kind)
    assert reply.outcome == outcome
    assert message in reply.message and len(reply.message) <= 160


@given(st.binary(max_size=300))
def test_no_bytes_of_a_server_raise(body: bytes) -> None:
    for prefix in (b"", b"data: "):
        assert replied(prefix + body).outcome is not None


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((chunk(" a"), chunk("", "abort"), USAGE, "[DONE]"), "the server broke the answer off: finish_reason abort"),
        ((chunk(" a"), chunk("", "error"), "[DONE]"), "the server broke the answer off: finish_reason error"),
        (
            (chunk(" a"), {"object": "error", "message": "out of memory", "code": 500}, "[DONE]"),
            "error in the stream: {'object': 'error', 'message': 'out of memory', 'code': 500}",
        ),
    ],
)
def test_an_answer_that_the_server_breaks_off_is_not_complete(events: tuple[object, ...], message: str) -> None:
    reply = replied(stream(*events))
    assert (reply.outcome, reply.message) == (RequestOutcome.REFUSED, message)
