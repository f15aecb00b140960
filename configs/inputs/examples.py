"""Files of training examples: one JSON object per line with `text`, `text` and `label`, or `source` and `target`.

    rows = read_examples(Path("examples.jsonl"))

The orchestrator reads them to validate a study's data before it starts, the ranks read them for training. Blank lines
are skipped. The ranks check the columns, which depend on the task.
"""

from pathlib import Path
from typing import Any

from configs.common.files.jsonl import parse_object
from configs.common.files.reading import TEXT_BYTES, read_bytes

ExampleRow = dict[str, Any]


def read_examples(path: Path) -> list[ExampleRow]:
    """Return all rows in the file's order. Raises ValueError naming file and line of an invalid row."""
    try:
        data = read_bytes(path, TEXT_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    rows: list[ExampleRow] = []
    # Not splitlines(): it also splits at characters that JSON allows inside a string.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            rows.append(_parsed(line, f"{path}, line {number}"))
    if not rows:
        raise ValueError(
            f'{path}: empty file, expected one object per line, such as {{"text": "fine", "label": "good"}}'
        )
    return rows


def _parsed(line: bytes, where: str) -> ExampleRow:
    row = parse_object(line, where, '{"text": "..."}')
    if not ("text" in row or {"source", "target"} <= row.keys()):
        raise ValueError(f"{where}: expected `text`, or `source` and `target`")
    return row
