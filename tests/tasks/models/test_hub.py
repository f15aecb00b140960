"""Models from the hub: a real HTTP server that speaks the hub's API (tests/support/servers/hub_server.py)."""

import json
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from configs.common.base import sha256_of_file
from configs.plans.model_manifest import POOLING, ModelManifest
from configs.plans.pooling import pooling_of
from tasks.models import hub as hub_module
from tasks.models import model_cache
from tasks.models.model_cache import _locked, manifest_path, save_manifest, verify_manifest
from tasks.models.sources import TransientFetchError, described_config, resolve_model
from tests.support.run_folders.studies import wait_until
from tests.support.servers.hub_server import (
    CONFIG,
    Fault,
    HubServer,
    Repository,
    make_model,
    make_sharded_model,
    write_safetensors,
)

TOKEN = "hf_" + "Zq7" * 11


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("HF_TOKEN", "HF_ENDPOINT", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # A closed port: a test that forgets to name its server cannot reach another.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    yield
    huggingface_hub.close_session()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HubServer]]:
    """Serve the folder as acme/tiny."""
    servers: list[HubServer] = []

    def start(folder: Path, **options: Any) -> HubServer:
        server = HubServer({"acme/tiny": Repository(folder, **options)})
        servers.append(server.__enter__())
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        return server

    yield start
    huggingface_hub.close_session()
    for server in servers:
        server.__exit__(None, None, None)


