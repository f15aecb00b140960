"""Implementation of `rankwise serve` and `rankwise generate`; see `flows.cli.serving.command`."""

import json
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from configs.plans.model_manifest import read_model_manifest
from configs.serving.settings import API_KEY_VARIABLE, ServingSettings, own_api_key
from engine.planner.serving import MORE_ROOM
from flows.cli.errors import plainly
from flows.cli.signals import ended_by_signals
from flows.folders import cache_folder
from tasks.serving.process import ServerFailedError, ServerProcess, first_refusal
from tasks.serving.settings import DECODERS, ServerRequest, make_settings, program_of

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MIB = 1 << 20
_OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop")
"""Fields of the API that are options of `rankwise generate`."""


def in_words(work: Callable[[], int]) -> int:
    """Run a command that measures nothing; return its exit code. Raises ValueError, and OSError with one line."""
    from tasks.models.sources import TransientFetchError

    try:
        return plainly(work, OSError)
    except TransientFetchError as error:
        raise OSError(str(error)) from error
    except KeyboardInterrupt:
        _say("interrupted")
        return 1


def run_server(asked: ServerRequest, no_token: bool) -> int:
    """Serve until a signal ends it; return the exit code."""

    open_to_others = asked.host not in _LOOPBACK
    own_key = own_api_key()
    key = None if no_token else own_key or (secrets.token_urlsafe(32) if open_to_others else None)
    with ended_by_signals(), _folder() as folder:
        settings = make_settings(asked, folder, cache_folder(), Path.cwd())
        _say(f"loading {settings.name}: {_layout(asked)}, {settings.dtype}")
        with ServerProcess(settings, key, program_of(settings)) as server:
            try:
                about = server.wait_until_ready()
            except ServerFailedError as error:
                raise OSError(str(error)) from error
            except KeyboardInterrupt:
                return 0
            _announce(about, settings.blocks * settings.block, settings.max_length, key, own_key is None)
            if code := _wait(server):
                raise OSError(f"the server ended with exit code {code}")
    return 0


def run_generate(
    asked: ServerRequest, prompts: Sequence[str], fields: dict[str, Any], chat: bool, as_json: bool
) -> int:
    """Print the answers to the prompts; return the exit code."""
    given = {name: value for name, value in fields.items() if value is not None}
    _check_text([*prompts, *given.get("stop", ())])
    with ended_by_signals(), _folder() as folder:
        settings = _settings_of_generate(asked, folder)
        if program_of(settings) != DECODERS:
            raise ValueError(f"{settings.name}: generates no text. Use `rankwise serve`, or a decoder")
        bodies = [{"model": settings.name, **given, **_asked(prompt, chat)} for prompt in prompts]
        _check_requests(settings, bodies)
        key = secrets.token_urlsafe(32)
        with ServerProcess(settings, key) as server:
            try:
                about = server.wait_until_ready()
            except ServerFailedError as error:
                raise OSError(str(error)) from error
            _warn_of_kernels(about)
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=about["url"], headers=headers, timeout=None, trust_env=False) as client:
                path = "/v1/chat/completions" if chat else "/v1/completions"
                try:
                    for number, body in enumerate(bodies, 1):
                        with _refused_in_words(number, len(bodies)):
                            _print_answer(client, path, body, as_json)
                except httpx.HTTPError as error:
                    raise OSError(
                        f"the server ended while it answered: {str(error) or type(error).__name__}"
                    ) from error
    return 0


def _settings_of_generate(asked: ServerRequest, folder: Path) -> ServingSettings:
    """Make settings. Raises ValueError in the command's words: it has fewer options than `rankwise serve`."""
    try:
        return make_settings(asked, folder, cache_folder(), Path.cwd())
    except ValueError as error:
        remedy = "use more ranks (--tp, --pp) or --compression, or lower --max-length of `rankwise serve`"
        raise ValueError(str(error).replace(MORE_ROOM, remedy)) from error


class _RefusedError(ValueError):
    """What the server refuses, and the field that it names."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


def _check_text(texts: Sequence[str]) -> None:
    """Raise ValueError for arguments that were no UTF-8, which Python keeps as lone surrogates."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{text.encode(errors='surrogateescape')!r:.80}: not valid UTF-8") from None


