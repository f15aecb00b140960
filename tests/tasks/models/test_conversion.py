"""A repository of pickled weights and a sentencepiece tokenizer is fetched, converted and checked."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from configs.common.base import sha256_of_file
from engine.tools import convert
from tasks.models.conversion import run_converter
from tasks.models.model_cache import manifest_path, verify_manifest
from tasks.models.sources import TransientFetchError, resolve_model
from tests.support.servers.hub_server import Fault, HubServer, Repository
from tests.support.servers.openllama_model import make_openllama

NAME = "openlm-research/open_llama_3b"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return tmp_path / "served"


@pytest.fixture
def hub(served: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer({NAME: Repository(served)}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
        huggingface_hub.close_session()


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_openllama_is_fetched_converted_and_checked(tmp_path: Path, served: Path, hub: HubServer, shards: int) -> None:
    model, cache = make_openllama(served, shards), tmp_path / "cache"
    (served / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    manifest = resolve_model(NAME, None, cache, tmp_path)
    assert manifest.identity == f"{NAME}@{Repository(served).commit}" and manifest.source == "hub"
    folder = Path(manifest.folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == torch.float16
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(served / "tokenizer.model"))
    text = "Each rank   reads its own shard\n\tof the checkpoint."
    assert fast.encode(text).ids == [1, *reference.encode(text)]
    described = {path.name for path in served.glob("*.json")} - {"pytorch_model.bin.index.json"}
    assert set(manifest.files) == described | {"model.safetensors", "tokenizer.json", "tokenizer.model"}
    assert list(cache.rglob("*.bin")) == []  # 7 GB that nobody needs any more
    hub.requests.clear()
    assert resolve_model(NAME, None, cache, tmp_path) == manifest
    assert [request.path for request in hub.requests] == [f"/api/models/{NAME}/revision/main"]


@pytest.mark.slow
def test_an_interrupted_conversion_begins_again(tmp_path: Path, served: Path, hub: HubServer) -> None:
    make_openllama(served)
    cache = tmp_path / "cache"
    left = manifest_path(f"{NAME}@{Repository(served).commit}", cache).parent / "files"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (left / "config.json").write_text("{}")
    assert "model.safetensors" in resolve_model(NAME, None, cache, tmp_path).files


def test_parts_that_a_killed_download_of_pickles_left_are_removed(tmp_path: Path, served: Path, hub: HubServer) -> None:
    """The client never takes one up again, and each killed attempt left gigabytes until one succeeded."""
    make_openllama(served)
    cache = tmp_path / "cache"
    place = manifest_path(f"{NAME}@{Repository(served).commit}", cache).parent
    part = place / "original" / ".cache" / "huggingface" / "download" / "left-by-a-killed-process.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 100)
    hub.add_fault(Fault("GET .*pytorch_model", 1, status=500))
    with pytest.raises(TransientFetchError, match="HTTP 500"):
        resolve_model(NAME, None, cache, tmp_path)
    assert list(cache.rglob("*.incomplete")) == []


def test_weights_that_lie_there_twice_are_fetched_once(tmp_path: Path, served: Path, hub: HubServer) -> None:
    make_openllama(served)
    for at in (1, 2):
        (served / f"pytorch_model-0000{at}-of-00002.bin").write_bytes(b"the same weights in shards")
    assert "model.safetensors" in resolve_model(NAME, None, tmp_path / "cache", tmp_path).files
    assert hub.gets("pytorch_model.bin") and not hub.gets("pytorch_model-00001-of-00002.bin")


def test_a_folder_with_a_sentencepiece_model_alone_gets_a_tokenizer_and_stays_as_it_is(
    tmp_path: Path, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts for such a model were refused, though the same files are converted when they come from the hub."""
    make_openllama(served)
    folder, cache = tmp_path / "mine", tmp_path / "cache"
    run_converter(served, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "tokenizer.model" in before and "tokenizer.json" not in before
    manifest = resolve_model("mine", None, cache, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    used = Path(manifest.folder)
    assert used.is_relative_to(cache) and set(manifest.files) == {path.name for path in used.iterdir()}
    assert (used / "model.safetensors").resolve() == folder / "model.safetensors"
    assert verify_manifest(manifest, sha256_of_file) == {}
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    text = "Each rank   reads its own shard."
    assert Tokenizer.from_file(str(used / "tokenizer.json")).encode(text).ids == [1, *reference.encode(text)]
    monkeypatch.setattr("tasks.models.model_cache.add_fast_tokenizer", lambda _: pytest.fail("converted again"))
    assert resolve_model("mine", None, cache, tmp_path) == manifest
    (folder / "tokenizer.json").write_bytes((used / "tokenizer.json").read_bytes())
    assert resolve_model("mine", None, cache, tmp_path).folder == str(folder)  # its own comes first


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, served: Path, hub: HubServer) -> None:
    make_openllama(served)
    marker = tmp_path / "marker"
    (served / "pytorch_model.bin").write_bytes(pickle.dumps({"evil": Malicious(marker)}, protocol=2))
    with pytest.raises(ValueError, match=r"open_llama_3b@.*not converted to safetensors: .*refused") as caught:
        resolve_model(NAME, None, tmp_path / "cache", tmp_path)
    assert "\n" not in str(caught.value) and not marker.exists()
    assert list((tmp_path / "cache").rglob("manifest.json")) == []


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_converted_leaves_the_model(
    tmp_path: Path, served: Path, hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    make_openllama(served)
    (served / "tokenizer_config.json").write_text('{"tokenizer_class": "OwnTokenizer"}')
    manifest = resolve_model(NAME, None, tmp_path / "cache", tmp_path)
    assert "tokenizer.json" not in manifest.files and "model.safetensors" in manifest.files
    assert "no fast tokenizer" in caplog.text and "OwnTokenizer" in caplog.text


def test_the_converter_gets_no_secrets(tmp_path: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.models import conversion

    given: dict[str, Any] = {}

    class Done:
        returncode, stdout, stderr = 0, "", ""

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:hush@host/db")
    monkeypatch.setattr(conversion.subprocess, "run", lambda *_, **options: given.update(options) or Done())
    conversion.run_converter(served, tmp_path / "out")
    assert not {"HF_TOKEN", "DATABASE_URL"} & given["env"].keys() and "PATH" in given["env"]


def test_large_weights_become_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.models.folder import check_folder

    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    model = make_openllama(tmp_path / "source")
    convert.convert(tmp_path / "source", tmp_path / "out")
    _, names = check_folder(tmp_path / "out")
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 2 and "model.safetensors" not in shards
    found = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / "out" / shard).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
