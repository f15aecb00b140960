"""Names find their model, unknown ones say what would have worked, and nothing is asked of a network."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.architectures import ARCHITECTURES
from engine.planner.catalog import family_note, find_model, known_models, model_names, planned_family_of


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the planner asked the network")

    monkeypatch.setattr(socket, "socket", refuse)


def test_every_name_repository_and_alias_means_one_model() -> None:
    names = [model.name for model in known_models()]
    assert len(set(names)) == len(names)
    owners: dict[str, str] = {}
    for model in known_models():
        for word in (model.name, model.repository, *model.aliases):
            assert owners.setdefault(word.lower(), model.name) == model.name, word
            assert find_model(word).name == model.name
        assert model.source.startswith("https://") and len(model.as_of) == 10
    assert set(model_names()).isdisjoint(ARCHITECTURES)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("FACEBOOK/OPT-1.3B", "opt-1.3b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("llama-7b", "llama-7b"),
        ("llama-70b", "llama-2-70b"),
        ("bert-base-uncased", "bert-base-uncased"),
        ("bert-base", "bert-base-uncased"),
        ("t5-small", "t5-small"),
        ("microsoft/DialoGPT-medium", "dialogpt-medium"),
        ("openlm-research/open_llama_3b_v2", "open-llama-v2-3b"),
        ("google/vit-base-patch16-224", "vit-base-patch16-224"),
        ("meta-llama/Llama-2-7b-hf@01c7f73d771dfac7d292323805ebc428287df4f9", "llama-2-7b"),
        ("mpt-7b", "mpt-7b"),
        ("mosaicml/mpt-7b", "mosaicml-mpt-7b"),
    ],
)
def test_words_of_users(word: str, name: str) -> None:
    assert find_model(word).name == name


@pytest.mark.parametrize("word", ["synthetic:llama-40m@0", "synthetic:llama-40m", "llama-40m"])
def test_synthetic_sizes(word: str) -> None:
    a = find_model(word)
    assert (a.name, a.hidden, a.layers) == ("llama-40m", 512, 8)
    assert round(a.parameters / 1e6) == 40


def test_a_folder_and_its_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES["llama-1m"]))
    expected = find_model("llama-1m").parameters
    for path in (folder, str(folder), folder / "config.json"):
        assert (find_model(path).name, find_model(path).parameters) == ("mine", expected)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()  # a folder without a config.json does not hide the catalog's model
    assert find_model("gpt2").parameters == 124_439_808
    (tmp_path / "other.json").write_text(json.dumps(ARCHITECTURES["llama-1m"]))
    assert find_model("other.json").name == "other"


def test_what_a_run_has_fetched_is_found(tmp_path: Path) -> None:
    place = tmp_path / "models" / "0123456789abcdef"
    place.mkdir(parents=True)
    manifest = {"identity": "Owner/Name@abc123", "config": ARCHITECTURES["llama-1m"]}
    (place / "manifest.json").write_text(json.dumps(manifest))
    damaged = tmp_path / "models" / "0000000000000000"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    expected = find_model("llama-1m").parameters
    assert find_model("owner/name", cache=tmp_path).parameters == expected
    assert find_model("Owner/Name@abc123", cache=tmp_path).parameters == expected
    with pytest.raises(ValueError, match="is not in the catalog"):
        find_model("owner/name")
    with pytest.raises(ValueError, match="is not in the catalog"):
        find_model("owner/name", cache=tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lama-2-7b", r"model 'lama-2-7b' is not in the catalog \(did you mean llama-2-7b or .*config\.json"),
        ("owner/some-model", r"not in the catalog; give a folder with its config\.json, or the file"),
        ("synthetic:llama-9b@0", r"no architecture is called 'llama-9b'; use one of: llama-1m, "),
        ("missing/config.json", r"missing/config\.json: no such file; give a folder"),
        ("t5", r"did you mean t5-small or t5-base or t5-large\?"),
        (" ", r"no model is named; give a folder"),
    ],
)
def test_unknown_models_ask_for_a_configuration(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_model(word)


def test_what_is_no_name_is_refused_in_one_line() -> None:
    for text in ("x" * 3000, "a\0b"):
        with pytest.raises(ValueError, match=f"{len(text):,} characters are no name or path") as caught:
            find_model(text)
        assert len(str(caught.value)) < 300


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, message in [("{", "not JSON"), ("[]", "got list, expected a JSON object"), ("{}", "has no model_type")]:
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{path}.*{message}"):
            find_model(path)
    with pytest.raises(ValueError, match=r"no config\.json in this folder"):
        (tmp_path / "empty").mkdir()
        find_model(tmp_path / "empty")
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ValueError, match=r"weights\.bin: not a config\.json"):
        find_model(tmp_path / "weights.bin")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("opt-1.3b", "text_generation"),
        ("opt-1.3b", "text-generation"),
        ("t5-small", "text2text"),
        ("t5-small", "text_generation"),
        ("bert-base-uncased", "embedding"),
        ("vit-base", "vision"),
        ("whisper-tiny", "audio"),
    ],
)
def test_families_that_fit(name: str, word: str) -> None:
    assert family_note(find_model(name), word) == []


def test_families_that_do_not() -> None:
    (note,) = family_note(find_model("bert-base-uncased"), "text_generation")
    assert note == "bert-base-uncased is a model of the family embedding, not of text_generation; its own counts"
    assert "family audio" in family_note(find_model("whisper-tiny"), "text_generation")[0]
    with pytest.raises(ValueError, match="'bananas' is not known; use one of: text_generation, text2text"):
        family_note(find_model("opt-1.3b"), "bananas")
    assert planned_family_of(find_model("t5-small")) == "text2text"


def test_the_catalog_imports_no_torch() -> None:
    code = (
        "import sys; from engine.planner.catalog import find_model; find_model('gpt2'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
