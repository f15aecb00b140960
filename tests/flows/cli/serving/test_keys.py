"""`rankwise serve` and `generate` without a model: the token that is told, a server that is gone, or that refuses."""

import json
import shutil
import signal
import socket
import tempfile
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.serving import server
from tasks.models.sources import TransientFetchError
from tasks.serving.settings import ServerRequest, make_settings
from tests.support.servers.inference_server import TINY


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Tokens of the servers that are started."""
    used: list[str | None] = []

    class Process:
        def __init__(self, settings: Any, key: str | None, program: str) -> None:
            used.append(key)

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def wait_until_ready(self) -> dict[str, Any]:
            return {"url": "http://0.0.0.0:8000", "replicas": [{}]}

        def wait(self) -> int:
            return 0

    settings = SimpleNamespace(name="m", dtype="float32", blocks=1, block=16, max_length=16)
    monkeypatch.setattr(server, "make_settings", lambda *_: settings)
    monkeypatch.setattr(server, "program_of", lambda _: "")
    monkeypatch.setattr(server, "ServerProcess", Process)
    return used


@pytest.mark.parametrize(
    ("given", "key", "told"), [(None, None, True), ("", None, True), (" \n", None, True), ("own\n", "own", False)]
)
def test_a_token_that_is_made_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    used: list[str | None],
    given: str | None,
    key: str | None,
    told: bool,
) -> None:
    if given is None:
        monkeypatch.delenv("RANKWISE_API_KEY", raising=False)
    else:
        monkeypatch.setenv("RANKWISE_API_KEY", given)
    assert server.run_server(ServerRequest(model=str(Path("m")), host="0.0.0.0"), no_token=False) == 0
    assert used[0] and (key is None or used[0] == key)
    assert (used[0] in capsys.readouterr().err) is told


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_no_token_is_none_also_where_the_environment_has_one(
    monkeypatch: pytest.MonkeyPatch, used: list[str | None], host: str
) -> None:
    """As of `rankwise route`: the server answered 401 to whoever had read its command line."""
    monkeypatch.setenv("RANKWISE_API_KEY", "of another server")
    assert server.run_server(ServerRequest(model="m", host=host), no_token=True) == 0
    assert used == [None]


def test_a_server_that_ends_later_shows_its_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder with them is removed, so nobody could read them there."""
    folders: list[Path] = []

    class Process:
        def __init__(self, settings: Any, key: str | None, program: str) -> None:
            (folders[0] / "replica-0.log").write_text("the last words of a rank")

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def wait_until_ready(self) -> dict[str, Any]:
            return {"url": "http://127.0.0.1:8000", "replicas": [{}]}

        def wait(self) -> int:
            return 1

    def settings(asked: ServerRequest, folder: Path, *_: Path) -> SimpleNamespace:
        folders.append(folder)
        return SimpleNamespace(name="m", dtype="float32", blocks=1, block=16, max_length=16)

    monkeypatch.setattr(server, "make_settings", settings)
    monkeypatch.setattr(server, "program_of", lambda _: "")
    monkeypatch.setattr(server, "ServerProcess", Process)
    with pytest.raises(OSError, match="the server ended with exit code 1"):
        server.run_server(ServerRequest(model="m"), no_token=False)
    assert "the last words of a rank" in capsys.readouterr().err and not folders[0].exists()


