"""Models that are made up or lie in a folder, and their manifests; the hub is in test_tasks_providers_hub."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.common.base import SCHEMA_VERSION, sha256_of_file
from configs.common.files.safetensors_header import header_tensors
from configs.hardware.architectures import ARCHITECTURES
from configs.spec.study import ModelSpec
from tasks.models import folder as folder_module
from tasks.models.model_cache import _locked, load_manifest, manifest_path, save_manifest, verify_manifest
from tasks.models.sources import hub_repository, resolve_model
from tasks.planning.study_models import planned_model
from tests.support.servers.hub_server import (
    CONFIG,
    make_model,
    make_sharded_model,
)

# Synthetic


def test_synthetic_needs_no_files_and_no_network(cache: Path, base: Path, watched: list[Any]) -> None:
    manifest = resolve_model("synthetic:llama-4m@7", None, cache, base)
    assert manifest.identity == "synthetic:llama-4m@7"
    assert (manifest.source, manifest.files, manifest.synthetic_seed) == ("synthetic", {}, 7)
    assert manifest.config == ARCHITECTURES["llama-4m"]
    assert json.loads((Path(manifest.folder) / "config.json").read_text()) == manifest.config
    assert load_manifest(manifest_path(manifest.identity, cache)) == manifest
    assert resolve_model("synthetic:llama-4m", None, cache, base).identity == "synthetic:llama-4m@0"
    assert resolve_model("synthetic:llama-4m@007", None, cache, base) == manifest
    assert watched == []


def test_synthetic_mistakes_say_what_works(cache: Path, base: Path) -> None:
    with pytest.raises(ValueError, match=r"did you mean llama-4m\?") as caught:
        resolve_model("synthetic:lama-4m@1", None, cache, base)
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    with pytest.raises(ValueError, match="got seed '-1'"):
        resolve_model("synthetic:llama-4m@-1", None, cache, base)
    with pytest.raises(ValueError, match="`revision` applies to Hugging Face repositories only"):
        resolve_model("synthetic:llama-4m@1", "main", cache, base)


# Folders


def test_folder_is_used_in_place(cache: Path, base: Path) -> None:
    folder = make_model(base / "models" / "tiny")
    (folder / "README.md").write_text("not part of the model")
    (folder / "consolidated.safetensors").write_bytes(b"another copy of the weights")
    manifest = resolve_model("./models/tiny", None, cache, base)
    assert manifest.source == "folder" and manifest.folder == str(folder)
    assert manifest.config == CONFIG
    assert set(manifest.files) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert manifest.files["model.safetensors"].sha256 == sha256_of_file(folder / "model.safetensors")
    assert manifest.identity.startswith("folder:") and len(manifest.identity) == len("folder:") + 16
    for written in ("models/tiny", str(folder), "models/tiny/"):
        assert resolve_model(written, None, cache, base).identity == manifest.identity


def test_folder_identity_follows_content_and_names(cache: Path, base: Path) -> None:
    folder = make_model(base / "tiny")
    first = resolve_model("tiny", None, cache, base).identity
    shutil.copytree(folder, base / "copy")
    copy = resolve_model("copy", None, cache, base)
    assert copy.identity == first and copy.folder == str(base / "copy")
    (folder / "tokenizer.json").write_text('{"a":1}')
    changed = resolve_model("tiny", None, cache, base).identity
    assert changed != first
    (folder / "tokenizer.json").rename(folder / "other.json")
    assert resolve_model("tiny", None, cache, base).identity not in (first, changed)


def test_big_folder_is_hashed_once(cache: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(base / "tiny")
    hashed: list[str] = []

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of_file(path)

    monkeypatch.setattr(folder_module, "sha256_of_file", counting)
    first = resolve_model("tiny", None, cache, base)
    assert sorted(hashed) == ["config.json", "model.safetensors", "tokenizer.json"]
    hashed.clear()
    assert resolve_model("tiny", None, cache, base) == first
    assert hashed == []
    os.utime(folder / "tokenizer.json", ns=(1, 1))
    assert resolve_model("tiny", None, cache, base) == first
    assert hashed == ["tokenizer.json"]
    (cache / "models" / "hashes.json").write_text("[torn")
    assert resolve_model("tiny", None, cache, base) == first


def test_reading_a_big_folder_is_said_before_it_begins(
    cache: Path, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(base / "tiny")
    monkeypatch.setattr("tasks.models.sources._LONG_TO_READ_BYTES", 1)
    said = []
    monkeypatch.setattr(folder_module, "sha256_of_file", lambda path: said.append(caplog.text) or sha256_of_file(path))
    for _ in range(2):
        resolve_model("tiny", None, cache, base)
    assert all("tiny: reading all 0 GiB once" in text for text in said) and len(said) > 1
    assert caplog.text.count("reading all") == 1  # what is known is not read again


def test_folder_that_is_not_there(cache: Path, base: Path) -> None:
    make_model(base / "models" / "llama-7b")
    with pytest.raises(ValueError, match=r"\./models/llama: no such folder \(did you mean \./models/llama-7b\?\)"):
        resolve_model("./models/llama", None, cache, base)
    with pytest.raises(ValueError, match=r"models/llama: no such folder \(did you mean models/llama-7b\?\)") as caught:
        resolve_model("models/llama", None, cache, base)
    assert "revision" in str(caught.value)
    with pytest.raises(ValueError, match=r"gpt9: no such folder; expected .*`owner/name`, or a name of `rankwise plan"):
        resolve_model("gpt9", None, cache, base)
    with pytest.raises(ValueError, match="got a file, expected the folder"):
        resolve_model("./models/llama-7b/config.json", None, cache, base)
    with pytest.raises(ValueError, match="`revision` applies to Hugging Face repositories only"):
        resolve_model("./models/llama-7b", "main", cache, base)
    with pytest.raises(ValueError, match="~no-such-user/llama-7b: no such folder"):
        resolve_model("~no-such-user/llama-7b", None, cache, base)


def test_what_is_a_repository(base: Path) -> None:
    make_model(base / "models" / "tiny")
    assert hub_repository("acme/tiny", None, base) == "acme/tiny"
    for other in ("models/tiny", "./acme/tiny", "/acme/tiny", "~/tiny", "tiny", "a/b/c", "synthetic:llama-4m@0"):
        assert hub_repository(other, None, base) is None


def test_folder_without_config(cache: Path, base: Path) -> None:
    (make_model(base / "tiny") / "config.json").unlink()
    with pytest.raises(ValueError, match=r"tiny: no config\.json"):
        resolve_model("tiny", None, cache, base)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 << 30)


def _broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.txt", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_pipe, "is a named pipe"),
        (_device, "is a device"),
        (_sparse, "53,687,091,200 bytes, expected at most"),
        (_broken_link, "No such file or directory"),
    ],
)
def test_folder_with_a_file_that_cannot_be_read(
    cache: Path, base: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    make_model(base / "m")
    (base / "m" / name).unlink(missing_ok=True)
    make(base / "m" / name)
    with pytest.raises(ValueError, match=message) as refused:
        resolve_model("m", None, cache, base)
    assert name in str(refused.value)


@pytest.mark.parametrize(("text", "message"), [("{torn", "config.json: not JSON"), ("[1]", "got list")])
def test_folder_with_broken_config(cache: Path, base: Path, text: str, message: str) -> None:
    (make_model(base / "tiny") / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        resolve_model("tiny", None, cache, base)


@pytest.mark.parametrize("kind", ["acme_llm", None, ["llama"]])
def test_remote_code_is_refused(cache: Path, base: Path, kind: object) -> None:
    folder = make_model(base / "tiny")
    config = CONFIG | {"auto_map": {"AutoModel": "modeling.Own"}, "model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"auto_map.*never run \(trust_remote_code is off and cannot be enabled\)"):
        resolve_model("tiny", None, cache, base)
    assert not list(cache.rglob("manifest.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert resolve_model("tiny", None, cache, base).source == "folder"


def test_code_beside_a_model_that_is_known_without_it_is_left_alone(cache: Path, base: Path) -> None:
    """Phi-3, Falcon and DeepSeek could not be used from the hub: their files still name code of their own."""
    folder = make_model(base / "tiny")
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "modeling.Own"}}))
    found = resolve_model("tiny", None, cache, base)
    assert found.config["model_type"] == CONFIG["model_type"] and "modeling.py" not in found.files


def test_pickled_checkpoint_is_refused_with_the_remedy(cache: Path, base: Path) -> None:
    folder = make_model(base / "tiny")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    # Beside safetensors it does no harm: nothing opens it.
    assert "pytorch_model.bin" not in resolve_model("tiny", None, cache, base).files
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"pickled weights \(pytorch_model\.bin\).*rankwise convert .*tiny DESTINATION"
    ):
        resolve_model("tiny", None, cache, base)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="no weights"):
        resolve_model("tiny", None, cache, base)


_ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "acme/tiny"})


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_is_no_model(cache: Path, base: Path, weights: str, has_config: bool) -> None:
    """It was told that its tensors are "not part of the model that config.json describes", or lacks config.json."""
    folder = make_model(base / "tiny")
    (folder / "model.safetensors").rename(folder / weights)
    (folder / "adapter_config.json").write_text(_ADAPTER)
    (folder / "training_args.bin").write_bytes(b"\x80\x02.")
    if not has_config:
        (folder / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"tiny: an adapter \(LoRA\), which is no model alone\. Merge it into the model"
    ):
        resolve_model("tiny", None, cache, base)


def test_an_adapter_beside_the_shards_of_a_model_is_none_of_them(cache: Path, base: Path) -> None:
    folder = make_model(base / "tiny")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    shutil.copy(folder / "model-00001-of-00001.safetensors", folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(_ADAPTER)
    files = resolve_model("tiny", None, cache, base).files
    assert {name for name in files if name.endswith(".safetensors")} == {"model-00001-of-00001.safetensors"}


def test_what_a_trainer_keeps_is_no_pickled_checkpoint(cache: Path, base: Path) -> None:
    """`rankwise convert` was the remedy for training_args.bin."""
    folder = make_model(base / "tiny")
    (folder / "model.safetensors").unlink()
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth"):
        (folder / name).write_bytes(b"\x80\x02.")
    with pytest.raises(ValueError, match="tiny: no weights"):
        resolve_model("tiny", None, cache, base)


def test_a_file_without_tensors_is_refused(cache: Path, base: Path) -> None:
    """As an interrupted export leaves: it was found when the model was loaded, without the file's name."""
    folder = make_model(base / "tiny")
    (folder / "model.safetensors").write_bytes(_file(b"{}", 0))
    with pytest.raises(ValueError, match=r"tiny: no tensors in model\.safetensors\. Save or fetch"):
        resolve_model("tiny", None, cache, base)
    (folder / "model.safetensors").unlink()
    (folder / "other.safetensors").write_bytes(_file(b"{}", 0))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ValueError, match=r"tiny: no tensors in model\.safetensors\.index\.json"):
        resolve_model("tiny", None, cache, base)


