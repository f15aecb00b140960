"""Prompts files: one JSON object per line with `prompt` (text) and optionally `variant` (a name for selection).

    texts = read_prompts(Path("prompts.jsonl"), variant="short", limit=20)

The orchestrator reads them to validate and count, the ranks read them to run. Blank lines are skipped.
"""

from pathlib import Path
from typing import NamedTuple

from configs.common.jsonl import parse_object


class Prompt(NamedTuple):
    """One prompt and its line number in the file, from 1."""

    line: int
    text: str


def read_prompts(path: Path, variant: str | None = None, limit: int | None = None) -> list[str]:
    """Return the texts of the selected prompts. Raises as `numbered_prompts`."""
    return [prompt.text for prompt in numbered_prompts(path, variant, limit)]


def numbered_prompts(path: Path, variant: str | None = None, limit: int | None = None) -> list[Prompt]:
    """Return the first `limit` prompts with this `variant` (None: all), in the file's order.

    Raises ValueError naming the file, and the line if one is invalid: an unreadable or empty file, a line that
    is not a JSON object with a `prompt`, or an unknown variant. Every line is checked.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
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
        known = f"use one of: {', '.join(sorted(variants))}" if variants else "no line has a variant"
        raise ValueError(f"{path}: unknown variant {variant!r}; {known}")
    if not selected:
        raise ValueError(f'{path}: empty file, expected one object per line, such as {{"prompt": "Once upon a time"}}')
    return selected[:limit]


def _parse(line: bytes, where: str) -> tuple[str, str | None]:
    data = parse_object(line, where, '{"prompt": "..."}')
    prompt, variant = data.get("prompt"), data.get("variant")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where}: `prompt`: expected a non-empty string, got {prompt!r}")
    if variant is not None and not isinstance(variant, str):
        raise ValueError(f"{where}: `variant`: expected a string, got {variant!r}")
    return prompt, variant