def _parts(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def test_repository_is_fetched_once(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], watched: list[Any]
) -> None:
    folder = make_model(tmp_path / "served")
    for name in ("README.md", "modeling_own.py", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_text("not wanted")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    hub = serve(folder)
    commit = Repository(folder).commit
    manifest = resolve_model("acme/tiny", commit, cache, base)
    assert manifest.identity == f"acme/tiny@{commit}" and manifest.source == "hub"
    assert manifest.config == CONFIG
    assert set(manifest.files) == {"config.json", "tokenizer.json", "model.safetensors"}
    for name, file in manifest.files.items():
        assert (Path(manifest.folder) / name).read_bytes() == (folder / name).read_bytes()
        assert file.sha256 == sha256_of_file(folder / name)
    asked = {request.path.rsplit("/", 1)[1] for request in hub.requests}
    assert asked == {commit, "config.json", "tokenizer.json", "model.safetensors"}
    assert not any("torch/" in request.user_agent for request in hub.requests)
    assert watched and {address[0] for address in watched} == {"127.0.0.1"}
    assert {int(address[1]) for address in watched} == hub.ports

    hub.requests.clear()
    watched.clear()
    assert resolve_model("acme/tiny", commit, cache, base) == manifest
    assert described_config("acme/tiny", commit, cache, base) == manifest.config
    assert hub.requests == [] and watched == []


def test_how_an_encoder_pools_is_fetched_too(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    """Vectors of a model from the hub were always means; one that an earlier version fetched is completed."""
    folder = make_model(tmp_path / "served")
    (folder / "1_Pooling").mkdir()
    (folder / POOLING).write_text('{"pooling_mode_cls_token": true}')
    serve(folder)
    manifest = resolve_model("acme/tiny", "main", cache, base)
    assert pooling_of(manifest) == "first" and POOLING in manifest.files
    (Path(manifest.folder) / POOLING).unlink()
    files = {name: file for name, file in manifest.files.items() if name != POOLING}
    save_manifest(manifest.model_copy(update={"files": files}), cache)
    assert resolve_model("acme/tiny", "main", cache, base) == manifest
    local = resolve_model(str(folder), None, cache, base)
    (folder / POOLING).write_text('{"pooling_mode_mean_tokens": true}')
    other = resolve_model(str(folder), None, cache, base)
    assert pooling_of(local) == pooling_of(other) == "mean" and local.identity != other.identity


def test_nothing_is_written_to_a_cache_that_is_whole(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    """A cache that others may only read could not be used by the name of a branch: its lock was opened for writing."""
    serve(make_model(tmp_path / "served"))
    manifest = resolve_model("acme/tiny", "main", cache, base)
    next(cache.rglob("lock")).unlink()
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert resolve_model("acme/tiny", "main", cache, base) == manifest
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_cache_of_others_serves_by_any_name_of_its_commit(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is noted to save time could not be written there: the name of a branch, and hashes that another's note of
    the same moment had replaced.
    """
    serve(make_model(tmp_path / "served"))
    manifest = resolve_model("acme/tiny", Repository(tmp_path / "served").commit, cache, base)
    (cache / "models" / "hashes.json").unlink()

    def write(path: Path, *rest: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for module in ("model_cache", "folder"):
        monkeypatch.setattr(f"tasks.models.{module}.write_atomically", write)
    assert resolve_model("acme/tiny", "main", cache, base) == manifest


def test_cache_that_was_moved(cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]) -> None:
    folder = make_model(tmp_path / "served")
    hub = serve(folder)
    commit = Repository(folder).commit
    resolve_model("acme/tiny", commit, cache, base)
    hub.requests.clear()
    cache.rename(tmp_path / "elsewhere")
    manifest = resolve_model("acme/tiny", commit, tmp_path / "elsewhere", base)
    assert manifest.folder.startswith(str(tmp_path / "elsewhere")) and verify_manifest(manifest) == {}
    assert hub.requests == []


def test_branch_becomes_the_commit(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "served")
    hub = serve(folder, branches=("main", "refs/pr/1"))
    first = Repository(folder).commit
    manifest = resolve_model("acme/tiny", "main", cache, base)
    assert manifest.identity == f"acme/tiny@{first}"
    assert resolve_model("acme/tiny", "refs/pr/1", cache, base) == manifest
    (folder / "tokenizer.json").write_text('{"moved": "on"}')
    second = resolve_model("acme/tiny", "main", cache, base)
    assert second.identity == f"acme/tiny@{Repository(folder).commit}" != manifest.identity

    # The commit that was pinned is in the cache, whatever the hub says.
    hub.add_fault(Fault(".", 99, status=503))
    assert resolve_model("acme/tiny", first, cache, base) == manifest
    with pytest.raises(TransientFetchError, match=f"or set `revision: {Repository(folder).commit}`, which is in"):
        resolve_model("acme/tiny", "main", cache, base)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("acme/tiny", "main", cache, base) == second
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        resolve_model("acme/tiny", "v2", cache, base)


def test_without_a_revision_the_default_branch_is_pinned(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    folder = make_model(tmp_path / "served")
    hub = serve(folder)
    assert resolve_model("acme/tiny", None, cache, base).identity == f"acme/tiny@{Repository(folder).commit}"
    assert hub.requests[0].path == "/api/models/acme/tiny/revision/main"


def test_connection_cut_in_the_middle_is_resumed(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    # More than the client's pieces of 10 MB: it takes a file up again at a whole piece.
    folder = make_model(tmp_path / "served", {"big": 3_000_000})
    hub = serve(folder)
    hub.add_fault(Fault("GET .*model.safetensors", 1, cut_after_bytes=11_000_000))
    manifest = resolve_model("acme/tiny", "main", cache, base)
    first, second = hub.gets("model.safetensors")
    assert (first.range, first.sent_bytes) == (None, 11_000_000)
    assert second.range is not None and second.status == 206
    assert second.sent_bytes == manifest.files["model.safetensors"].size_bytes - int(second.range[6:-1])
    assert second.sent_bytes < 2_500_000
    assert manifest.files["model.safetensors"].sha256 == sha256_of_file(folder / "model.safetensors")


def test_whole_files_survive_an_interrupted_download(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    hub = serve(make_sharded_model(tmp_path / "served"))
    hub.add_fault(Fault("GET .*model-00002", 1, status=500))
    with pytest.raises(TransientFetchError, match=r"HTTP 500\. Try again"):
        resolve_model("acme/tiny", "main", cache, base)
    assert not list(cache.rglob("manifest.json")) and not _parts(cache)
    place = next(cache.rglob("*.metadata")).parent
    (place / "left-by-a-killed-process.incomplete").write_bytes(b"x" * 100)
    manifest = resolve_model("acme/tiny", "main", cache, base)
    assert len(hub.gets("model-00001-of-00002.safetensors")) == 1
    assert len(hub.gets("model-00002-of-00002.safetensors")) == 1
    assert verify_manifest(manifest, sha256_of_file) == {} and not _parts(cache)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_file_damaged_on_the_way(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], name: str
) -> None:
    hub = serve(make_model(tmp_path / "served"))
    hub.add_fault(Fault(f"GET .*{name}", 1, damage=True))
    with pytest.raises(TransientFetchError, match=f"{name} damaged"):
        resolve_model("acme/tiny", "main", cache, base)
    assert not list(cache.rglob("manifest.json")) and not list(cache.rglob(name))
    resolve_model("acme/tiny", "main", cache, base)
    assert len(hub.gets(name)) == 2


@pytest.mark.parametrize("damage", ["truncated", "changed", "manifest"])
def test_damaged_cache_is_fetched_again(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], damage: str
) -> None:
    hub = serve(make_model(tmp_path / "served"))
    manifest = resolve_model("acme/tiny", "main", cache, base)
    weights = Path(manifest.folder) / "model.safetensors"
    if damage == "truncated":
        os.truncate(weights, 50)
    elif damage == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    else:
        manifest_path(manifest.identity, cache).write_text("{")
    hub.requests.clear()
    assert resolve_model("acme/tiny", manifest.identity.split("@")[1], cache, base) == manifest
    assert verify_manifest(manifest, sha256_of_file) == {}
    assert len(hub.gets("model.safetensors")) == (0 if damage == "manifest" else 1)
    assert hub.gets("tokenizer.json") == []


def test_a_damaged_file_that_another_process_has_fetched_again_stays(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that found the damage the later one removed the file on which the other's launches had begun."""
    hub = serve(make_model(tmp_path / "served"))
    manifest = resolve_model("acme/tiny", "main", cache, base)
    weights = Path(manifest.folder) / "model.safetensors"
    os.truncate(weights, 50)
    hub.requests.clear()
    judged, fetched = model_cache.verify_manifest, list[int]()

    def then_fetched(*arguments: Any) -> dict[str, str]:
        found = judged(*arguments)
        if not fetched:
            fetched.append(0)
            resolve_model("acme/tiny", "main", cache, base)  # by the other
            fetched[0] = weights.stat().st_ino
        return found

    monkeypatch.setattr(model_cache, "verify_manifest", then_fetched)
    assert resolve_model("acme/tiny", "main", cache, base) == manifest
    assert weights.stat().st_ino == fetched[0] and len(hub.gets("model.safetensors")) == 1


def test_two_processes_remember_the_commits_of_both(
    cache: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose line was lost could not be run without the hub, though all of it was in the cache."""
    (cache / "models").mkdir(parents=True)
    path = cache / "models" / "revisions.json"
    written, others = model_cache.write_atomically, list[threading.Thread]()

    def while_another_writes(*arguments: Any) -> None:
        if not others:
            others.append(threading.Thread(target=model_cache._Revisions(path).put, args=("acme/b", "main", "2" * 40)))
            others[0].start()
            others[0].join(0.3)
        written(*arguments)

    monkeypatch.setattr(model_cache, "write_atomically", while_another_writes)
    model_cache._Revisions(path).put("acme/a", "main", "1" * 40)
    others[0].join()
    assert json.loads(path.read_bytes()) == {"acme/a@main": "1" * 40, "acme/b@main": "2" * 40}


def _bytes_under(folder: Path) -> bytes:
    return b"\n".join(str(path).encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_gated_repository_and_its_token(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = serve(make_model(tmp_path / "served"), token=TOKEN)
    with pytest.raises(ValueError, match=r"access is gated \(HTTP 401\); accept its conditions at .*/acme/tiny"):
        resolve_model("acme/tiny", "main", cache, base)
    monkeypatch.setenv("HF_TOKEN", TOKEN[::-1])
    with pytest.raises(ValueError, match=r"access is gated \(HTTP 403\)") as caught:
        resolve_model("acme/tiny", "main", cache, base)
    shown = "".join(traceback.format_exception(caught.value)).encode() + pickle.dumps(caught.value)
    assert TOKEN[::-1].encode() not in shown
    assert caught.value.__cause__ is None and caught.value.__context__ is None

    monkeypatch.setenv("HF_TOKEN", TOKEN + "\n")
    hub.requests.clear()
    resolve_model("acme/tiny", "main", cache, base)
    shown_to = {request.origin for request in hub.requests if request.authorization == f"Bearer {TOKEN}"}
    assert shown_to == {"hub"} and {request.origin for request in hub.requests} == {"hub", "storage"}
    kept = _bytes_under(tmp_path / "cache")
    assert b"acme/tiny@" in kept and TOKEN.encode() not in kept and TOKEN[::-1].encode() not in kept


def test_only_the_token_of_the_environment_is_used(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert huggingface_hub.get_token() == "hf_stored"
    hub = serve(make_model(tmp_path / "served"))
    resolve_model("acme/tiny", "main", cache, base)
    assert {request.authorization for request in hub.requests} == {None}


def test_broken_token_is_not_printed(cache: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc\ndef")
    with pytest.raises(ValueError, match="HF_TOKEN: contains invalid characters") as caught:
        resolve_model("acme/tiny", "main", cache, base)
    assert "abc" not in str(caught.value)


def test_what_is_permanent(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = serve(make_model(tmp_path / "served"), token=TOKEN, private=True)
    with pytest.raises(ValueError, match=r"acme/tiny at main: no such repository for no HF_TOKEN \(HTTP 401 .*private"):
        resolve_model("acme/tiny", "main", cache, base)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ValueError, match="acme/none at main: no such repository for the HF_TOKEN given"):
        resolve_model("acme/none", "main", cache, base)
    with pytest.raises(ValueError, match=r"acme/tiny at v9: no such revision\. Use a branch, a tag"):
        resolve_model("acme/tiny", "v9", cache, base)
    hub.add_fault(Fault("GET /api", 1, status=403))
    with pytest.raises(ValueError, match="HTTP 403"):
        resolve_model("acme/tiny", "main", cache, base)
    with pytest.raises(ValueError, match="Repo id must"):
        resolve_model("acme/tiny..", "main", cache, base)
    hub.add_fault(Fault("GET /api", 1, status=200))
    with pytest.raises(ValueError, match="invalid response of"):
        resolve_model("acme/tiny", "main", cache, base)
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    with pytest.raises(ValueError, match=r"HF_ENDPOINT: got 'hub\.example', expected an address"):
        resolve_model("acme/tiny", "main", cache, base)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_server_errors_can_pass(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], status: int
) -> None:
    hub = serve(make_model(tmp_path / "served"))
    hub.add_fault(Fault("GET /api", 1, status=status))
    with pytest.raises(TransientFetchError, match=f"acme/tiny at main: http://127.* returned HTTP {status}. Try again"):
        resolve_model("acme/tiny", "main", cache, base)
    assert resolve_model("acme/tiny", "main", cache, base).source == "hub"


def test_broken_connections_can_pass(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TransientFetchError, match=r"http://127\.0\.0\.1:9 cannot be reached \(Connect"):
        resolve_model("acme/tiny", "main", cache, base)
    hub = serve(make_model(tmp_path / "served"))
    hub.add_fault(Fault("GET /api", 1, cut_after_bytes=10))
    with pytest.raises(TransientFetchError, match="RemoteProtocolError"):
        resolve_model("acme/tiny", "main", cache, base)
    monkeypatch.setattr(hub_module, "_API_TIMEOUT_SECONDS", 0.3)
    hub.add_fault(Fault("GET /api", 1, stall_seconds=5.0))
    with pytest.raises(TransientFetchError, match=r"cannot be reached .*Timeout"):
        resolve_model("acme/tiny", "main", cache, base)
    assert not issubclass(TransientFetchError, ValueError)
    assert str(pickle.loads(pickle.dumps(TransientFetchError("x")))) == "x"


def test_a_storage_of_large_files_that_is_away_can_come_back(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real hub has them in Xet storage, whose client raises a RuntimeError: it was a traceback, and not retried."""
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_DURATION", "1")
    serve(make_model(tmp_path / "served"), xet="http://127.0.0.1:9")
    with pytest.raises(TransientFetchError, match=r"acme/tiny at [0-9a-f]{40}: incomplete download \(.*127\.0\.0\.1:9"):
        resolve_model("acme/tiny", "main", cache, base)


@pytest.mark.parametrize(
    ("said", "raised", "message"),
    [
        (
            "Task error: Internal Writer Error: No space left on device (os error 28)",
            ValueError,
            "No space left on device",
        ),
        (
            "Task error: error sending request for url (https://transfer.example/xorbs/1?Signature=s3cret&Key=7)",
            TransientFetchError,
            r"incomplete download \(Task error: error sending request for url \(https://transfer\.example/xorbs/1\)\)",
        ),
    ],
    ids=["disk", "network"],
)
def test_what_the_client_of_that_storage_says_is_understood(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer], monkeypatch: pytest.MonkeyPatch,
    said: str, raised: type[Exception], message: str,
) -> None:  # fmt: skip
    def download(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(said)

    serve(make_model(tmp_path / "served"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(raised, match=message) as caught:
        resolve_model("acme/tiny", "main", cache, base)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImportError("Using SOCKS proxy, but the 'socksio' package is not installed."), " names .*pip install socksio"),
        (ValueError("Unknown scheme for proxy URL URL('socks://h:1')"), r": .*socks://h:1.* http:// or socks5://"),
    ],
    ids=["package", "scheme"],
)
def test_a_proxy_that_the_client_cannot_use_is_named(
    cache: Path, base: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    """It was a traceback: `ALL_PROXY=socks5://...` is common on machines that reach the internet through `ssh -D`.

    `socks://`, as GNOME sets it, was called an invalid response of the hub.
    """

    def refused(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refused)
    with pytest.raises(ValueError, match=f"acme/tiny at main: ALL_PROXY or https_proxy{told}"):
        resolve_model("acme/tiny", "main", cache, base)


def test_one_bad_answer_for_a_file_is_asked_again(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    hub = serve(make_model(tmp_path / "served"))
    hub.add_fault(Fault("HEAD .*tokenizer.json", 1, status=503))
    assert resolve_model("acme/tiny", "main", cache, base).source == "hub"


def test_repository_is_refused_before_its_weights_come(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    folder = make_model(tmp_path / "served")
    hub = serve(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {}, "model_type": "acme_llm"}))
    with pytest.raises(ValueError, match="trust_remote_code is off"):
        resolve_model("acme/tiny", "main", cache, base)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"acme/tiny@\w+: no config\.json"):
        resolve_model("acme/tiny", "main", cache, base)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"acme/tiny@\w+: an adapter \(LoRA\)"):
        resolve_model("acme/tiny", "main", cache, base)
    (folder / "adapter_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").rename(folder / "weights.ckpt")
    with pytest.raises(ValueError, match=r"acme/tiny@.*pickled weights \(weights\.ckpt\).*rankwise convert"):
        resolve_model("acme/tiny", "main", cache, base)
    (folder / "weights.ckpt").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    write_safetensors(folder / "other.safetensors", {"a": 1})
    with pytest.raises(ValueError, match=r"lists missing files: gone\.safetensors"):
        resolve_model("acme/tiny", "main", cache, base)
    assert not any(request.path.endswith((".safetensors", ".bin")) for request in hub.requests)
    assert not list(cache.rglob("manifest.json"))


def test_truncated_file_in_the_repository(
    cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]
) -> None:
    folder = make_model(tmp_path / "served")
    os.truncate(folder / "model.safetensors", 200)
    serve(folder)
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated"):
        resolve_model("acme/tiny", "main", cache, base)
    assert not list(cache.rglob("manifest.json"))


def test_too_little_room(cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]) -> None:
    hub = serve(make_model(tmp_path / "served"), claimed_bytes={"model.safetensors": 10**18})
    with pytest.raises(ValueError, match=r"acme/tiny: 931322574\.6 GiB still to fetch, .* GiB free under .*cache"):
        resolve_model("acme/tiny", "main", cache, base)
    assert hub.gets("model.safetensors") == []


def test_two_at_once_fetch_once(cache: Path, base: Path, tmp_path: Path, serve: Callable[..., HubServer]) -> None:
    hub = serve(make_model(tmp_path / "served"))
    hub.add_fault(Fault("HEAD .*config.json", 1, stall_seconds=0.5))
    found: list[ModelManifest] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model("acme/tiny", "main", cache, base))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(timeout=600)
    assert len(found) == 2 and found[0] == found[1]
    assert len(hub.gets("model.safetensors")) == 1


def test_a_model_that_another_fetches_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The hub's client keeps two from the same file, but not one from what the other has not yet checked."""
    entered = threading.Event()

    def enter() -> None:
        with _locked(tmp_path / "lock", "acme/tiny"):
            entered.set()

    waiting = threading.Thread(target=enter)
    with _locked(tmp_path / "lock", "acme/tiny"):
        waiting.start()
        wait_until(lambda: "acme/tiny: another process fetches it, waiting" in caplog.text, 30, "the second to wait")
        assert not entered.is_set()
    waiting.join(600)
    assert entered.is_set()
