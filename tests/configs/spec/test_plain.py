"""Plain data of a study, from a file or a form: whatever is beyond bounds is named with its field."""

from typing import Any

import pytest

from configs.spec.plain import plain_problems


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"a": {"b": [1, "x\x1b[31m"]}}, "a.b[1]: contains the control character \\x1b"),
        ({"a": "x\0"}, "a: contains the control character \\x00"),
        ({"a": "\ud800"}, "a: contains the control character \\ud800"),
        ({"a\x07": 1}, "study: key 'a\\x07': contains the control character \\x07"),
        ({"a": "x" * 10_001}, "a: 10,001 characters, expected at most 10,000"),
        ({"a": 10**18}, "a: number too large, expected at most 18 digits"),
        ({"a": -(10**5000)}, "a: number too large, expected at most 18 digits"),
        ({"a": float("nan")}, "a: got nan, expected a finite number"),
        ({"a": float("inf")}, "a: got inf, expected a finite number"),
        ({"a": nested(10_000)}, "more than 50 levels"),
        ({"a": [0] * 60_000}, "more than 50,000 values"),
    ],
    ids=range(11),
)
def test_what_is_beyond_bounds_is_named(data: dict[str, Any], told: str) -> None:
    [problem] = plain_problems(data)
    assert told in problem and len(problem) < 300 and problem.isprintable()


def test_what_a_study_needs_passes() -> None:
    assert plain_problems({"a": [1, -2.5, None, True, "line\n\tline", {"é": "ü 中"}], "b": nested(40)}) == []
