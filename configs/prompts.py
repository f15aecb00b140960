"""Prompts files: one JSON object a line, with `prompt` (text) and perhaps `variant` (a name to select by).

    texts = read_prompts(Path("prompts.jsonl"), variant="short", limit=20)

Read by the orchestrator, to check and count, and by the ranks, to run. Blank lines are passed over.
"""

import json
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    """One prompt and the line of the file that it stands in, counted from 1."""

    line: int
    text: str


def read_prompts(path: Path, variant: str | None = None, limit: int | None = None) -> list[str]:
    """The texts of the selected prompts. Raises as `numbered_prompts`."""
    return [prompt.text for prompt in numbered_prompts(path, variant, limit)]


def numbered_prompts(path: Path, variant: str | None = None, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts whose variant is `variant` (None: all), in the file's order.

    Raises ValueError naming the file, and the line where one is at fault: a file that cannot be read or
    is empty, a line that is no JSON object with a `prompt`, a variant that no line has. Every line is checked.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    selected: list[Prompt] = []
    variants: set[str] = set()
    # Not splitlines(): it also splits at characters that JSON allows inside a string.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        text, name = _parse(line, f"{path}, line {number}")
        if name is not None:
            variants.add(name)
        if variant is None or name == variant:
            selected.append(Prompt(number, text))
    if not selected and variant is not None and data.strip():
        known = f"use one of: {', '.join(sorted(variants))}" if variants else "its lines name none"
        raise ValueError(f"{path}: no line has the variant {variant!r}; {known}")
    if not selected:
        raise ValueError(f'{path}: is empty; write one object a line, such as {{"prompt": "Once upon a time"}}')
    return selected[:limit]


def _parse(line: bytes, where: str) -> tuple[str, str | None]:
    try:
        data = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f'{where}: holds {type(data).__name__}; write an object, such as {{"prompt": "..."}}')
    prompt, variant = data.get("prompt"), data.get("variant")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where}: `prompt` must be a text that is not empty, not {prompt!r}")
    if variant is not None and not isinstance(variant, str):
        raise ValueError(f"{where}: `variant` must be a text, not {variant!r}")
    return prompt, variant