def _check_requests(settings: ServingSettings, bodies: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for what the server would refuse, before the minutes that loading the model may need."""
    if not (Path(read_model_manifest(Path(settings.manifest)).folder) / "tokenizer.json").is_file():
        raise ValueError(f"{settings.name}: has no tokenizer, so it takes token ids alone: use `rankwise serve`")
    refused = first_refusal(settings, bodies)
    if refused is not None:
        with _refused_in_words(refused["number"], len(bodies)):
            raise _RefusedError(refused["message"], refused["field"])


@contextmanager
def _refused_in_words(number: int, prompts: int) -> Iterator[None]:
    """Raise ValueError, in the command's words, for a refusal of one of the prompts."""
    try:
        yield
    except _RefusedError as error:
        raise ValueError(_in_the_commands_words(error, number, prompts)) from error


def _in_the_commands_words(error: _RefusedError, number: int, prompts: int) -> str:
    """A refusal, with the option or the prompt in place of the API's field."""
    message, field = str(error), error.field
    if field in ("prompt", "messages"):
        which = "the prompt" if prompts == 1 else f"prompt {number}"
        if "no chat template" in message:
            which, message = "--chat", message.replace("use /v1/completions", "leave the option out")
    elif field in _OPTIONS:
        which = f"--{field.replace('_', '-')}"
    else:
        return message
    return f"{which}: {message.removeprefix(f'{field}: ')}".replace("of this server", "of the model")


def _asked(prompt: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}


def _print_answer(client: httpx.Client, path: str, body: dict[str, Any], as_json: bool) -> None:
    """Print one answer as it comes. Raises _RefusedError."""
    if as_json:
        answer = client.post(path, json=body)
        _check(answer.status_code, answer.json())
        print(answer.text)
        return
    with client.stream("POST", path, json={**body, "stream": True}) as stream:
        if stream.status_code != 200:
            stream.read()
            _check(stream.status_code, stream.json())
        for data in _events(stream):
            _check(200, data)
            choice = data["choices"][0]
            print(choice.get("text") or choice.get("delta", {}).get("content") or "", end="", flush=True)
    print()


def _events(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, whose lines end with line feeds alone.

    Those of httpx end at U+0085 and U+2028 too, which a text in JSON may hold.
    """
    rest = b""
    for piece in stream.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _check(status: int, data: dict[str, Any]) -> None:
    if "error" in data or status != 200:
        error = data.get("error", {})
        raise _RefusedError(error.get("message", f"the server answered {status}"), error.get("param"))


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder for sockets and logs, readable by this user only, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rankwise-serve-"))
    try:
        yield folder
    except BrokenPipeError:  # whoever read the answers reads no more
        raise
    except OSError:
        _show_logs(folder)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _show_logs(folder: Path) -> None:
    """Print the end of the ranks' logs, which nobody can read later."""
    from configs.common.files.reading import read_tail
    from configs.common.printable import printable_lines

    for log in sorted(folder.glob("*.log")):
        text = read_tail(log, 4_000).strip()
        if text:
            _say(f"--- {log.name}\n{printable_lines(text, 4_000)}")


def _layout(asked: ServerRequest) -> str:
    layout = asked.layout
    parts = [f"{name}={degree}" for name, degree in (("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp))]
    shown = [part for part in parts if not part.endswith("=1")]
    return ", ".join(shown) or "one rank"


def _announce(about: dict[str, Any], cache_tokens: int, max_length: int, key: str | None, made: bool) -> None:
    said = f"serving at {about['url']}/v1: sequences up to {max_length} tokens"
    first = about["replicas"][0]
    if "batch_invariant" in first:
        same_bits = "the same bits in any batch" if first["batch_invariant"] else "bits may depend on the batch"
        _say(f"{said}, {same_bits}")
        size = first["cache_bytes"] / _MIB
        _say(f"key-value cache of each replica: {cache_tokens} tokens, {size:.0f} MiB on its first rank")
    else:
        _say(said)
    _warn_of_kernels(about)
    if key is not None and made:
        _say(f"requests need the header `Authorization: Bearer {key}`; {API_KEY_VARIABLE} sets another token")
    _say("Ctrl-C ends it; requests in progress are finished")


def _warn_of_kernels(about: dict[str, Any]) -> None:
    """Say that answers come more slowly, where nothing could be compiled."""
    for why in {replica.get("why_no_kernels") for replica in about["replicas"]} - {None}:
        _say(f"no compiled kernels ({why}): torch's are used, which are slower")


def _wait(server: ServerProcess) -> int:
    """Wait for the server; the first interrupt lets it finish what it has begun, the second ends it."""
    for _ in range(2):
        try:
            return server.wait()
        except KeyboardInterrupt:
            _say("ending")
            server.signal(signal.SIGTERM)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
