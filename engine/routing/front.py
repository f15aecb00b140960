"""The front's application: checks the token, passes a request on to a backend, and streams its answer back.

    front = Front(Path("front.json"), Path("state.json"))
    await front.begin()                # watches the configuration and the backends' health
    uvicorn.Config(front)              # it is an ASGI application

A request is passed on again where its backend cannot be reached or refuses it with 429 or 503, as often as there is
time, and where the backend goes away with it before the first byte of an answer, but not for ever: it may be why. After
the first byte nothing is repeated.
"""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from configs.common.base import write_atomically
from configs.common.files.reading import read_bytes, read_model
from configs.serving.deployment import BackendState, FrontConfig, FrontState, RoutedServer
from engine.routing.choosing import BackendLoad, next_backend
from engine.serving.http.hosts import foreign_host, refusal_of

MAX_BODY_BYTES = 4 << 20
_LOOK_SECONDS, _HEALTH_SECONDS, _AGAIN_SECONDS = 0.1, 0.5, 0.05
_MAX_LOST = 3
"""So often backends may go away with a request, which may be why: it would end all of them, again and again."""
_HOP_HEADERS = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"host",
        b"content-length",
        b"authorization",
        b"te",
        b"upgrade",
    )
)
_OF_THE_CLIENT = frozenset(("accept", "accept-encoding", "user-agent"))
"""Headers that a backend gets from who asked the front, or not at all."""
_NO_COOKIES = DefaultCookiePolicy(allowed_domains=())
"""A cookie that a backend sets is its client's: kept here, it would go along with everybody's requests."""
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """The client has closed the connection before its request was whole."""


