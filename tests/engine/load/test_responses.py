import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.load.responses import NotHttpError, ResponseReader

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
CUTS = st.lists(st.integers(0, 600), max_size=12)


def fed(data: bytes, cuts: list[int]) -> tuple[ResponseReader, bytes]:
    reader, begin, body = ResponseReader(), 0, b""
    for cut in sorted({min(cut, len(data)) for cut in [*cuts, len(data)]}):
        body += reader.feed(data[begin:cut])
        begin = cut
    return reader, body


@given(BODIES, CUTS, st.sampled_from([b"", b";x=1"]), st.sampled_from([b"", b"X-Trailer: 1\r\n"]))
def test_chunked_bodies_are_whole_however_they_are_cut(
    parts: list[bytes], cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    chunks = b"".join(b"%X%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    reader, body = fed(head + chunks + b"0\r\n" + trailer + b"\r\n", cuts)
    assert (reader.status, body, reader.ended, reader.reusable) == (200, b"".join(parts), True, True)
    assert reader.header(b"content-type") == b"text/event-stream"


@given(st.binary(max_size=80), CUTS, st.booleans())
def test_bodies_with_a_length_and_until_the_end(body: bytes, cuts: list[int], counted: bool) -> None:
    length = b"content-length: %d\r\n" % len(body) if counted else b""
    reader, got = fed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\n" + length + b"\r\n" + body, cuts)
    assert (reader.status, got, reader.reusable) == (503, body, counted)
    assert reader.ended is counted
    reader.end_of_connection()
    assert reader.ended and not reader.reusable


def test_a_body_that_is_cut_off_does_not_end() -> None:
    for head in (b"content-length: 9\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n9\r\nabc"):
        reader, body = fed(b"HTTP/1.1 200 OK\r\n" + head, [])
        reader.end_of_connection()
        assert body == b"abc" and not reader.ended


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.1 204 X\r\n", True),
        (b"HTTP/1.1 204 X\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 304 X\r\n", False),
    ],
)
def test_connections_are_kept_where_the_server_keeps_them(head: bytes, reusable: bool) -> None:
    reader, _ = fed(head + b"\r\n", [])
    assert reader.ended and reader.reusable is reusable


def test_bytes_after_the_response_make_the_connection_unusable() -> None:
    reader, body = fed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab", [])
    assert body == b"a" and reader.ended and not reader.reusable


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 5000,
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(NotHttpError):
        fed(data, [])


@given(st.binary(max_size=200), CUTS, st.booleans())
def test_no_bytes_raise_anything_else(data: bytes, cuts: list[int], chunked: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" if chunked else b""
    with contextlib.suppress(NotHttpError):
        fed(head + data, cuts)


NEARLY_CHUNKS = st.lists(
    st.builds(
        lambda size, end, part, last: size + end + part + last,
        st.sampled_from([b"0", b"3", b"03", b"3 ", b"+3", b"0x3", b"3;x=1", b"", b"z", b"0000000000003", b"5"]),
        st.sampled_from([b"\r\n", b"\n", b""]),
        st.sampled_from([b"", b"abc", b"ab\n", b"\r\n1", b"abc\r\n"]),
        st.sampled_from([b"\r\n", b"\n\n", b""]),
    ),
    max_size=4,
)


@given(NEARLY_CHUNKS)
def test_whole_chunks_are_read_as_byte_by_byte(pieces: list[bytes]) -> None:
    """A chunk that arrives alone is read on a shorter way, which must refuse and keep what the longer one does."""

    def outcome(parts: list[bytes]) -> tuple[bytes, bool, bool]:
        reader = ResponseReader()
        reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        body, wrong = b"", False
        with contextlib.suppress(NotHttpError):
            wrong = True
            for part in parts:
                body += reader.feed(part)
            wrong = False
        return body, reader.ended, wrong

    whole, ended, wrong = outcome(pieces)
    slow, *others = outcome([bytes([byte]) for piece in pieces for byte in piece])
    assert others == [ended, wrong]
    # Bytes before an error in the same piece are not given out.
    assert slow.startswith(whole) if wrong else slow == whole
