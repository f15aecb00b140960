"""Resolve a model name, a folder or a config.json to its `Architecture`. Nothing is downloaded.

    find_model("llama-2-7b")                        # or meta-llama/Llama-2-7b-hf, case-insensitive
    find_model("models/mine")                       # a folder with a config.json, or the file
    find_model("synthetic:llama-40m@0")             # a size of `configs.hardware.architectures`
    find_model("owner/name", cache=Path("cache"))   # also models fetched by earlier runs

Figures come from `configs/catalog/models.json`, which holds the relevant keys of each config.json and their source.
"""

import difflib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configs
from configs.common.base import expanded
from configs.common.files.reading import PLAN_BYTES, brief, read_json, read_json_object
from configs.common.printable import printable
from configs.hardware.architectures import ARCHITECTURES
from engine.planner.architecture import Architecture
from engine.planner.families import read_architecture

CATALOG = Path(configs.__file__).parent / "catalog" / "models.json"
_MAX_NAME = 1000
_ASK = "give a folder with its config.json, or the file (`rankwise plan --list-models` shows the names)"

# The words of a plan's `model_family`, and which kinds of model each may mean. The first that fits is the usual one.
_FAMILIES: dict[str, frozenset[str]] = {
    "text_generation": frozenset({"decoder", "encoder_decoder"}),
    "text2text": frozenset({"encoder_decoder"}),
    "embedding": frozenset({"encoder"}),
    "vision": frozenset({"vision"}),
    "audio": frozenset({"audio"}),
}
_SYNONYMS = {
    "causal_lm": "text_generation",
    "text2text_generation": "text2text",
    "seq2seq": "text2text",
    "text_embedding": "embedding",
    "image_classification": "vision",
    "speech": "audio",
    "automatic_speech_recognition": "audio",
}


@dataclass(frozen=True)
class KnownModel:
    """A row of the catalog. `repository` is its name on the Hugging Face hub, or its publisher's.

    source: reference for the figures; as_of: date of entry.
    """

    name: str
    repository: str
    source: str
    as_of: str
    config: dict[str, Any]
    aliases: tuple[str, ...] = ()

    @property
    def architecture(self) -> Architecture:
        """Build the architecture; uncached (`find_model` caches)."""
        return read_architecture(self.config, self.name)


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """Return the catalog's models in order."""
    rows = read_json(CATALOG)
    return tuple(KnownModel(**{**row, "aliases": tuple(row.get("aliases", ()))}) for row in rows)


def model_names() -> list[str]:
    """Return the short names of the catalog's models in order."""
    return [model.name for model in known_models()]


def find_model(name_or_path: str | Path, cache: Path | None = None) -> Architecture:
    """Return the architecture for a name or path.

    A folder with a config.json takes precedence over a name. cache: folder with `models/*/manifest.json` of earlier
    runs; these take precedence over the catalog. Raises ValueError listing valid inputs.
    """
    text = str(name_or_path).strip()
    if not text:
        raise ValueError(f"no model is named; {_ASK}")
    if len(text) > _MAX_NAME or "\0" in text:
        raise ValueError(f"model {brief(text)}: {len(text):,} characters are no name or path; {_ASK}")
    path = expanded(text)
    if path.is_dir() and (path / "config.json").is_file():
        return _from_file(path / "config.json")
    if path.is_file() and path.suffix == ".json":
        return _from_file(path)
    if text.startswith("synthetic:"):
        return _synthetic(text)
    cached = _from_cache(text, cache) if cache is not None else None
    found = cached or _by_word(text.partition("@")[0].lower())
    if found is None:
        raise ValueError(_unknown(text, path))
    return found


def repository_of(name: str) -> str | None:
    """Return the Hugging Face repository whose weights a name of the catalog stands for; None for other names.

    A repository among a model's aliases that is called so comes before the model's own: `deepseek-r1` is
    deepseek-ai/DeepSeek-R1, which has DeepSeek-V3's shape.
    """
    word = name.lower()
    model = _words().get(word)
    if model is None or "/" in name:
        return None
    named = [alias for alias in model.aliases if alias.lower().rpartition("/")[::2] != ("", word) and "/" in alias]
    return next((alias for alias in named if alias.lower().rpartition("/")[2] == word), model.repository)


def planned_family_of(architecture: Architecture) -> str:
    """Return the model's family: text_generation, text2text, embedding, vision or audio."""
    if architecture.kind == "encoder_decoder":
        return "audio" if architecture.model_type == "whisper" else "text2text"
    return {"decoder": "text_generation", "encoder": "embedding", "vision": "vision"}[architecture.kind]


def family_note(architecture: Architecture, word: str) -> list[str]:
    """Return a remark if the plan's `model_family` does not match the model, else an empty list.

    Raises ValueError listing the valid families.
    """
    plain = word.lower().replace("-", "_")
    plain = _SYNONYMS.get(plain, plain)
    if plain not in _FAMILIES:
        raise ValueError(f"model_family: {brief(word)} is not known; use one of: {', '.join(_FAMILIES)}")
    family = planned_family_of(architecture)
    kind = "audio" if family == "audio" else architecture.kind
    if kind in _FAMILIES[plain]:
        return []
    return [f"{architecture.name} is a model of the family {family}, not of {plain}; its own counts"]


@functools.cache
def _words() -> dict[str, KnownModel]:
    """Map every accepted name to a model; names take precedence over aliases."""
    words: dict[str, KnownModel] = {}
    for model in known_models():
        words.setdefault(model.name.lower(), model)
    for model in known_models():
        for word in (model.repository, *model.aliases):
            words.setdefault(word.lower(), model)
    for model in known_models():  # the last part of a repository's name, if it is unique
        words.setdefault(model.repository.rpartition("/")[2].lower(), model)
    return words


@functools.cache
def _by_word(word: str) -> Architecture | None:
    if word in ARCHITECTURES:
        return read_architecture(ARCHITECTURES[word], word)
    model = _words().get(word)
    return model.architecture if model else None


def _synthetic(text: str) -> Architecture:
    known = ARCHITECTURES
    name = text.removeprefix("synthetic:").partition("@")[0]
    if name not in known:
        where = printable(text, 100)
        raise ValueError(f"{where}: no architecture is called {brief(name)}; use one of: {', '.join(known)}")
    return read_architecture(known[name], name)


def _from_file(path: Path) -> Architecture:
    try:
        config = read_json_object(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    try:
        return read_architecture(config, path.resolve().parent.name if path.name == "config.json" else path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_cache(text: str, cache: Path) -> Architecture | None:
    """Find a model fetched by a run: by identity (`owner/name@commit`) or by repository."""
    for path in sorted(expanded(cache).glob("models/*/manifest.json")):
        try:
            manifest = read_json(path, PLAN_BYTES)
            identity, config = str(manifest["identity"]), dict(manifest["config"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: fetched again when the weights are needed
        if text.lower() in (identity.lower(), identity.rpartition("@")[0].lower()):
            return read_architecture(config, text)
    return None


def _unknown(text: str, path: Path) -> str:
    if path.is_dir():
        return f"{text}: no config.json in this folder; the planner reads nothing else of a model"
    if path.suffix == ".json":
        return f"{text}: no such file; {_ASK}"
    if path.is_file():
        return f"{text}: not a config.json; {_ASK}"
    word = text.lower()
    longer = [name for name in model_names() if name.startswith(f"{word}-")]
    close = longer[:3] or difflib.get_close_matches(word, list(_words()), n=3)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return f"model {brief(text)} is not in the catalog{hint}; {_ASK}"
