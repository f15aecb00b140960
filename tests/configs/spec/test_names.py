"""Names that users give are bounded when a study is read: tables, plots and file names show them."""

from typing import Any

import pytest

from configs.spec.study import ModelSpec, StudyError, parse_study

STRONG = {"kind": "strong", "grow": "tp", "to": 2}


def study(name: str = "tp", **fields: Any) -> dict[str, Any]:
    work = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4, "num_prompts": 4, "batch_size": 2}
    models = [{"id": "synthetic:llama-1m@0"}]
    return {"study": "s", "models": models, "workload": work, "experiments": {name: STRONG}, **fields}


@pytest.mark.parametrize("name", ["a/b", "..", "模型 é", "A", "x" * 100])
def test_any_line_of_text_is_a_name(name: str) -> None:
    assert list(parse_study(study(name)).experiments) == [name]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (study("x" * 300), "got a name of 300 characters, expected at most 100"),
        (study(" "), "got an empty name"),
        (study("a\u202eb"), "got a name with control characters"),
        (study(models=[{"id": "synthetic:llama-1m@0", "name": "n" * 101}]), "models[0].name: got a name of 101"),
        (study(targets=[{"kind": "local", "name": "t" * 101}]), "targets[0].name: got a name of 101 characters"),
    ],
)
def test_a_name_that_cannot_be_shown_is_refused(data: dict[str, Any], told: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study(data)
    assert len(caught.value.problems) == 1 and told in caught.value.problems[0]


def test_a_model_is_named_after_its_last_folder_whatever_is_in_those_above() -> None:
    """In /home/me@corp.com all models were called `me`, and two of them were refused."""
    ids = ["/home/me@corp.com/a", "/home/me@corp.com/b/", "../c", "owner/d", "synthetic:llama-4m@0", "./e@2", "./@f"]
    assert [ModelSpec(id=each).name for each in ids] == ["a", "b", "c", "d", "llama-4m", "e", "@f"]
