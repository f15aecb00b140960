"""Foreign text on a terminal and in file names."""

import re

import pytest

from configs.common.printable import (
    csv_text,
    file_slug,
    plural,
    plural_noun,
    printable,
    printable_lines,
    significant,
    some_of,
    value_text,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("one\ntwo\tthree\r", "one two three "),
        ("a\x9b2Jb\x00\x7f", r"a\x9b2Jb\x00\x7f"),
        ("evil\u202egnp.exe", r"evil\u202egnp.exe"),
        ("\ud800 and \u2028", r"\ud800 and \u2028"),
        ("Größe 模型 👍", "Größe 模型 👍"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_printed_is_bounded() -> None:
    assert len(printable("\x1b" * 10_000_000, 60)) == 60
    assert printable_lines("a\nb\x1b\n" + "c" * 5000, 100).startswith("a\nb\\x1b\nccc")
    assert len(printable_lines("c" * 5000, 100)) == 100


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (1841.3, 3, "1,840"),
        (999.6, 3, "1,000"),
        (999.4, 3, "999"),
        (12.34, 3, "12.3"),
        (0.04266, 3, "0.0427"),
        (12345.0, 2, "12,000"),
        (99.6, 2, "100"),
        (4.0, 2, "4"),
        (0.0, 3, "0"),
        (-2047.9, 3, "-2,050"),
    ],
)
def test_large_values_have_no_exponent(value: float, digits: int, shown: str) -> None:
    """`rankwise doctor` printed 1.84e+03 us and 2.05e+03 MiB, `verify` 1.2e+04 times the noise."""
    assert significant(value, digits) == shown


def test_long_names_have_short_files_of_their_own() -> None:
    names = [f"{'x' * 300}{last}: tiny" for last in "ab"]
    slugs = [file_slug(name) for name in names]
    assert len(set(slugs)) == 2 and all(len(slug) <= 80 for slug in slugs)
    for name in ("../../etc/passwd", "a/b", "..", "模型", "A b", "\x1b[0m", ""):
        assert re.fullmatch(r"[a-z0-9-]+", file_slug(name))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("-1.5e-3", "-1.5e-3"),
        ("+7", "+7"),
        ("plain=1", "plain=1"),
        (-1.5, -1.5),
        (None, None),
    ],
)
def test_text_of_a_csv_file_is_no_formula_and_numbers_stay(value: object, written: object) -> None:
    assert csv_text(value) == written


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "cell", "0 cells"),
        (1, "cell", "1 cell"),
        (1200, "cell", "1,200 cells"),
        (1, "launch", "1 launch"),
        (2, "launch", "2 launches"),
        (3, "pass", "3 passes"),
    ],
)
def test_a_count_of_one_has_the_singular(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


@pytest.mark.parametrize(
    ("unit", "units"),
    [("token", "tokens"), ("batch", "batches"), ("query", "queries"), ("byte", "bytes"), ("pass", "passes"),
     ("samples", "samples"), ("images", "images"), ("tokens", "tokens")],
)  # fmt: skip
def test_units_of_throughput_have_their_plural(unit: str, units: str) -> None:
    """Of studies that rankwise init writes, the report had batchs/s."""
    assert plural_noun(unit) == units


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (8, "8"),
        ("bfloat16", "bfloat16"),
        (["int8", "int4"], "int8 + int4"),
        ({"dp": 2, "strategy": "fsdp"}, "dp=2 strategy=fsdp"),
        (False, "false"),
        (None, "none"),
        ([], "none"),
        ({}, "default"),
        (0, "0"),
    ],
)
def test_values_of_a_study_file_are_shown_in_words(value: object, shown: str) -> None:
    assert value_text(value) == shown


def test_a_long_list_of_names_is_told_by_its_first_ones() -> None:
    assert some_of([]) == "" and some_of(["a", "b"]) == "a, b" and some_of([f"n{i}" for i in range(8)]).endswith("n7")
    assert some_of([f"n{i}" for i in range(1008)]) == "n0, n1, n2, n3, n4, n5, n6, n7 and 1,000 more"
