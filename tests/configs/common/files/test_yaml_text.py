"""YAML of others: plain data, or one bounded line that names the place."""

import time

import pytest

from configs.common.files.yaml_text import MAX_YAML_CHARACTERS, YamlError, parse_yaml, yaml_text

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)

BAD = {
    "nested": ("a: " + "[" * 3000 + "]" * 3000, "line 1, column 53: nested deeper than 50 levels"),
    "nested mappings": ("".join(f"{' ' * level}a:\n" for level in range(60)), "nested deeper than 50 levels"),
    "alias bomb": (BOMB, "more than 50,000 values, counting what aliases stand for"),
    "merge bomb": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9)),
        "more than 50,000 values",
    ),
    "many values": ("a: [" + "1, " * 60_000 + "1]", "more than 50,000 values"),
    "long": ("a" * (MAX_YAML_CHARACTERS + 1), "1,000,001 characters of YAML"),
    "alias in its anchor": ("a: &a [*a]", "alias 'a' is inside its own anchor"),
    "key twice": ("a: 1\na: 2", "line 2, column 1: duplicate key 'a'"),
    "merge twice": ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "duplicate key '<<'"),
    "complex key": ("? [1]\n: 2", "line 1, column 3: this key is not text"),
    "number as key": ("1: 2", "key '1' is not text. Write keys as text, in quotes where needed"),
    "truth value as key": ("no: 2", "key 'no' is not text"),
    "tag int": ("a: !!int x", "line 1, column 4: 'x' is not a valid int"),
    "tag int without digits": ("a: !!int ''", "'' is not a valid int"),
    "tag bool": ("a: !!bool x", "'x' is not a valid bool"),
    "tag timestamp": ("a: !!timestamp x", "'x' is not a valid timestamp"),
    "day that is none": ("a: 2024-99-99", "'2024-99-99' is not a valid timestamp"),
    "thousands of digits": ("a: " + "9" * 5000, "is not a valid int"),
    "tens of digits": ("a: " + "9" * 30, "number too large, expected at most 18 digits"),
    "tag of Python": ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    "long tag": ("!" + "a" * 100_000 + " x", "could not determine a constructor"),
    "control character": ("a: \x07", "special characters are not allowed"),
    "two documents": ("a\n---\nb", "expected a single document in the stream, but found another document"),
    "tab": ("a:\n\tb: 1", "line 2, column 1: found a tab. Indent with spaces"),
    "octal": ("a: 010", "line 1, column 4: 010 means 8 in YAML (octal). Write a decimal number, or a text in quotes"),
    "base 60": ("a: [1:30:00]", "1:30:00 means 5400 in YAML (base 60). Write a decimal number, or a text in quotes"),
    "fraction in base 60": ("a: 1:30.5", "1:30.5 means 90.5 in YAML (base 60)"),
    "value tag": ("=: 3", "could not determine a constructor"),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_what_is_no_plain_data_is_refused_in_one_bounded_line(text: str, told: str) -> None:
    began = time.process_time()
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    said = str(caught.value)
    assert told in said
    assert len(said) < 400 and said.isprintable()
    assert time.process_time() - began < 10, "bounded, even on a slow machine"


def test_merge_keys_bring_fields_that_a_mapping_may_set_anew() -> None:
    text = "base: &base {dtype: bfloat16, batch_size: 4}\na: {<<: *base, batch_size: 8}\nb: {<<: [*base, {c: 1}]}"
    found = parse_yaml(text)
    assert found["a"] == {"dtype": "bfloat16", "batch_size": 8}
    assert found["b"] == {"dtype": "bfloat16", "batch_size": 4, "c": 1}


def test_an_alias_is_a_value_apart_from_its_anchor() -> None:
    found = parse_yaml("a: &a {x: [1]}\nb: *a")
    found["b"]["x"].append(2)
    assert found == {"a": {"x": [1]}, "b": {"x": [1, 2]}}


def test_plain_data_pass_unchanged() -> None:
    text = "a: [1, 2.5, yes, null, text, '007', 1e-3, 0, 0.5, '1:30', 08, 10.0.0.1:22]\nb: {c: {d: 0x10}}\n"
    values = [1, 2.5, True, None, "text", "007", "1e-3", 0, 0.5, "1:30", "08", "10.0.0.1:22"]
    assert parse_yaml(text) == {"a": values, "b": {"c": {"d": 16}}}
    assert parse_yaml("") is None
    assert parse_yaml("a: " + "[" * 49 + "]" * 49)["a"]


@pytest.mark.parametrize(
    "text",
    ["y", "N", "yes", "off", "null", "~", "1e3", "1.5E-7", "08", "010", "0o17", "0x1F", "1_000", "1:30", "2026-11-28"],
)
def test_texts_are_texts_to_all_readers(text: str) -> None:
    """Kubernetes and Compose read `--name 1e3` and `--name 08` as numbers, and refuse them where a text belongs."""
    from ruamel.yaml import YAML

    written = yaml_text({text: [text, "plain"], "number": 1e-05, "count": 8, "on": True})
    expected = {text: [text, "plain"], "number": 1e-05, "count": 8, "on": True}
    assert YAML(typ="safe", pure=True).load(written) == expected  # YAML 1.2
    assert parse_yaml(written) == expected and "- plain" in written
    assert f"- '{text}'" in written or f'- "{text}"' in written  # Go's reader takes y and 08 for more than 1.2 does
