"""Row `hostile`: malformed and hostile requests; none may crash or hang the server, or be answered 200.

Each is made from its number alone, so that one that fails can be sent again: `hostile_request(number)`.
"""

import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from reports.text import Table

REQUESTS = 2000
_WORKERS = 16
_SECONDS = 40.0
_FIELDS = ("prompt", "model", "max_tokens", "n", "stop", "seed", "temperature", "top_p", "logit_bias", "stream")
_FIELDS_WITH_NULL = {"max_tokens", "n", "stop", "seed", "temperature", "top_p", "logit_bias", "stream"}


@dataclass(frozen=True)
class Hostile:
    """Bytes to send in pieces; pause: seconds between pieces."""

    kind: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0


def hostile_request(number: int, model: str) -> Hostile:
    """Return the request of this number."""
    rng = random.Random(number)
    makers = tuple(_MAKERS.items())
    kind, make = makers[number % len(makers)]
    made = make(rng, model)
    if number % (10 * len(makers)) == makers.index((kind, make)) and kind == "slow body":
        return Hostile(kind, made.pieces, 2.0)
    return Hostile(kind, made.pieces, made.pause)


def _post(body: bytes, headers: dict[str, str] | None = None, path: str = "/v1/completions") -> Hostile:
    given = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in given.items()) + "\r\n"
    return Hostile("", (head.encode("utf-8", "surrogateescape") + body,))


def _fields(model: str, /, **changed: object) -> bytes:
    return json.dumps({"model": model, "prompt": "x = ", "max_tokens": 4, **changed}).encode()


def _wrong_types(rng: random.Random, model: str) -> Hostile:
    field = rng.choice(_FIELDS)
    wrong: list[object] = [{"a": 1}, [[[]]], [None], ["x", 1], {}, "\ud800".encode("utf-8", "replace").decode()]
    if field not in _FIELDS_WITH_NULL:
        wrong.append(None)
    value = rng.choice(wrong)
    if field == "logit_bias" and value == {}:
        value = [1]
    if field in ("prompt", "stop") and isinstance(value, str):
        value = 7.5
    return _post(_fields(model, **{field: value}))


def _wrong_sizes(rng: random.Random, model: str) -> Hostile:
    changed: dict[str, object] = rng.choice(
        [
            {"max_tokens": rng.choice([0, -1, 1 << 31, 1 << 70, 10**400])},
            {"n": rng.choice([0, -3, 129, 1 << 40])},
            {"temperature": rng.choice([-1, 1e308, 101])},
            {"top_p": rng.choice([0, -0.1, 1.5])},
            {"prompt": [rng.choice([-1, 1 << 31, 1 << 62])]},
            {"prompt": [1] * rng.choice([3000, 50_000])},
            {"prompt": []},
            {"prompt": [[]]},
            {"stop": ["x"] * 17},
            {"stop": ["y" * 257]},
            {"logit_bias": {rng.choice(["-1", "9" * 30, "x", "1.5", "\u0663"]): 1}},
            {"logprobs": rng.choice([-1, 6, 1 << 40])},
            {"seed": 1 << rng.choice([63, 64, 200])},
        ]
    )
    return _post(_fields(model, **changed))


