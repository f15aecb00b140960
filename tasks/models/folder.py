"""Validate and hash a folder of model files, in plain Python without torch.

Only safetensors are weights here: a pickled checkpoint can run any code when it is opened.

    config, names = check_folder(Path("models/tiny"))
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

from configs.common.base import sha256_of_file, write_atomically
from configs.common.files.reading import MIB, brief, check_regular, open_regular, read_json, read_json_object
from configs.common.files.safetensors_header import StoredTensor, header_tensors
from configs.common.printable import printable
from configs.families.config import ModelConfig
from configs.families.numbers import MAX_LAYERS, check_finite
from configs.families.tensors import embedding_name, head_names, names_in_file
from configs.plans.model_manifest import ADAPTER, POOLING, WEIGHT_INDEX, is_adapter

CONFIG = "config.json"
SINGLE = "model.safetensors"
PICKLED = "pytorch_model.bin"

_TOKENIZER_ENDINGS = (".model", ".tiktoken", ".jinja")
_TOKENIZER_NAMES = ("vocab.txt", "merges.txt")
_PICKLED_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_OF_TRAINERS = ("training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")
_COMPARED_BYTES = 1 << 20
_CONFIG_BYTES = 32 * MIB
"""Of configurations and shard indexes; that of a model with 140,000 tensors has 17 MB."""
_DESCRIPTION_BYTES = 512 * MIB
"""Of a tokenizer's files, which are hashed whole; that of a model with 256,000 tokens has 33 MB."""
_MAX_NAMES = 5


class ModelContentError(ValueError):
    """A model's files cannot be measured, whatever the study says of it."""


@contextmanager
def content_faults() -> Iterator[None]:
    """Mark errors as faults of the model's files."""
    try:
        yield
    except ValueError as error:
        raise ModelContentError(str(error)) from error


