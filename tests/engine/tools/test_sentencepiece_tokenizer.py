"""Sentencepiece models become fast tokenizers with the same token ids, or nothing."""

import json
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