class Refusal(NamedTuple):
    """Why a backend did not answer. lost: it had the request, and went away with it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    lost: bool = False


class Front:
    """The configuration in force, the backends' loads, and the connections to them."""

    def __init__(self, config: Path, state: Path) -> None:
        self._config_path, self._state_path = config, state
        self._raw = b""
        self.config = FrontConfig()
        self.loads: dict[str, BackendLoad] = {}
        self._counts = {"requests": 0, "failed": 0}
        self._told: FrontState | None = None
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), trust_env=False, cookies=CookieJar(_NO_COOKIES),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Read the configuration and start watching. Raises ValueError, OSError for one that cannot be used."""
        self._read()
        self._tasks = [asyncio.create_task(self._watch_files()), asyncio.create_task(self._watch_health())]

    async def end(self) -> None:
        """Stop watching and close connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return sum(load.in_flight for load in self.loads.values())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        if (name := foreign_host(scope["headers"], self.config.host, self.config.key)) is not None:
            await _answer(send, 403, _error(refusal_of(name)))
        elif scope["path"] in ("/healthz", "/health"):
            await _answer(send, 200, {"status": "ok"})
        elif not self._is_allowed(scope):
            await _answer(send, 401, _error("the Authorization header needs this address's bearer token"))
        elif not scope["raw_path"].startswith(b"/"):
            # `@elsewhere/` behind a backend's address would be sent to elsewhere, with the backend's token.
            await _answer(send, 400, _error("the path of a request begins with /"))
        elif scope["path"] == "/readyz":
            ready = next_backend(self.config.backends, self.loads) is not None
            await _answer(send, 200 if ready else 503, self._state().model_dump())
        else:
            try:
                async with asyncio.timeout(self.config.body_seconds):
                    body = await _body(receive)
            except ClientGone:
                return
            except TimeoutError:
                limit = self.config.body_seconds
                await _answer(send, 408, _error(f"the request's body did not arrive within {limit:g} s"))
                return
            await self._pass_on(scope, body, receive, send)

    def _is_allowed(self, scope: Message) -> bool:
        if self.config.key is None:
            return True
        kind, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return bool(kind.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.config.key.encode()))

    async def _pass_on(self, scope: Message, body: bytes | None, receive: Receive, send: Send) -> None:
        if body is None:
            await _answer(send, 413, _error(f"a request has at most {MAX_BODY_BYTES} bytes"))
            return
        self._counts["requests"] += 1
        deadline = time.monotonic() + self.config.wait_seconds
        tried: set[str] = set()
        refusal: Refusal | None = None
        lost, lost_at = 0, dict[str, float]()
        while lost < _MAX_LOST:
            backend = next_backend(self.config.backends, self.loads, tried)
            if backend is None:
                if time.monotonic() > deadline or (refusal is not None and refusal.status == 429):
                    break
                # A tunnel takes connections for a server that is not there: one that went away is looked at before.
                looks = {name: load.looked_at for name, load in self.loads.items()}
                tried = {name for name, at in lost_at.items() if looks.get(name, at) <= at}
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            refusal = await self._try(backend, scope, body, receive, send)
            if refusal is None:
                return
            tried.add(backend.name)
            if refusal.lost:
                lost, lost_at[backend.name] = lost + 1, time.monotonic()
        self._counts["failed"] += 1
        if lost == _MAX_LOST:
            await _answer(send, 502, _error(f"servers went away with this request {lost} times"))
        elif refusal is not None and refusal.status in (429, 503):
            await _send_whole(send, refusal.status, refusal.headers, refusal.body)
        else:
            await _answer(send, 503, _error("no server of this address is ready"), retry_after=5)

    async def _try(
        self, backend: RoutedServer, scope: Message, body: bytes, receive: Receive, send: Send
    ) -> Refusal | None:
        """Have a backend answer; returns None when the client has its answer, else why another is to be asked."""
        load = self.loads[backend.name]
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        if backend.key is not None:
            headers.append((b"authorization", f"Bearer {backend.key}".encode()))
        # As the client wrote it: what it has escaped may not stand in a URL as it is.
        query, path = scope["query_string"].decode("latin-1"), scope["raw_path"].decode("latin-1")
        url = f"{backend.url}{path}{'?' + query if query else ''}"
        request = self._client.build_request(scope["method"], url, headers=headers, content=body)
        for name in _OF_THE_CLIENT - {given.decode("latin-1") for given, _ in headers}:
            request.headers.pop(name, None)  # httpx's own: an answer may come compressed to who cannot read it
        load.in_flight += 1
        load.requests += 1
        begun = False
        gone = asyncio.create_task(_until_gone(receive))
        try:
            response = await self._sent(request, gone)
            if response is None:
                return None
            try:
                if response.status_code in (429, 503):
                    # As it came: its headers say whether it is compressed.
                    refused = b"".join([piece async for piece in response.aiter_raw()])
                    return Refusal(response.status_code, _kept(response), refused)
                if response.status_code >= 500:
                    load.failures += 1
                begun = True
                await send({"type": "http.response.start", "status": response.status_code, "headers": _kept(response)})
                # A stream begins long before its first token, where its request waits.
                with suppress(TimeoutError):  # the client is gone: closing the connection ends the answer there too
                    async with asyncio.timeout(None) as until_gone:
                        gone.add_done_callback(lambda _: _end_now(until_gone))
                        async for piece in response.aiter_raw():
                            await send({"type": "http.response.body", "body": piece, "more_body": True})
                        await send({"type": "http.response.body", "body": b""})
                return None
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            load.failures += 1
            unreached = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            if unreached:
                load.ready = False
            if begun:
                raise  # uvicorn closes the connection: the client sees a broken answer, not a short one
            return Refusal(502, [], b"", lost=not unreached)
        finally:
            load.in_flight -= 1
            gone.cancel()

    async def _sent(self, request: httpx.Request, gone: "asyncio.Task[None]") -> httpx.Response | None:
        """Return the beginning of an answer; None: the client is gone, and its request was given up there too."""
        sending = asyncio.create_task(self._client.send(request, stream=True))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            return sending.result() if sending.done() else None
        finally:
            sending.cancel()

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with suppress(OSError, ValueError):
                self._read()
            state = self._state()
            if state != self._told:
                with suppress(OSError):
                    write_atomically(self._state_path, state.model_dump_json())
                    self._told = state

    def _read(self) -> None:
        raw = read_bytes(self._config_path)
        if raw != self._raw:
            self.config, self._raw = read_model(self._config_path, FrontConfig), raw
        names = [backend.name for backend in self.config.backends]
        self.loads |= {name: BackendLoad() for name in names if name not in self.loads}
        for name in [name for name, load in self.loads.items() if name not in names and not load.in_flight]:
            del self.loads[name]

    def _state(self) -> FrontState:
        listed = tuple(
            BackendState(
                name=name, ready=load.ready, in_flight=load.in_flight, requests=load.requests, failures=load.failures
            )
            for name, load in self.loads.items()
        )
        return FrontState(config_id=self.config.id, backends=listed, **self._counts)

    async def _watch_health(self) -> None:
        async def look(backend: RoutedServer) -> None:
            headers = {b"Authorization": f"Bearer {backend.key}".encode()} if backend.key else {}
            began = time.monotonic()
            try:
                answer = await self._client.get(f"{backend.url}/readyz", headers=headers, timeout=3.0)
                ready = answer.status_code == 200
            except httpx.HTTPError:
                ready = False
            if backend.name in self.loads:
                self.loads[backend.name].ready, self.loads[backend.name].looked_at = ready, began

        while True:
            await asyncio.gather(*(look(backend) for backend in self.config.backends))
            await asyncio.sleep(_HEALTH_SECONDS if all(load.ready for load in self.loads.values()) else _LOOK_SECONDS)


def _kept(response: httpx.Response) -> list[tuple[bytes, bytes]]:
    dropped = _HOP_HEADERS - {b"content-length"}
    return [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in dropped]


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request; None: it is too large. Raises ClientGone."""
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        whole += message.get("body", b"")
        if len(whole) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(whole)


def _end_now(limit: asyncio.Timeout) -> None:
    """Let a block end, if it has not ended already."""
    with suppress(RuntimeError):
        limit.reschedule(0.0)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, data: Message, retry_after: int | None = None) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [] if retry_after is None else [(b"retry-after", str(retry_after).encode())]
    await _send_whole(send, status, headers, json.dumps(data).encode())


async def _send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    given = [pair for pair in headers if pair[0] != b"content-length"]
    given.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": given})
    await send({"type": "http.response.body", "body": body})


def _error(message: str) -> Message:
    return {"error": {"message": message, "type": "rankwise_front", "param": None, "code": None}}