def test_truncated_safetensors(cache: Path, base: Path) -> None:
    path = make_model(base / "tiny") / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    expected = rf"model\.safetensors: truncated.*expected {len(whole)} bytes by its header, found {len(whole) - 10}"
    with pytest.raises(ValueError, match=expected):
        resolve_model("tiny", None, cache, base)
    path.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match=rf"expected {len(whole)} bytes by its header, found {len(whole) + 4}"):
        resolve_model("tiny", None, cache, base)
    path.write_bytes(whole[:20])
    with pytest.raises(ValueError, match=r"expected at least \d+ bytes \(the header alone\), found 20"):
        resolve_model("tiny", None, cache, base)


def _file(header: bytes, data: int) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"<html>an error page, saved as a model</html>",
        _file(b"not json", 8),
        _file(b"[1, 2]", 8),
        _file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', 12),
        _file(b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', 8),
        _file(b'{"a":{"dtype":"F32","shape":[2]}}', 8),
        _file(b'{"a":{"dtype":"NEW","shape":[2],"data_offsets":[0,-8]}}', 8),
        _file(
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
            3,
        ),
    ],
)
def test_damaged_safetensors(cache: Path, base: Path, content: bytes) -> None:
    (make_model(base / "tiny") / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged: .*fetch or copy it again"):
        resolve_model("tiny", None, cache, base)


def test_files_that_safetensors_writes_are_sound(tmp_path: Path) -> None:
    """Against the library itself, in a process of its own: it is not imported where Prefect runs."""
    code = (
        "import sys, numpy as np; from safetensors.numpy import save_file\n"
        "save_file({'a': np.zeros((2, 3), 'f4'), 'empty': np.zeros((0, 3), 'f2'), 'flag': np.ones(3, bool),"
        " 'scalar': np.array(1.0)}, sys.argv[1], metadata={'format': 'pt'})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.safetensors")], check=True, timeout=600)
    assert set(header_tensors(tmp_path / "x.safetensors")) == {"a", "empty", "flag", "scalar"}


