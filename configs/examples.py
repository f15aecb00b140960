"""Files of examples to learn from: one JSON object a line, with `text`, `text` and `label`, or `source` and `target`.

    rows = read_examples(Path("examples.jsonl"))

Read by the orchestrator, to check a study's data before anything is started, and by the ranks, to train. Blank lines
are passed over. Which columns a task needs is checked where the task is known, on the ranks.
"""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_examples(path: Path) -> list[Row]:
    """All rows, in the file's order. Raises ValueError naming file and line for what is no row."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    rows: list[Row] = []
    # Not splitlines(): it also splits at characters that JSON allows inside a string.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            rows.append(_parsed(line, f"{path}, line {number}"))
    if not rows:
        raise ValueError(f'{path}: is empty; write one object a line, such as {{"text": "fine", "label": "good"}}')
    return rows


def _parsed(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: holds {type(row).__name__}; write an object, such as {{"text": "..."}}')
    if not ("text" in row or {"source", "target"} <= row.keys()):
        raise ValueError(f"{where}: has neither `text` nor `source` and `target`")
    return row
