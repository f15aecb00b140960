"""Which booleans are found where numbers belong."""

from configs.common.base import Frozen
from configs.common.booleans import boolean_problems


class Part(Frozen):
    count: int = 1
    share: float | None = None
    on: bool | int = False


class Whole(Frozen):
    parts: tuple[Part, ...] = ()
    named: dict[str, Part] = {}
    texts: tuple[str, ...] = ()


def found_in(given: dict[str, object]) -> list[str]:
    return [problem.partition(":")[0] for problem in boolean_problems(given, Whole.model_validate(given))]


def test_each_is_named_by_its_field() -> None:
    given = {"parts": [{"count": 2}, {"count": True, "share": False}], "named": {"a": {"share": True}}}
    assert found_in(given) == ["parts[1].count", "parts[1].share", "named.a.share"]
    told = boolean_problems({"count": True}, Part(count=1))
    assert told == ["count: expected a number, got true: unquoted, yes, no, on and off mean true or false"]


def test_what_is_true_or_false_stays_so() -> None:
    assert found_in({"parts": [{"on": True, "count": 0}, {"on": 2}], "texts": ["yes"]}) == []