@pytest.mark.parametrize("command", [["serve"], ["generate", "a prompt"]])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (PermissionError(13, "Permission denied", "settings.json"), "settings.json: Permission denied"),
        (TransientFetchError("the hub does not answer"), "the hub does not answer"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_told_without_measurements(
    monkeypatch: pytest.MonkeyPatch, command: list[str], error: BaseException, told: str
) -> None:
    """There are none."""

    def raised(*_: object) -> None:
        raise error

    monkeypatch.setattr(server, "make_settings", raised)
    said = CliRunner().invoke(app, [*command, "--model", "m"])
    assert (said.exit_code, said.output.strip().splitlines()[-1]) == (1, told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("generates", [False, True])
def test_a_signal_while_the_model_is_fetched_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generates: bool, number: signal.Signals
) -> None:
    def fetched(*_: object) -> None:
        signal.raise_signal(number)
        raise AssertionError("it goes on")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server, "make_settings", fetched)
    asked = ServerRequest(model="m")
    before = signal.signal(number, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            if generates:
                server.run_generate(asked, ["a"], {}, chat=False, as_json=False)
            else:
                server.run_server(asked, no_token=False)
    finally:
        signal.signal(number, before)
    assert not list(tmp_path.iterdir())


def test_a_server_that_ends_while_it_answers_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, settings: Any, key: str | None) -> None:
            return

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def wait_until_ready(self) -> dict[str, Any]:
            with socket.create_server(("127.0.0.1", 0)) as free:
                return {"url": f"http://127.0.0.1:{free.getsockname()[1]}", "replicas": [{}]}

    monkeypatch.setattr(server, "make_settings", lambda *_: SimpleNamespace(name="m"))
    monkeypatch.setattr(server, "program_of", lambda _: server.DECODERS)
    monkeypatch.setattr(server, "_check_requests", lambda *_: None)
    monkeypatch.setattr(server, "ServerProcess", Process)
    for as_json in (True, False):
        with pytest.raises(OSError, match="the server ended while it answered"):
            server.run_generate(ServerRequest(model="m"), ["a"], {}, chat=False, as_json=as_json)


def test_an_answer_may_hold_what_ends_a_line_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Its event was cut there, and the command ended with a traceback."""
    texts = ["a\u2028b", "\u0085", "\n", "\u00fc"]
    events = [json.dumps({"choices": [{"text": text}]}, ensure_ascii=False) for text in texts]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
    pieces = [body[place : place + 7] for place in range(0, len(body), 7)]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=iter(pieces)))
    with httpx.Client(base_url="http://server", transport=transport) as client:
        server._print_answer(client, "/v1/completions", {"prompt": "a"}, as_json=False)
    assert capsys.readouterr().out == "".join(texts) + "\n"


def test_whoever_reads_no_further_gets_no_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `| head` does; the ranks are well."""

    def settings(asked: ServerRequest, folder: Path, *_: Path) -> SimpleNamespace:
        (folder / "replica-0.log").write_text("the last words of a rank")
        return SimpleNamespace(name="m")

    def closed(*_: object) -> None:
        raise BrokenPipeError

    ready = SimpleNamespace(wait_until_ready=lambda: {"url": "http://127.0.0.1:9", "replicas": [{}]})
    monkeypatch.setattr(server, "make_settings", settings)
    monkeypatch.setattr(server, "program_of", lambda _: server.DECODERS)
    monkeypatch.setattr(server, "_check_requests", lambda *_: None)
    monkeypatch.setattr(server, "ServerProcess", lambda *_: nullcontext(ready))
    monkeypatch.setattr(server, "_print_answer", closed)
    with pytest.raises(BrokenPipeError):
        server.run_generate(ServerRequest(model="m"), ["a"], {}, chat=False, as_json=False)
    assert not capsys.readouterr().err


