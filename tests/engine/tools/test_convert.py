"""Conversion of pickled checkpoints, in a process of its own, and its refusals."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.tools.convert import convert, read_pickled
from tests.support.flushed import names_of_flushed


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run_convert(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.tools.convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_shards_and_shared_tensors_are_converted(source: Path, tmp_path: Path) -> None:
    shared = torch.randn(4, 3)
    torch.save({"embed": shared, "head": shared, "part": shared[1:].T}, source / "pytorch_model-00001-of-00002.bin")
    torch.save({"norm": torch.ones(3, dtype=torch.bfloat16)}, source / "pytorch_model-00002-of-00002.bin")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    done = run_convert(source, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == '{"pooling_mode": "cls"}'
    assert torch.equal(tensors["embed"], shared) and torch.equal(tensors["head"], shared)
    assert torch.equal(tensors["part"], shared[1:].T)
    assert tensors["norm"].dtype == torch.bfloat16
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "1_Pooling",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(
    "content",
    [b"\x80", b"x", b"PK", b"(", b"\x80\x02}q\x01.", b"\x80\x05\x95" + b"\xff" * 7 + b"\x7f", b"\x80\x02\x8c\x01\xff."],
    ids=range(7),
)
def test_a_damaged_checkpoint_is_refused_in_one_line(source: Path, content: bytes) -> None:
    path = source / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_pickled(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 600


@pytest.mark.parametrize("format_", ["torch", "pickle"])
def test_a_malicious_checkpoint_is_refused_and_not_run(source: Path, tmp_path: Path, format_: str) -> None:
    marker, path = tmp_path / "marker", source / "pytorch_model.bin"
    content = {"embed": torch.ones(2), "evil": Malicious(marker)}
    if format_ == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    done = run_convert(source, tmp_path / "out")
    assert not marker.exists()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pytorch_model.bin" in done.stderr and "refused" in done.stderr
    assert not (tmp_path / "out").exists()
    # The checkpoint is a real trap: loaded without care, it springs.
    if format_ == "torch":
        torch.load(path, weights_only=False)
        assert marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"hello world" * 10, "cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_pickled(path)


def test_what_is_not_a_table_of_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save([torch.ones(1)], path)
    with pytest.raises(ValueError, match="holds list"):
        read_pickled(path)
    torch.save({"step": 3}, path)
    with pytest.raises(ValueError, match="'step' is int, not a tensor"):
        read_pickled(path)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
)
def test_nothing_is_written_over(source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "-of-" in name or "index" in name:
        monkeypatch.setattr("engine.tools.convert.SHARD_BYTES", 8)
    torch.save({"embed": torch.ones(2), "head": torch.zeros(2)}, source / "pytorch_model.bin")
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(ValueError, match=f"{name}: exists and is not written over"):
        convert(source, out)
    assert [path.name for path in out.iterdir()] == [name] and (out / name).read_text() == "mine"


def test_a_folder_without_checkpoint_or_config_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no pytorch_model\*\.bin"):
        convert(source, tmp_path / "out")
    torch.save({"embed": torch.ones(2)}, source / "pytorch_model.bin")
    (source / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: is missing"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("lost", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_of_which_a_shard_is_missing_is_refused(
    source: Path, tmp_path: Path, lost: int, indexed: bool
) -> None:
    names = [f"pytorch_model-{at:05d}-of-00003.bin" for at in (1, 2, 3)]
    for at, name in enumerate(names, start=1):
        if at != lost:
            torch.save({f"layer.{at}": torch.ones(2)}, source / name)
    index = source / "pytorch_model.bin.index.json"
    if indexed:
        index.write_text(json.dumps({"weight_map": {f"layer.{at}": name for at, name in enumerate(names, start=1)}}))
    done = run_convert(source, tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    said = f"'{names[lost - 1]}' is missing" if indexed else "holds 2 of the 3 files pytorch_model-*-of-00003.bin"
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_index_beside_a_whole_checkpoint_may_name_other_files(source: Path, tmp_path: Path) -> None:
    torch.save({"embed": torch.ones(2)}, source / "pytorch_model.bin")
    index = source / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"embed": "pytorch_model-00001-of-00002.bin"}}')
    assert convert(source, tmp_path / "out")
    (source / "pytorch_model.bin").rename(source / "pytorch_model-00001-of-00001.bin")
    index.write_text('{"weight_map": ["embed"]}')
    with pytest.raises(ValueError, match=r"index\.json: has no weight_map"):
        convert(source, tmp_path / "other")


def test_what_says_how_texts_become_vectors_is_copied(source: Path, tmp_path: Path) -> None:
    """Their length and a further layer were forgotten, and the words of BERT's and XLM-R's tokenizers."""
    torch.save({"embed": torch.ones(2)}, source / "pytorch_model.bin")
    names = ["modules.json", "sentence_bert_config.json", "sentencepiece.bpe.model", "vocab.txt"]
    for name in names:
        (source / name).write_text(name)
    convert(source, tmp_path / "out")
    assert [(tmp_path / "out" / name).read_text() for name in names] == names


def test_one_checkpoint_of_a_folder_is_converted(source: Path, tmp_path: Path) -> None:
    """The same weights once more, or what was left of another number of shards, were refused as tensors in two files.

    transformers takes the whole file where there is one, and else the shards of the index.
    """
    old, new = "pytorch_model-00001-of-00001.bin", [f"pytorch_model-0000{at}-of-00002.bin" for at in (1, 2)]
    torch.save({"embed": torch.zeros(2), "head": torch.zeros(2)}, source / old)
    for name, tensor in zip(new, ("embed", "head"), strict=True):
        torch.save({tensor: torch.ones(2)}, source / name)
    index = source / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"embed": new[0], "head": new[1]}}))
    assert convert(source, tmp_path / "of index")
    torch.save({"embed": torch.full((2,), 2.0)}, source / "pytorch_model.bin")
    assert convert(source, tmp_path / "whole")
    for place, values in (("of index", {"embed": [1.0, 1.0], "head": [1.0, 1.0]}), ("whole", {"embed": [2.0, 2.0]})):
        found = load_file(tmp_path / place / "model.safetensors")
        assert {name: tensor.tolist() for name, tensor in found.items()} == values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_a_tensor_that_safetensors_cannot_hold_is_named(
    source: Path, tmp_path: Path, tensor: torch.Tensor, kind: str
) -> None:
    torch.save({"mask": tensor}, source / "pytorch_model.bin")
    done = run_convert(source, tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"tensor 'mask' is {kind}, which safetensors cannot hold" in done.stderr


def test_a_disk_that_is_full_is_said_in_one_line(source: Path, tmp_path: Path) -> None:
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    torch.save({"embed": torch.ones(1 << 20)}, source / "pytorch_model.bin")
    command = [sys.executable, "-m", "engine.tools.convert", str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, preexec_fn=small_files)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr and "File too large" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_converted_weights_are_on_disk_before_they_have_their_names(source: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(10)}, source / "pytorch_model.bin")
    with names_of_flushed() as flushed:
        convert(source, tmp_path / "out")
    assert tmp_path / "out" / "model.safetensors" in flushed
