"""Targets: prompts and training examples, line by line."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from configs.inputs.examples import read_examples
from configs.inputs.prompts import read_prompts

_FOLDER = Path(tempfile.mkdtemp(prefix="rankwise-fuzz-prompts-"))


def targets() -> dict[str, Callable[[bytes], object]]:
    """Readers of JSON Lines."""
    return {
        "prompts.prompts": lambda data: read_prompts(_written(data), "short", 3),
        "prompts.examples": lambda data: read_examples(_written(data)),
    }


def seeds() -> dict[str, tuple[bytes, ...]]:
    """A line of each kind."""
    return {
        "prompts.prompts": (
            b'{"prompt": "Once", "variant": "short"}\n{"prompt": "upon", "variant": "long"}\n',
            b'{"prompt": "a"}',
        ),
        "prompts.examples": (b'{"text": "fine", "label": "good"}\n{"source": "a", "target": "b"}\n', b'{"text": "a"}'),
    }


def _written(data: bytes) -> Path:
    path = _FOLDER / "lines.jsonl"
    path.write_bytes(data)
    return path