class _Refusing(BaseHTTPRequestHandler):
    """Answers the first prompt, refuses what follows as a server does."""

    error: ClassVar[dict[str, str | None]] = {}
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers["content-length"]))
        first = len(self.asked) == 1
        body = json.dumps({"choices": [{"text": "yes"}]} if first else {"error": self.error}).encode()
        self.send_response(200 if first else 400)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("field", "message", "said"),
    [
        ("prompt", "prompt: has no tokens", "prompt 2: has no tokens"),
        ("messages", "messages: m has no chat template; use /v1/completions", "--chat: m has no chat template"),
        ("max_tokens", "max_tokens: 9 exceed the 8 of this server", "--max-tokens: 9 exceed the 8 of the model"),
        (None, "the engine failed", "the engine failed"),
    ],
)
def test_a_refusal_names_the_option_or_the_prompt(
    monkeypatch: pytest.MonkeyPatch, field: str | None, message: str, said: str
) -> None:
    _Refusing.error, _Refusing.asked[:] = {"message": message, "param": field}, []
    with HTTPServer(("127.0.0.1", 0), _Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{refusing.server_port}"
        ready = SimpleNamespace(wait_until_ready=lambda: {"url": url, "replicas": [{}]})
        monkeypatch.setattr(server, "make_settings", lambda *_: SimpleNamespace(name="m"))
        monkeypatch.setattr(server, "program_of", lambda _: server.DECODERS)
        monkeypatch.setattr(server, "_check_requests", lambda *_: None)
        monkeypatch.setattr(server, "ServerProcess", lambda *_: nullcontext(ready))
        with pytest.raises(ValueError, match=f"^{said}"):
            server.run_generate(ServerRequest(model="m"), ["a", "b"], {}, chat=False, as_json=True)
        refusing.shutdown()


def test_the_time_that_ranks_wait_for_each_other_reaches_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[ServerRequest] = []
    monkeypatch.setattr(server, "run_server", lambda given, _: asked.append(given) or 0)
    monkeypatch.setattr(server, "run_generate", lambda given, *_: asked.append(given) or 0)
    for words in (["serve"], ["generate", "a"]):
        options = ["--model", str(TINY), "--device", "cpu", "--group-timeout-seconds", "90"]
        assert CliRunner().invoke(app, [*words, *options]).exit_code == 0
    made = [
        make_settings(given, tmp_path, tmp_path / "cache", tmp_path) for given in (*asked, ServerRequest(str(TINY)))
    ]
    assert [settings.group_timeout_seconds for settings in made] == [90.0, 90.0, 20.0]
    assert made[1].max_sequences == 1  # one prompt after another


def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the model is loaded")

    shutil.copytree(TINY, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer.json"))
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(server, "ServerProcess", loaded)
    asked = ServerRequest(model=str(tmp_path / "m"), device="cpu")
    with pytest.raises(ValueError, match=r"^m: has no tokenizer, so it takes token ids alone: use `rankwise serve`"):
        server.run_generate(asked, ["a"], {}, chat=False, as_json=False)
    (tmp_path / "m" / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    with pytest.raises(AssertionError, match="the model is loaded"):
        server.run_generate(asked, ["a"], {}, chat=False, as_json=False)


CHAT_TEMPLATE = "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("prompts", "fields", "template", "said"),
    [
        (["a"], {}, None, "--chat: m has no chat template; leave the option out"),
        (["a", "no"], {}, CHAT_TEMPLATE, r"prompt 2: the chat template fails \(never\)"),
        (["a"], {}, "{{", "chat template is broken"),
        ([" ".join(map(str, range(3000)))], {}, CHAT_TEMPLATE, "--max-tokens: 1 new tokens after .* exceed the 2048"),
        (["a"], {"max_tokens": 2048}, "", "--max-tokens: 2048 new tokens after 1 of the prompt exceed the 2048"),
        (["a", ""], {}, "", "prompt 2: has no tokens"),
        (["a"], {"stop": [""]}, "", "--stop: at most 16 texts of 1 to 256 characters"),
    ],
)
def test_what_the_server_would_refuse_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prompts: list[str],
    fields: dict[str, Any],
    template: str | None,
    said: str,
) -> None:
    """template: empty for a prompt that is no message."""

    def loaded(*_: object) -> None:
        raise AssertionError("the model is loaded")

    shutil.copytree(TINY, tmp_path / "m")
    if template:
        (tmp_path / "m" / "chat_template.jinja").write_text(template)
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(server, "ServerProcess", loaded)
    asked = ServerRequest(model=str(tmp_path / "m"), device="cpu")
    with pytest.raises(ValueError, match=said):
        server.run_generate(asked, prompts, {"max_tokens": 1, **fields}, chat=template != "", as_json=False)


def test_arguments_that_are_no_text_are_refused_before_a_model_is_loaded() -> None:
    for prompt, fields in (("\udcff", {}), ("a", {"stop": ["\udcfe"]})):
        with pytest.raises(ValueError, match=r"^b'.xf[ef]': not valid UTF-8"):
            server.run_generate(ServerRequest(model="m"), [prompt], fields, chat=False, as_json=False)


def test_generate_advises_no_option_that_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`lower --max-length ... or raise --kv-cache-gib` are options of `rankwise serve` alone."""
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("engine.planner.serving.host_memory_available", lambda: 0)
    done = CliRunner().invoke(app, ["generate", "--device", "cpu", "--model", str(TINY), "a prompt"])
    assert done.exit_code == 2 and "use more ranks (--tp, --pp) or --compression" in done.output
    assert "raise --kv-cache-gib" not in done.output and "--max-length of `rankwise serve`" in done.output
