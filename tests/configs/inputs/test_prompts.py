"""Prompts files: what is read, and the one message that each mistake gets."""

from pathlib import Path

import pytest

from configs.inputs.prompts import numbered_prompts, read_prompts

GOOD = '{"prompt": "one", "variant": "a"}\n\n{"prompt": "two\\u2028lines", "variant": "b"}\n{"prompt": "three"}\n'


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_selects_by_variant_and_limit(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert read_prompts(path, None, None) == ["one", "two\u2028lines", "three"]
    assert read_prompts(path, None, 2) == ["one", "two\u2028lines"]
    assert read_prompts(path, "b", 5) == ["two\u2028lines"]


def test_token_ids_need_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, '{"tokens": [5, 0, 17], "variant": "a"}\n{"prompt": "one"}\n')
    assert [prompt.tokens for prompt in numbered_prompts(path)] == [(5, 0, 17), None]
    assert read_prompts(path, "a") == ["5 0 17"]


def test_line_numbers_count_blank_lines_and_raw_separators(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "with \u2028 inside"}\n' + GOOD)
    assert [prompt.line for prompt in numbered_prompts(path)] == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty file"),
        ("\n \n", "empty file"),
        ('{"prompt": "x"}\nnot json\n', "line 2: not JSON"),
        ('{"prompt": "x"}\n["x"]\n', "line 2: got list"),
        ('{"text": "x"}\n', "line 1: `prompt`: expected a non-empty string"),
        ('{"prompt": ""}\n', "line 1: `prompt`: expected a non-empty string"),
        ('{"prompt": 5}\n', "line 1: `prompt`: expected a non-empty string"),
        ('{"prompt": "x", "variant": 1}\n', "line 1: `variant`: expected a string"),
        ('{"tokens": []}\n', "line 1: `tokens`: expected a non-empty list of token ids, got []"),
        ('{"tokens": [1, true]}\n', "`tokens`: expected a non-empty list of token ids, got [1, True]"),
        ('{"tokens": [-1]}\n', "`tokens`: expected a non-empty list of token ids, got [-1]"),
        ('{"tokens": [1], "prompt": "x"}\n', "`tokens`: cannot be combined with `prompt`"),
        (b'{"prompt": "x"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8"),
    ],
)
def test_a_mistake_names_file_and_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=r"prompts\.jsonl") as raised:
        read_prompts(path)
    assert message in str(raised.value)


def test_an_unknown_variant_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown variant 'c'; use one of: a, b"):
        read_prompts(write(tmp_path, GOOD), "c")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.jsonl: No such file"):
        read_prompts(tmp_path / "absent.jsonl")
