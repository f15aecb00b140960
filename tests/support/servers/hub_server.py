"""A hub on the loopback: a real HTTP server that speaks what `huggingface_hub` asks for models.

    with HubServer({"acme/tiny": Repository(folder)}) as hub:
        os.environ["HF_ENDPOINT"] = hub.endpoint

The calls and headers are those that huggingface_hub 2.4 makes and reads: the repository's description at a
revision, HEAD and GET of a file. As on the real hub, large files (weights, sentencepiece models) are redirected to
another origin, which serves ranges and must not be shown the token. Faults are real: error answers, connections that
are cut in the middle of a file, answers that never come.
"""

import contextlib
import functools
import hashlib
import json
import re
import socket
import sys
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PIECE_BYTES = 16384


@functools.cache
def _content_digest(path: Path, changed_ns: int) -> str:
    """Git's hash of a file; weights of hundreds of megabytes are read once."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


LARGE = (".safetensors", ".bin", ".model")
"""Suffixes of files that the hub keeps in its store of large files."""
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@dataclass
class Repository:
    """What is served under one name.

    token: who has it may read the files (gated) or see the repository at all (private). claimed_bytes: sizes
    that the description gives instead of the true ones. xet: address of a Xet storage that is said to have the large
    files, as of most repositories of the real hub.
    """

    folder: Path
    branches: tuple[str, ...] = ("main",)
    token: str | None = None
    private: bool = False
    claimed_bytes: dict[str, int] = field(default_factory=dict)
    xet: str | None = None

    @property
    def commit(self) -> str:
        """40 hexadecimal digits that change with the files, like git's."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path in self.files():
            digest.update(path.name.encode() + b"\0" + _content_digest(path, path.stat().st_mtime_ns).encode())
        return digest.hexdigest()

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


@dataclass
class Request:
    """One request as it was served."""

    method: str
    path: str
    origin: str
    range: str | None
    authorization: str | None
    user_agent: str
    status: int = 0
    sent_bytes: int = 0


@dataclass
class Fault:
    """What happens to requests whose method and path match, `times` times."""

    pattern: str
    times: int
    status: int | None = None
    cut_after_bytes: int | None = None
    stall_seconds: float = 0.0
    damage: bool = False


@dataclass
class _State:
    repositories: dict[str, Repository]
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)
    connections: set[socket.socket] = field(default_factory=set)
    storage: str = ""

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, f"{method} {path}"):
                    fault.times -= 1
                    return fault
        return None


