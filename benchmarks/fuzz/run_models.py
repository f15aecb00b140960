"""Targets: config.json, safetensors files and shard indexes, tokenizers, sentence-transformers' files."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.common.files.safetensors_header import header_tensors
from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import WEIGHT_INDEX
from engine.planner.families import read_architecture
from engine.prompts.tokenizer import encoded, load_tokenizer
from tasks.models.folder import CONFIG, check_folder, read_config

_FOLDER = Path(tempfile.mkdtemp(prefix="rankwise-fuzz-models-"))
_ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
_HEADER = {
    "a": _ENTRY,
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    "__metadata__": {"format": "pt"},
}
_MAX_DATA_BYTES = 1 << 20


def targets() -> dict[str, Callable[[bytes], object]]:
    """Readers of a model's files."""
    return {
        "models.config": lambda data: ModelConfig.parse(_read_config(data)).tensor_shapes(),
        "models.planned": lambda data: read_architecture(_read_config(data), "model"),
        "models.file": lambda data: header_tensors(_written(data, "model.safetensors")),
        "models.header": _read_header,
        "models.index": _read_index,
        "models.tokenizer": _read_tokenizer,
    }


def seeds() -> dict[str, tuple[bytes, ...]]:
    """The shipped architectures, small files of each kind."""
    header = json.dumps(_HEADER).encode()
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    small = [json.dumps(config).encode() for name, config in ARCHITECTURES.items() if name.endswith("-1m")]
    return {
        "models.config": tuple(small),
        "models.planned": tuple(small),
        "models.file": (len(header).to_bytes(8, "little") + header + bytes(22),),
        "models.header": (header,),
        "models.index": (json.dumps(index).encode(),),
        "models.tokenizer": (_tokenizer(),),
    }


def _written(data: bytes, name: str) -> Path:
    path = _FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _read_config(data: bytes) -> dict[str, Any]:
    path = _written(data, f"config/{CONFIG}")
    return read_config(path.parent, "model")


def _read_header(data: bytes) -> None:
    """A header with as many bytes of data as its last offset says, so that more than the length is looked at."""
    try:
        tensors = json.loads(data)
        said = max(entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__")
        size = min(int(said), _MAX_DATA_BYTES)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        size = 0
    header_tensors(_written(len(data).to_bytes(8, "little") + data + bytes(max(0, size)), "header.safetensors"))


def _read_index(data: bytes) -> None:
    path = _written(data, f"sharded/{WEIGHT_INDEX}")
    header = json.dumps({"a": _ENTRY}).encode()
    for name in ("a", "b"):
        tensors = header if name == "a" else header.replace(b'"a"', b'"b"')
        _written(len(tensors).to_bytes(8, "little") + tensors + bytes(16), f"sharded/{name}.safetensors")
    _written(b'{"model_type": "llama"}', f"sharded/{CONFIG}")
    check_folder(path.parent)


def _read_tokenizer(data: bytes) -> None:
    encoded(load_tokenizer(_written(data, "tokenizer.json")), "Once upon a time", "line 1")


def _tokenizer() -> bytes:
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True}],
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {"<s>": 0, "once": 1, "upon": 2}, "unk_token": "<s>"},
        }
    ).encode()  # fmt: skip