def test_shards(cache: Path, base: Path) -> None:
    folder = make_sharded_model(base / "tiny")
    files = resolve_model("tiny", None, cache, base).files
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} < set(files)
    index = folder / "model.safetensors.index.json"
    (folder / "model-00002-of-00002.safetensors").rename(folder / "away")
    with pytest.raises(ValueError, match=r"index\.json lists missing files: model-00002-of-00002\.safetensors"):
        resolve_model("tiny", None, cache, base)
    index.write_text(json.dumps({"weight_map": {"c": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ValueError, match="says c is in model-00001-of-00002"):
        resolve_model("tiny", None, cache, base)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        resolve_model("tiny", None, cache, base)


def test_cache_that_cannot_be_made(tmp_path: Path, base: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(ValueError, match=r"cache.*synthetic:llama-4m"):
        resolve_model("synthetic:llama-4m", None, tmp_path / "cache", base)


# Manifests


def test_two_copies_of_a_model_folder_are_read_where_each_lies(cache: Path, base: Path) -> None:
    """Whoever resolved the second one sent the runs of the first there, and they failed once it was removed."""
    make_model(base / "first")
    shutil.copytree(base / "first", base / "second")
    first, second = (
        planned_model(ModelSpec(id=name, name=name), position, cache, base)
        for position, name in enumerate(("first", "second"))
    )
    assert first.identity == second.identity
    shutil.rmtree(base / "second")
    manifest = load_manifest(Path(first.manifest))
    assert Path(manifest.folder) == base / "first" and verify_manifest(manifest, sha256_of_file) == {}
    assert Path(first.manifest).parent == Path(second.manifest).parent  # one model for a cluster's disk


def test_manifest_is_checked_when_read(cache: Path, base: Path) -> None:
    make_model(base / "tiny")
    manifest = resolve_model("tiny", None, cache, base)
    path = save_manifest(manifest, cache)
    assert load_manifest(path) == manifest
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"manifest-\w{8}\.json: not a manifest"):
        load_manifest(path)
    path.write_text(manifest.model_copy(update={"schema_version": SCHEMA_VERSION + 1}).model_dump_json())
    with pytest.raises(ValueError, match=f"schema version {SCHEMA_VERSION + 1}"):
        load_manifest(path)


def test_verify_finds_what_changed(cache: Path, base: Path) -> None:
    folder = make_model(base / "tiny")
    manifest = resolve_model("tiny", None, cache, base)
    assert verify_manifest(manifest, sha256_of_file) == {}
    (folder / "tokenizer.json").write_text("[]")
    assert verify_manifest(manifest) == {}
    assert verify_manifest(manifest, sha256_of_file) == {"tokenizer.json": "content changed"}
    (folder / "tokenizer.json").write_text("{   }")
    (folder / "config.json").unlink()
    assert verify_manifest(manifest) == {"tokenizer.json": "5 bytes, not 2", "config.json": "missing"}


def test_a_cache_on_a_file_system_without_locks_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre is often mounted so: the fetch ended with `Function not implemented`, of what and where was not said."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    cache.mkdir(parents=True, exist_ok=True)
    told = f"{cache}: this file system has no locks .* set RANKWISE_CACHE to a folder of another one"
    with pytest.raises(ValueError, match=told), _locked(cache / "lock", "owner/model@1"):
        pass


def test_a_cache_that_cannot_be_written_is_told_with_the_variable_that_moves_it(tmp_path: Path) -> None:
    # As a home that is read-only on a cluster's nodes: only its path was named.
    (tmp_path / "home").write_text("no folder")
    with pytest.raises(ValueError, match=r"needed for synthetic:llama-1m@0\. Set RANKWISE_CACHE to"):
        resolve_model("synthetic:llama-1m@0", None, tmp_path / "home" / ".cache" / "rankwise", tmp_path)