def _nesting(rng: random.Random, model: str) -> Hostile:
    depth = rng.choice([100, 5000, 100_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    body = opening * depth + "1" + closing * depth
    return _post(f'{{"model": "{model}", "prompt": {body}}}'.encode())


def _large(rng: random.Random, model: str) -> Hostile:
    if rng.random() < 0.5:
        return _post(b'{"model": "' + b"x" * 1000, {"Content-Length": str(rng.choice([5 << 20, 1 << 40, 10**30]))})
    return _post(_fields(model, prompt="y" * (5 << 20)))


def _broken_json(rng: random.Random, model: str) -> Hostile:
    whole = _fields(model)
    return _post(
        rng.choice(
            [
                whole[: rng.randrange(len(whole))],
                whole.replace(b'"x = "', b"NaN"),
                whole.replace(b"4", b"Infinity"),
                b"",
                b"null",
                b"[]",
                b'"x"',
                whole[:-1] + b', "model": "' + model.encode() + b'"}' + whole,
                b"\x00" * 50,
                b"\xef\xbb\xbf" + whole + b"}",
            ]
        )
    )


def _invalid_utf8(rng: random.Random, model: str) -> Hostile:
    bad = rng.choice([b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80"])
    return _post(_fields(model).replace(b"x = ", bad))


def _headers(rng: random.Random, model: str) -> Hostile:
    whole = _fields(model)
    choice = rng.randrange(9)
    if choice == 0:
        return _post(whole, {"X-Long": "z" * (128 << 10)})
    if choice == 1:
        return _post(whole, {f"X-{number}": "z" * 100 for number in range(2000)})
    if choice == 2:
        return _post(whole, {"Content-Length": rng.choice(["-5", "0x10", "1e3", "5, 6", ""])})
    if choice == 3:
        return _post(whole, {"Transfer-Encoding": rng.choice(["chunked, chunked", "gzip", "identity, x"])})
    if choice == 4:
        return _post(b"ZZ\r\n" + whole + b"\r\n0\r\n\r\n", {"Transfer-Encoding": "chunked", "Content-Length": "10"})
    if choice == 5:
        return _post(whole, {"Host": "a\x00b"})
    if choice == 6:
        return Hostile("", (rng.randbytes(200) + b"\r\n\r\n",))
    if choice == 7:
        line = b"GET /" + b"a" * (100 << 10) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
        return Hostile("", (line,))
    return Hostile("", (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",))


def _paths(rng: random.Random, model: str) -> Hostile:
    path = rng.choice(
        ["/v1/completion", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/x", "/docs", "/openapi.json"]
    )
    if rng.random() < 0.3:
        method = rng.choice(["DELETE", "PUT", "PATCH", "TRACE"])
        return Hostile(
            "", (f"{method} /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode(),)
        )
    return _post(_fields(model), path=path)


def _templates(rng: random.Random, model: str) -> Hostile:
    attack = rng.choice(
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{% for x in range(999999999) %}{% endfor %}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ 'a' * 999999999 }}",
        ]
    )
    messages: object = [{"role": "user", "content": "x"}]
    body: dict[str, object] = {"model": model, "messages": messages, "max_tokens": 2}
    place = rng.randrange(4)
    if place == 0:
        body["chat_template"] = attack
    elif place == 1:
        body["messages"] = [{"role": attack, "content": "x"}]
    elif place == 2:
        body["chat_template_kwargs"] = {"x": attack}
    else:
        body["messages"] = [{"role": "user", "content": [{"type": attack, "text": attack}]}]
    return _post(json.dumps(body).encode(), path="/v1/chat/completions")


def _unknown_fields(rng: random.Random, model: str) -> Hostile:
    name = rng.choice(["best_of", "suffix", "tools", "functions", "guided_json", "__class__", "a" * 5000, "\u0000"])
    value: object = 5 if name == "best_of" else "x"
    return _post(_fields(model, **{name: value}))


def _slow_body(rng: random.Random, model: str) -> Hostile:
    """Half a body; most close after it, some send on so slowly that the server must end it."""
    whole = _post(_fields(model), {"Content-Length": "5000"}).pieces[0]
    return Hostile("", (whole, *[b" "] * 12), 0.0)


_MAKERS: dict[str, Callable[[random.Random, str], Hostile]] = {
    "types": _wrong_types,
    "sizes": _wrong_sizes,
    "nesting": _nesting,
    "large bodies": _large,
    "broken JSON": _broken_json,
    "invalid UTF-8": _invalid_utf8,
    "headers": _headers,
    "paths and methods": _paths,
    "template attacks": _templates,
    "unknown fields": _unknown_fields,
    "slow body": _slow_body,
}


def ask(url: str, request: Hostile) -> tuple[str, bytes]:
    """Send it; return how it ended ("answered", "closed" or "hung") and what came."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    received = b""
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout=_SECONDS) as connection:
            try:
                for place, piece in enumerate(request.pieces):
                    if place and request.pause:
                        connection.settimeout(request.pause)
                        received += _read_some(connection)
                        connection.settimeout(_SECONDS)
                        if received:
                            break
                    connection.sendall(piece)
                if request.kind == "slow body" and not request.pause:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the server may answer and close before it has read all
            while not _whole(received):
                more = connection.recv(1 << 16)
                if not more:
                    break
                received += more
    except TimeoutError:
        return "hung", received
    except OSError:
        pass
    return ("answered" if received else "closed"), received


def _read_some(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except TimeoutError:
        return b""


def _whole(received: bytes) -> bool:
    head, blank, rest = received.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if blank and line.startswith(b"content-length:"):
            return len(rest) >= int(line.split(b":")[1])
    return bool(blank) and rest.endswith(b"0\r\n\r\n")


def _length(head: bytes) -> int | None:
    """Length of the first response's body; another may follow it."""
    found = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(found[0]) if found else None


def faults_of(kind: str, ended: str, received: bytes) -> list[str]:
    """What is wrong with how the server took a request."""
    if ended == "hung":
        return ["hung"]
    if ended == "closed":
        # Half a body and then nothing: there is nobody to answer.
        return [] if kind == "slow body" else ["closed without an answer"]
    head, _, body = received.partition(b"\r\n\r\n")
    status = head.split(b" ")[1].decode("latin-1")
    if not 400 <= int(status) < 600:
        return [f"answered {status}"]
    if int(status) >= 500:
        return [f"answered {status}"]
    try:
        error = json.loads(body[: _length(head)])["error"]
        good = {"message", "type", "param", "code"} <= error.keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    return [] if good else [f"{status} in another form: {body[:60]!r}"]


def measure(url: str, model: str, count: int = REQUESTS) -> tuple[Table, bool]:
    """Send all; a line for each kind, and whether the server took all well."""
    requests = [hostile_request(number, model) for number in range(count)]
    with ThreadPoolExecutor(_WORKERS) as pool:
        answers = list(pool.map(lambda request: ask(url, request), requests))
    sent, bad = Counter[str](), Counter[str]()
    examples: dict[str, str] = {}
    for number, (request, (ended, received)) in enumerate(zip(requests, answers, strict=True)):
        sent[request.kind] += 1
        for fault in faults_of(request.kind, ended, received):
            bad[request.kind] += 1
            examples.setdefault(request.kind, f"{fault} (request {number})")
    rows = tuple((kind, str(sent[kind]), str(bad[kind]), examples.get(kind, "")) for kind in sent)
    return Table(("kind", "sent", "taken badly", "first of them"), rows), not bad.total()