class HubServer:
    """The server, from `with` to its end."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self._state = _State(repositories)
        self._servers = [self._server("hub"), self._server("storage")]
        self.endpoint, self._state.storage = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}) for server in self._servers
        ]

    def _server(self, name: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"state": self._state, "origin": name})
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> "HubServer":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.released.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
        # Clients keep connections open, and their threads would go on to answer.
        with self._state.lock:
            for connection in self._state.connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def requests(self) -> list[Request]:
        return self._state.requests

    @property
    def ports(self) -> set[int]:
        return {server.server_port for server in self._servers}

    def add_fault(self, fault: Fault) -> None:
        self._state.faults.append(fault)

    def gets(self, name: str) -> list[Request]:
        """GET requests of a file that were answered with content."""
        return [
            request
            for request in self.requests
            if request.method == "GET" and request.path.endswith("/" + name) and request.status in (200, 206)
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    state: _State
    origin: str

    def log_message(self, format: str, *args: object) -> None:
        """Requests are kept in the list instead."""

    def setup(self) -> None:
        super().setup()
        with self.state.lock:
            self.state.connections.add(self.connection)

    def finish(self) -> None:
        with self.state.lock:
            self.state.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self._request = Request(
            method=self.command,
            path=unquote(url.path),
            origin=self.origin,
            range=self.headers.get("Range"),
            authorization=self.headers.get("Authorization"),
            user_agent=self.headers.get("User-Agent", ""),
        )
        self.state.requests.append(self._request)
        self._fault = self.state.fault_for(self.command, self._request.path)
        if self._fault is not None and self._fault.stall_seconds:
            self.state.released.wait(self._fault.stall_seconds)
        if self._fault is not None and self._fault.status is not None:
            self._answer(self._fault.status, {}, b"{}")
        elif self.origin == "storage":
            self._send_stored(self._request.path)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._request.path):
            self._describe(match[1], match[2], "blobs" in parse_qs(url.query))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", self._request.path):
            self._list(match[1], match[2])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/xet-read-token/.+", self._request.path):
            address = self.state.repositories[match[1]].xet or ""
            told = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": "9999999999"}
            self._json(200, told, {})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._request.path):
            self._send_file(match[1], match[2], match[3])
        else:
            self._refuse(404, "", "Not Found")

    def _describe(self, name: str, revision: str, blobs: bool) -> None:
        repository = self._visible(name, revision)
        if repository is None:
            return
        siblings = []
        for path in repository.files():
            sibling: dict[str, object] = {"rfilename": str(path.relative_to(repository.folder))}
            if blobs:
                content = path.read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
                size = repository.claimed_bytes.get(path.name, len(content))
                sibling |= {"size": size, "blobId": blob}
                if path.suffix in LARGE:
                    digest = hashlib.sha256(content).hexdigest()
                    sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(sibling)
        self._json(200, {}, {"id": name, "sha": repository.commit, "private": False, "siblings": siblings})

    def _list(self, name: str, revision: str) -> None:
        """The files of a repository, as `hf download` asks for them."""
        repository = self._visible(name, revision)
        if repository is not None:
            entries = [
                {
                    "type": "file",
                    "oid": hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest(),
                    "size": path.stat().st_size,
                    "path": str(path.relative_to(repository.folder)),
                }
                for path in repository.files()
            ]
            self._json(200, {}, entries)

    def _send_file(self, name: str, revision: str, filename: str) -> None:
        repository = self._visible(name, revision)
        if repository is None:
            return
        if repository.token is not None and not self._has(repository.token):
            message = f"Access to model {name} is restricted."
            self._refuse(403 if self._request.authorization else 401, "GatedRepo", message)
            return
        path = repository.folder / filename
        if not path.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{digest[:40]}"', "Accept-Ranges": "bytes"}
        if path.suffix in LARGE:
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"'}
            location = {"Location": f"{self.state.storage}/stored/{name}/{filename}"}
            if repository.xet is not None:
                token = f"http://{self.headers['Host']}/api/models/{name}/xet-read-token/{repository.commit}"
                linked |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": token}
            self._answer(302, headers | linked | location, b"")
        else:
            self._send(content, headers)

    def _send_stored(self, path: str) -> None:
        owner, name, filename = path.removeprefix("/stored/").split("/", 2)
        content = (self.state.repositories[f"{owner}/{name}"].folder / filename).read_bytes()
        self._send(content, {"ETag": f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'})

    def _visible(self, name: str, revision: str) -> Repository | None:
        repository = self.state.repositories.get(name)
        hidden = repository is not None and repository.private and not self._has(repository.token)
        if repository is None or hidden:
            # The real hub says 401 to who is not logged in, so as not to tell private from absent.
            status = 404 if self._request.authorization else 401
            self._refuse(status, "RepoNotFound", "Repository not found")
        elif revision not in (*repository.branches, repository.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def _has(self, token: str | None) -> bool:
        return self._request.authorization == f"Bearer {token}"

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self._request.range or "")
        if asked is None:
            self._answer(200, headers, content)
        elif int(asked[1]) >= len(content):
            self._answer(416, headers | {"Content-Range": f"bytes */{len(content)}"}, b"")
        else:
            span = f"bytes {asked[1]}-{len(content) - 1}/{len(content)}"
            self._answer(206, headers | {"Content-Range": span}, content[int(asked[1]) :])

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._json(status, headers, {"error": message})

    def _json(self, status: int, headers: dict[str, str], data: object) -> None:
        self._answer(status, headers | {"Content-Type": "application/json"}, json.dumps(data).encode())

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self._fault.cut_after_bytes if self._fault else None
        body = body if cut is None else body[:cut]
        if self._fault is not None and self._fault.damage:
            body = body[:-1] + bytes([body[-1] ^ 1])
        try:
            for start in range(0, len(body), PIECE_BYTES):
                self.wfile.write(body[start : start + PIECE_BYTES])
                self._request.sent_bytes += len(body[start : start + PIECE_BYTES])
            if cut is not None:
                self._cut()
        except OSError:
            self.close_connection = True

    def _cut(self) -> None:
        """End the connection although more was promised."""
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def write_safetensors(path: Path, tensors: dict[str, int]) -> None:
    """A sound file of float32 tensors with so many elements each, made by hand. Values differ by position."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, elements in tensors.items():
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [position, position + 4 * elements]}
        position += 4 * elements
    raw = json.dumps(header).encode()
    data = array("f", (index % 1000 for index in range(position // 4)))
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data.tobytes())


def make_model(folder: Path, tensors: dict[str, int] | None = None) -> Path:
    """A small model folder, sound in form."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", tensors or {"embed": 40, "head": 24})
    return folder


def make_sharded_model(folder: Path) -> Path:
    """The same in two shards with their index."""
    make_model(folder)
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_safetensors(folder / names[0], {"a": 1000})
    write_safetensors(folder / names[1], {"b": 2000})
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_connections: list[Any] = []
_watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in ("socket.connect", "socket.getaddrinfo"):
        _connections.append(arguments[1] if event == "socket.connect" else arguments[:2])


@contextlib.contextmanager
def watched_connections() -> Iterator[list[Any]]:
    """Every address that this process connects to or looks up, as (host, port)."""
    global _watching
    if not _watch_installed:
        # An audit hook cannot be taken away again.
        sys.addaudithook(_watch)
        _watch_installed.append(True)
    _connections.clear()
    _watching = True
    try:
        yield _connections
    finally:
        _watching = False


_watch_installed: list[bool] = []
