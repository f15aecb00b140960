"""Prompts files: one JSON object per line with `prompt` (text) or `tokens` (token ids), and optionally `variant` (a
name for selection).

    texts = read_prompts(Path("prompts.jsonl"), variant="short", limit=20)

The orchestrator reads them to validate and count, the ranks read them to run. Blank lines are skipped.
"""

from pathlib import Path
from typing import Any, NamedTuple

from configs.common.files.jsonl import parse_object
from configs.common.files.reading import TEXT_BYTES, brief, read_bytes
from configs.common.printable import printable


class PromptLine(NamedTuple):
    """One prompt and its line number in the file, from 1.

    tokens: the line gives token ids, which need no tokenizer; the text is then these numbers.
    """

    line: int
    text: str
    tokens: tuple[int, ...] | None = None


def read_prompts(path: Path, variant: str | None = None, limit: int | None = None) -> list[str]:
    """Return the texts of the selected prompts. Raises as `numbered_prompts`."""
    return [prompt.text for prompt in numbered_prompts(path, variant, limit)]


def numbered_prompts(path: Path, variant: str | None = None, limit: int | None = None) -> list[PromptLine]:
    """Return the first `limit` prompts with this `variant` (None: all), in the file's order.

    Raises ValueError naming the file, and the line if one is invalid: an unreadable or empty file, a line that
    is not a JSON object with a `prompt` or `tokens`, or an unknown variant. Every line is checked.
    """
    try:
        data = read_bytes(path, TEXT_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    selected: list[PromptLine] = []
    variants: set[str] = set()
    # Not splitlines(): it also splits at characters that JSON allows inside a string.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        text, tokens, name = _parse(line, f"{path}, line {number}")
        if name is not None:
            variants.add(name)
        if variant is None or name == variant:
            selected.append(PromptLine(number, text, tokens))
    if not selected and variant is not None and data.strip():
        known = f"use one of: {printable(', '.join(sorted(variants)), 300)}" if variants else "no line has a variant"
        raise ValueError(f"{path}: unknown variant {brief(variant)}; {known}")
    if not selected:
        raise ValueError(f'{path}: empty file, expected one object per line, such as {{"prompt": "Once upon a time"}}')
    return selected[:limit]


def _parse(line: bytes, where: str) -> tuple[str, tuple[int, ...] | None, str | None]:
    data = parse_object(line, where, '{"prompt": "..."}')
    prompt, variant = data.get("prompt"), data.get("variant")
    if variant is not None and not isinstance(variant, str):
        raise ValueError(f"{where}: `variant`: expected a string, got {brief(variant)}")
    if "tokens" in data:
        if prompt is not None:
            raise ValueError(f"{where}: `tokens`: cannot be combined with `prompt`. Leave one out")
        tokens = _token_ids(data["tokens"], where)
        return " ".join(map(str, tokens)), tokens, variant
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where}: `prompt`: expected a non-empty string, got {brief(prompt)}")
    return prompt, None, variant


def _token_ids(given: Any, where: str) -> tuple[int, ...]:
    right = isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)
    if not right or not given:
        raise ValueError(f"{where}: `tokens`: expected a non-empty list of token ids, got {brief(given)}")
    return tuple(given)
