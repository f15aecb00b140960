"""`--set` names the key that cannot be set, and why."""

from typing import Any

import pytest

from configs.spec.assignments import set_dotted

BAD = {
    "no value": ("measuring.repeats", "expected dotted.key=value, such as measuring.repeats=3"),
    "empty name": ("a..b=1", "expected dotted.key=value"),
    "deep": (".".join(["a"] * 3000) + "=1", "expected dotted.key=value"),
    "complex key": ("a={? [1] : 2}", "--set a: value is not valid YAML: line 1, column 4: this key is not text"),
    "nested": ("a=" + "[" * 3000, "--set a: value is not valid YAML: line 1, column 51: nested deeper"),
    "digit that is no number": ("models.²=1", "--set models.²: ² is not an index of a list of 1"),
    "index beyond": ("models.1.id=x", "--set models.1.id: 1 is not an index of a list of 1"),
    "thousands of digits": ("models." + "9" * 5000 + ".id=x", "is not an index of a list of 1"),
    "index of no list": (
        "targets.0.nodes=2",
        "--set targets.0.nodes: the study has no targets, so none to change. Set all: targets=[...]",
    ),
    "field of a number": ("study.name=x", "--set study.name: study is a single value without fields"),
}


def data() -> dict[str, Any]:
    return {"study": "s", "models": [{"id": "a"}]}


@pytest.mark.parametrize(("assignment", "told"), BAD.values(), ids=BAD)
def test_an_assignment_that_cannot_be_is_refused_by_name(assignment: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        set_dotted(data(), assignment)
    assert told in str(caught.value) and len(str(caught.value)) < 400


def test_an_assignment_sets_lists_and_makes_mappings() -> None:
    found = data()
    for one in ("models.0.id=b", "measuring.repeats=3", "experiments.a.over={batch_size: [1, 2]}"):
        set_dotted(found, one)
    assert found["models"] == [{"id": "b"}] and found["measuring"] == {"repeats": 3}
    assert found["experiments"]["a"]["over"] == {"batch_size": [1, 2]}


def test_a_section_without_fields_gets_its_first() -> None:
    """`measuring:` with nothing below it is empty in YAML."""
    found = data() | {"measuring": None}
    set_dotted(found, "measuring.repeats=3")
    assert found["measuring"] == {"repeats": 3}


def test_spaces_around_a_key_are_not_of_it() -> None:
    """`measuring.repeats = 3` in a form was refused: unknown key (did you mean repeats?), use one of: repeats."""
    found = data()
    for one in (" measuring.repeats = 3", "study = other "):
        set_dotted(found, one)
    assert found == data() | {"measuring": {"repeats": 3}, "study": "other"}
