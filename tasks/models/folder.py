"""Validate and hash a folder of model files, in plain Python without torch.

Only safetensors are weights here: a pickled checkpoint can run any code when it is opened. Headers are read
from the files' first bytes, so that a truncated download is found in milliseconds and not by a rank:

    config = check_folder(Path("models/tiny"))

Layout of a safetensors file: https://huggingface.co/docs/safetensors/index#format
"""

import difflib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.common.base import sha256_of_file, write_atomically
from configs.plans.record import read_json_object

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_TOKENIZER_ENDINGS = (".model", ".tiktoken", ".jinja")
_TOKENIZER_NAMES = ("vocab.txt", "merges.txt")
_PICKLED_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# The reference implementation refuses longer headers too (MAX_HEADER_SIZE in safetensors/src/tensor.rs).
_LONGEST_HEADER_BYTES = 100_000_000
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class FileHashes:
    """SHA-256 of files, kept by path, size and modification time, so that a big folder is read once.

    A stored file that cannot be read counts as empty: it only saves time.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._known: dict[str, list[Any]] = {}
        self._changed = False
        try:
            known = json.loads(store.read_bytes())
        except (OSError, ValueError):
            return
        if isinstance(known, dict):
            self._known = {path: entry for path, entry in known.items() if isinstance(entry, list) and len(entry) == 3}

    def sha256(self, path: Path) -> str:
        """Hash of the file as it is now. Raises OSError."""
        status = path.stat()
        size, modified, digest = self._known.get(str(path), (None, None, ""))
        if (size, modified) != (status.st_size, status.st_mtime_ns):
            digest = sha256_of_file(path)
            self._known[str(path)] = [status.st_size, status.st_mtime_ns, digest]
            self._changed = True
        return str(digest)

    def save(self) -> None:
        """Keep what was learned. Of two processes that save at once, one has to hash again later."""
        if self._changed:
            write_atomically(self._store, json.dumps(self._known, indent=0, sort_keys=True))
            self._changed = False


def file_names(folder: Path) -> list[str]:
    """Names of the files directly in the folder; what lies deeper belongs to other formats."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_file())


def described_by(names: Iterable[str]) -> list[str]:
    """Which of the names describe the model: configuration and tokenizer."""
    return sorted(
        name
        for name in names
        if "/" not in name
        and "\\" not in name
        and not name.startswith(".")
        and (name.endswith((".json", *_TOKENIZER_ENDINGS)) or name in _TOKENIZER_NAMES)
    )


def weights_in(names: Iterable[str], index: dict[str, Any] | None, where: str) -> list[str]:
    """Which of the names are the weights: one file, the shards that the index names, or every safetensors file.

    Other copies beside them (consolidated.safetensors) are left out. Raises ValueError for missing shards.
    """
    found = {name for name in names if name.endswith(".safetensors") and "/" not in name and "\\" not in name}
    if SINGLE in found:
        return [SINGLE]
    if index is None:
        return sorted(found)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{where}/{INDEX}: no weight_map of tensor names to file names. Fetch or save it again")
    missing = sorted(set(weight_map.values()) - found)
    if missing:
        raise ValueError(f"{where}: {INDEX} lists missing files: {', '.join(missing)}. Fetch or copy them")
    return sorted(set(weight_map.values()))


def require_safetensors(names: Iterable[str], where: str, folder: str) -> None:
    """Refuse a model without safetensors weights; `folder` is what to convert. Raises ValueError."""
    names = list(names)
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        return
    pickled = sorted(name for name in names if name.endswith(_PICKLED_ENDINGS) and "/" not in name)
    if pickled:
        raise ValueError(
            f"{where}: pickled weights ({pickled[0]}) are not loaded, because a pickle can execute arbitrary code; "
            f"only *.safetensors are supported. Convert them: rankwise convert {folder} DESTINATION"
        )
    raise ValueError(f"{where}: no weights (*.safetensors). Use a folder or repository with weights")


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """The model's config.json. Raises ValueError: absent, not JSON, or in need of code from elsewhere."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{where}: no {CONFIG}. A model folder contains {CONFIG} and *.safetensors")
    config = _json_object(folder / CONFIG)
    if "auto_map" in config:
        raise ValueError(
            f"{where}/{CONFIG}: auto_map requires Python code of the model, but trust_remote_code is off "
            "and cannot be enabled. Use a model with an architecture built into transformers"
        )
    return config


def read_index(folder: Path) -> dict[str, Any] | None:
    """The shard index, or None where the model is not sharded. Raises ValueError."""
    return _json_object(folder / INDEX) if (folder / INDEX).is_file() else None


def check_folder(folder: Path, where: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Check a model folder whole, hashes aside.

    Returns its configuration and the names of the files that make the model. Raises ValueError.
    """
    where = where or str(folder)
    config = read_config(folder, where)
    names = file_names(folder)
    require_safetensors(names, where, str(folder))
    index = read_index(folder)
    weights = weights_in(names, index, where)
    tensors = {name: check_safetensors(folder / name) for name in weights}
    if index is not None and weights != [SINGLE]:
        for tensor, name in index["weight_map"].items():
            if tensor not in tensors[name]:
                raise ValueError(f"{where}: {INDEX} says {tensor} is in {name}, which has none; fetch both again")
    return config, sorted({*described_by(names), *weights})


def check_safetensors(path: Path) -> set[str]:
    """Check a file's header against its size; returns the names of its tensors. Raises ValueError, OSError."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length < 2 or length > _LONGEST_HEADER_BYTES:
            raise _damaged(path, f"its {actual} bytes do not begin with a safetensors header")
        if 8 + length > actual:
            raise _damaged(path, f"expected at least {8 + length} bytes (the header alone), found {actual}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        position = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tuple(tensor["data_offsets"])):
            begin, end = map(int, tensor["data_offsets"])
            if begin != position or end < begin or _tensor_bytes(tensor) not in (None, end - begin):
                raise ValueError(f"the data at byte {position} are not accounted for")
            position = end
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"its header is not one of safetensors ({error})") from error
    if 8 + length + position != actual:
        raise _damaged(path, f"expected {8 + length + position} bytes by its header, found {actual}")
    return set(tensors)


def similar_folder(identifier: str, base: Path) -> str:
    """The end of an error: which folder beside the one that is not there was perhaps meant."""
    path = base / identifier
    written = identifier.rstrip("/")
    if not path.parent.is_dir() or not written.endswith(path.name):
        return ""
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f" (did you mean {written.removesuffix(path.name)}{close[0]}?)" if close else ""


def _tensor_bytes(tensor: dict[str, Any]) -> int | None:
    bits = _DTYPE_BITS.get(tensor["dtype"])
    # A dtype newer than this table.
    return None if bits is None else math.prod(map(int, tensor["shape"])) * bits // 8


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: truncated or damaged: {what}; fetch or copy it again")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ValueError(f"{error}; fetch or copy it again") from error