class FileHashes:
    """SHA-256 of files, kept by path, size and modification time, so that a big folder is read once.

    It only saves time: a stored file that cannot be read counts as empty, one that cannot be written stays as it is.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._known: dict[str, list[Any]] = {}
        self._changed = False
        try:
            known = read_json(store)
        except (OSError, ValueError):
            return
        if isinstance(known, dict):
            self._known = {path: entry for path, entry in known.items() if isinstance(entry, list) and len(entry) == 3}

    def unread_bytes(self, paths: Iterable[Path]) -> int:
        """What of these files has to be read for their hashes. Raises OSError."""
        return sum(path.stat().st_size for path in paths if not self._is_known(path))

    def _is_known(self, path: Path) -> bool:
        status = path.stat()
        return self._known.get(str(path), [None, None])[:2] == [status.st_size, status.st_mtime_ns]

    def sha256(self, path: Path) -> str:
        """Hash of the file as it is now. Raises OSError."""
        status = path.stat()
        digest = self._known.get(str(path), [0, 0, ""])[2]
        if not self._is_known(path):
            digest = sha256_of_file(path)
            self._known[str(path)] = [status.st_size, status.st_mtime_ns, digest]
            self._changed = True
        return str(digest)

    def save(self) -> None:
        """Keep what was learned. Of two processes that save at once, one has to hash again later."""
        if self._changed:
            with suppress(OSError):  # a cache of others, which is whole
                write_atomically(self._store, json.dumps(self._known, indent=0, sort_keys=True))
            self._changed = False


def file_names(folder: Path) -> list[str]:
    """Names of the files directly in the folder, and how it pools; what else lies deeper belongs to other formats.

    Raises ValueError for a model's file that is a pipe, a device or a broken link, or is beyond a tokenizer's size.
    """
    names = sorted(entry.name for entry in folder.iterdir() if not entry.is_dir())
    names += [POOLING] if os.path.lexists(folder / POOLING) else []
    for name in described_by(names):
        _check_readable(folder / name, _DESCRIPTION_BYTES)
    for name in names:
        if name.endswith(".safetensors"):
            _check_readable(folder / name, None)
    return [name for name in names if (folder / name).is_file()]


def _check_readable(path: Path, max_bytes: int | None) -> None:
    try:
        check_regular(path, max_bytes)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


def described_by(names: Iterable[str]) -> list[str]:
    """Which of the names describe the model: configuration, tokenizer, and how an encoder pools."""
    return sorted(
        name
        for name in names
        if name == POOLING
        or (
            "/" not in name
            and "\\" not in name
            and not name.startswith(".")
            and (name.endswith((".json", *_TOKENIZER_ENDINGS)) or name in _TOKENIZER_NAMES)
        )
    )


def weights_in(names: Iterable[str], index: dict[str, Any] | None, where: str) -> list[str]:
    """Which of the names are the weights: one file, the shards that the index names, or every safetensors file.

    Other copies beside them (consolidated.safetensors) are left out. Raises ValueError for missing shards.
    """
    found = {name for name in _safetensors(names) if "\\" not in name}
    if SINGLE in found:
        return [SINGLE]
    if index is None:
        return sorted(found)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{where}/{WEIGHT_INDEX}: no weight_map of tensor names to file names. Fetch or save it again")
    missing = sorted(set(weight_map.values()) - found)
    if missing:
        raise ValueError(f"{where}: {WEIGHT_INDEX} lists missing files: {some(missing)}. Fetch or copy them")
    return sorted(set(weight_map.values()))


def pickled_in(names: Iterable[str]) -> list[str]:
    """Which of the names are the pickled weights of a repository without safetensors, which can be converted.

    Shards beside a whole file are the same weights once more.
    """
    names = list(names)
    if _safetensors(names):
        return []
    if PICKLED in names:
        return [PICKLED]
    return sorted(name for name in names if _PICKLED_WEIGHTS.fullmatch(name))


def require_safetensors(names: Iterable[str], where: str, folder: str) -> None:
    """Refuse a model without safetensors weights; `folder` is what to convert. Raises ValueError."""
    names = list(names)
    if _safetensors(names):
        return
    pickled = sorted(name for name in names if _is_pickled(name))
    if pickled:
        raise ValueError(
            f"{where}: pickled weights ({pickled[0]}) are not loaded, because a pickle can execute arbitrary code; "
            f"only *.safetensors are supported. Convert them: rankwise convert {quote(str(folder))} DESTINATION"
        )
    refuse_adapter(names, where)
    raise ValueError(f"{where}: no weights (*.safetensors). Use a folder or repository with weights")


def refuse_adapter(names: Iterable[str], where: str) -> None:
    """Raise ValueError for an adapter (LoRA) that is given as a model. names: its files."""
    if any(name == ADAPTER or is_adapter(name) for name in names):
        raise ValueError(
            f"{where}: an adapter (LoRA), which is no model alone. Merge it into the model that {ADAPTER} names (PEFT: "
            "merge_and_unload), and use the folder that is saved then"
        )


def _safetensors(names: Iterable[str]) -> list[str]:
    """Return the names of safetensors files that may be a model's; those of an adapter beside it are not."""
    return [name for name in names if name.endswith(".safetensors") and "/" not in name and not is_adapter(name)]


def _is_pickled(name: str) -> bool:
    """Return whether a file may be a model's pickled weights, and not what a trainer keeps beside them."""
    kept = name.startswith(_OF_TRAINERS) or is_adapter(name)
    return name.endswith(_PICKLED_ENDINGS) and "/" not in name and not kept


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """The model's config.json. Raises ValueError: absent, not JSON, or in need of code from elsewhere."""
    if not os.path.lexists(folder / CONFIG):
        refuse_adapter((name for name in (ADAPTER,) if os.path.lexists(folder / name)), where)
        raise ValueError(f"{where}: no {CONFIG}. A model folder contains {CONFIG} and *.safetensors")
    config = _json_object(folder / CONFIG)
    check_finite(config, f"{where}/{CONFIG}")
    _check_code(config, where)
    for key, value in config.items():
        if key.endswith(("layer", "layers")) and isinstance(value, int | float) and value > MAX_LAYERS:
            raise ValueError(
                f"{where}/{CONFIG}: {brief(key)[1:-1]}: got {brief(value)}, expected at most {MAX_LAYERS:,}"
            )
    return config


