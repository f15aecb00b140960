"""Sentencepiece models become fast tokenizers with the same token ids, or nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from engine.tools.sentencepiece_tokenizer import SAMPLES, convert_folder, main
from tests.support.servers.openllama_model import TOKENIZER_CONFIG, train_sentencepiece


def folder_with(tmp_path: Path, config: dict[str, object] | None = None, **options: object) -> Path:
    train_sentencepiece(tmp_path / "tokenizer.model", **options)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("dummy", [True, False])
def test_ids_are_those_of_sentencepiece(tmp_path: Path, model_type: str, extra: bool, dummy: bool) -> None:
    options = {"model_type": model_type, "remove_extra_whitespaces": extra, "add_dummy_prefix": dummy}
    folder = folder_with(tmp_path, TOKENIZER_CONFIG, **options)
    assert convert_folder(folder) == folder / "tokenizer.json"
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in (*SAMPLES, "words that the   samples do not hold: zebra, quixotic\n  indented"):
        assert fast.encode(text).ids == [1, *reference.encode(text)]
        assert fast.decode(fast.encode(text).ids) == reference.decode(reference.encode(text))


def test_repeated_spaces_are_removed_where_the_model_says_so(tmp_path: Path) -> None:
    convert_folder(folder_with(tmp_path, TOKENIZER_CONFIG))
    fast = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert fast.encode("a   b").ids == fast.encode(" a b ").ids


def test_a_tokenizer_without_a_longest_text_is_converted(tmp_path: Path) -> None:
    """transformers writes 10^30 for none."""
    assert convert_folder(folder_with(tmp_path, TOKENIZER_CONFIG | {"model_max_length": 10**30}))


def test_special_tokens_are_those_of_the_configuration(tmp_path: Path) -> None:
    convert_folder(folder_with(tmp_path, {"tokenizer_class": "T5Tokenizer"}))
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("run").ids
    assert ids[-1] == 2 and ids[0] != 1


# As T5's own: no token that begins a text, and another normalizer.
_T5 = {"model_type": "unigram", "byte_fallback": False, "rule": "nmt_nfkc", "pad_id": 0, "eos_id": 1, "unk_id": 2}
_T5 |= {"bos_id": -1}
_NAMED = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_LISTED = {"additional_special_tokens": [f"<extra_id_{number}>" for number in range(100)]}
_FOLDERS: tuple[tuple[dict[str, object] | None, dict[str, object], int], ...] = (
    # tokenizer_config.json, what config.json adds, and how many sentinels there are
    (_NAMED | {"extra_ids": 100} | _LISTED, {}, 100),
    (_NAMED | {"extra_ids": 7}, {}, 7),
    (_NAMED | {"extra_ids": 0}, {"model_type": "gpt2", "tokenizer_class": "T5Tokenizer"}, 0),
    (_NAMED | {"tokenizer_class": "T5TokenizerFast"}, {}, 100),
    (None, {}, 100),
)
_TEXTS = ("run", "The <extra_id_0> model <extra_id_1> runs.", "a<extra_id_6>b <extra_id_99>", "<extra_id_0>")
_TRANSFORMERS = """
import json, sys
from transformers import AutoTokenizer
folders, texts = json.loads(sys.argv[1])
loaded = [AutoTokenizer.from_pretrained(folder) for folder in folders]
print(json.dumps([[one(text).input_ids for text in texts] for one in loaded]))
"""


def test_a_t5_has_its_sentinels_and_ends_whatever_file_names_its_class(tmp_path: Path) -> None:
    """T5 1.1 of the hub has a sentencepiece model alone, and a tokenizer_config.json of 2020 that names no class."""
    folders = [tmp_path / str(number) for number in range(len(_FOLDERS))]
    for folder, (of_tokenizer, of_model, _) in zip(folders, _FOLDERS, strict=True):
        folder.mkdir()
        folder_with(folder, of_tokenizer, **_T5)
        (folder / "tokenizer.model").rename(folder / "spiece.model")
        (folder / "config.json").write_text(json.dumps({"model_type": "t5"} | of_model))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folders[0] / "spiece.model")).get_piece_size()
    # In a process of its own: it registers sentencepiece's format of files under another name.
    asked = json.dumps([[str(folder) for folder in folders], _TEXTS])
    done = subprocess.run([sys.executable, "-c", _TRANSFORMERS, asked], capture_output=True, text=True, check=True)
    for folder, (_, _, count), theirs in zip(folders, _FOLDERS, json.loads(done.stdout), strict=True):
        convert_folder(folder)
        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert [fast.encode(text).ids for text in _TEXTS] == theirs
        first = fast.token_to_id("<extra_id_0>")
        assert first == (pieces + count - 1 if count else None)
        assert not count or fast.decode([first, *fast.encode("run").ids]) == "run"


@pytest.mark.parametrize("count", [-1, "7", True, 10**9])
def test_a_number_of_sentinels_that_is_none_is_named(
    tmp_path: Path, count: object, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path, {"tokenizer_class": "T5Tokenizer", "extra_ids": count})
    assert main([str(folder)]) == 2
    assert "tokenizer_config.json: extra_ids: got" in capsys.readouterr().err
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("place", ["special_tokens_map.json", "tokenizer_config.json"])
def test_added_tokens_are_special_where_the_folder_names_them_so(tmp_path: Path, place: str) -> None:
    """Answers leave out special tokens, and `stop` texts that are special end an answer at the token."""
    folder = folder_with(tmp_path, TOKENIZER_CONFIG)
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()
    ids = {"<tool>": size, "<|im_start|>": size + 1, "<|im_end|>": size + 2}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    named = {"eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False,
             "single_word": False}, "additional_special_tokens": ["<|im_start|>"]}  # fmt: skip
    before = json.loads((folder / place).read_text()) if (folder / place).exists() else {}
    (folder / place).write_text(json.dumps(before | named))
    convert_folder(folder)
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {token: one.special for token, one in fast.get_added_tokens_decoder().items() if token >= size}
    assert found == {size: False, size + 1: True, size + 2: True}
    answer = [*ids.values(), *fast.encode("run", add_special_tokens=False).ids]
    assert fast.decode(answer).replace(" ", "") == "<tool>run"


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_added_to_the_model_are_matched_as_a_whole(tmp_path: Path, place: str) -> None:
    folder = folder_with(tmp_path, TOKENIZER_CONFIG)
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()
    ids = {"<|im_end|>": size + 1, "<|im_start|>": size}
    if place == "added_tokens.json":
        (folder / place).write_text(json.dumps(ids))
    else:
        listed = {"0": {"content": "<unk>", "special": True}, "1": {"content": "<s>", "special": True}}
        listed |= {str(index): {"content": text, "special": True, "normalized": True} for text, index in ids.items()}
        (folder / place).write_text(json.dumps(TOKENIZER_CONFIG | {"added_tokens_decoder": listed}))
    convert_folder(folder)
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    run = fast.encode("run", add_special_tokens=False).ids
    assert fast.encode("<|im_start|>run<|im_end|>").ids == [1, size, *run, size + 1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("added_tokens.json", {"<|x|>": 9999}, "added token '<|x|>' has the id 9999, the fast tokenizer would give"),
        ("added_tokens.json", {"<|x|>": "9"}, "added_tokens.json: '<|x|>': got '9', expected its token id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"900": "<|x|>"}}, "added_tokens_decoder: '900' has no"),
    ],
)
def test_added_tokens_that_cannot_keep_their_ids_are_named(
    tmp_path: Path, name: str, content: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    (folder / name).write_text(json.dumps(content))
    assert main([str(folder)]) == 2
    assert said in capsys.readouterr().err and not (folder / "tokenizer.json").exists()


def test_a_tokenizer_that_would_differ_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # This normalizer takes a carriage return and line feed for two characters, the fast one for one.
    folder = folder_with(tmp_path, TOKENIZER_CONFIG, rule="nmt_nfkc", remove_extra_whitespaces=False)
    assert main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "tokenizer.model: the fast tokenizer differs from sentencepiece on" in said
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.model", b"not a model", "tokenizer.model: not a sentencepiece model"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", b'{"tokenizer_class": "OwnTokenizer"}', "tokenizer_class OwnTokenizer cannot be"),
    ],
)
def test_what_cannot_be_converted_is_named(
    tmp_path: Path, name: str, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path)
    (folder / name).write_bytes(content)
    assert main([str(folder)]) == 2
    assert said in capsys.readouterr().err and not (folder / "tokenizer.json").exists()


def test_a_fast_tokenizer_that_is_there_stays(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "tokenizer.json").write_text("mine")
    assert convert_folder(folder) is None and (folder / "tokenizer.json").read_text() == "mine"