def _check_code(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a model that only Python code from its folder can make.

    Phi-3, Falcon, MPT and DeepSeek still name such code in `auto_map`; transformers prefers its own class, as we do.
    """
    if "auto_map" not in config:
        return
    from engine.planner.families import READERS

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise ValueError(
            f"{where}/{CONFIG}: auto_map requires Python code of the model, which is never run (trust_remote_code is "
            f"off and cannot be enabled), and model_type {brief(kind)} is not one that is known without it. Use "
            "another model"
        )


def read_index(folder: Path) -> dict[str, Any] | None:
    """The shard index, or None where the model is not sharded. Raises ValueError."""
    return _json_object(folder / WEIGHT_INDEX) if (folder / WEIGHT_INDEX).is_file() else None


def check_folder(folder: Path, where: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Check a model folder whole, hashes aside.

    Returns its configuration, with the head that is in the files, and the names of the files that
    make the model. Raises ValueError.
    """
    where = where or str(folder)
    config = read_config(folder, where)
    names = file_names(folder)
    require_safetensors(names, where, str(folder))
    index = read_index(folder)
    weights = weights_in(names, index, where)
    tensors = {name: header_tensors(folder / name) for name in weights}
    if index is not None and weights != [SINGLE]:
        for tensor, name in index["weight_map"].items():
            if tensor not in tensors[name]:
                raise ValueError(
                    f"{where}: {WEIGHT_INDEX} says {printable(tensor, 100)} is in {name}, "
                    "which has none; fetch both again"
                )
    stored = {name: tensor for held in tensors.values() for name, tensor in held.items()}
    if not stored:
        raise ValueError(f"{where}: no tensors in {some(weights) or WEIGHT_INDEX}. Save or fetch the model again")
    return with_stored_head(config, stored), sorted({*described_by(names), *weights})


def with_stored_head(config: dict[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the configuration that says what transformers computes: a head in the files that differs from the
    embedding is not tied to it, whatever config.json says.

    So the planner counts it, and every engine computes it. An equal copy is tied, as stated.
    """
    try:
        parsed = ModelConfig.parse(config)
    except ValueError:  # judged where a cell needs our engine (`tasks.models.judgement`)
        return config
    heads = [stored[name] for name in sorted(head_names(parsed) & stored.keys())]
    table = names_in_file(parsed, stored).get(embedding_name(parsed))
    if not parsed.tied or not heads or table is None or _same_values(heads[0], stored[table]):
        return config
    scaled = {"scale_decoder_outputs": parsed.head_scale != 1.0} if parsed.kind == "encoder_decoder" else {}
    return config | {"tie_word_embeddings": False} | scaled


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    if one == other:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open_regular(one.file) as first, open_regular(other.file) as second:
        first.seek(one.offset)
        second.seek(other.offset)
        left = one.nbytes
        while left:
            size = min(left, _COMPARED_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(names) - _MAX_NAMES
    return ", ".join(printable(name, 100) for name in names[:_MAX_NAMES]) + (f" and {rest:,} more" if rest > 0 else "")


def similar_folder(identifier: str, base: Path) -> str:
    """The end of an error: which folder beside the one that is not there was perhaps meant."""
    path = base / identifier
    written = identifier.rstrip("/")
    if not path.parent.is_dir() or not written.endswith(path.name):
        return ""
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f" (did you mean {written.removesuffix(path.name)}{close[0]}?)" if close else ""


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, _CONFIG_BYTES, finite=False)  # `check_finite` names the key
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}. Fetch or copy it again") from error
    except ValueError as error:
        raise ValueError(f"{error}; fetch or copy it again") from error
