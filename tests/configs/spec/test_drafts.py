"""Overrides of a draft: the order of a study's keys decides nothing, and no value is lost to another of its field."""

from typing import Any

import pytest

from configs.spec.drafts import Draft, override


def overridden(*overrides: tuple[str, Any]) -> tuple[Draft, list[str]]:
    draft: Draft = {
        "workload": {"kind": "script", "environment": {"OLD": "0"}, "params": {"depth": 2}},
        "layout": {},
        "env": {},
    }
    return draft, override(draft, dict(overrides))


@pytest.mark.parametrize("prefix", ["", "workload."])
def test_a_whole_mapping_is_set_before_its_entries(prefix: str) -> None:
    whole, entry = ("environment", {"B": "2"}), (f"{prefix}environment.A", "1")
    for given in ((whole, entry), (entry, whole)):
        draft, problems = overridden(*given)
        assert (draft["workload"]["environment"], problems) == ({"B": "2", "A": "1"}, [])


@pytest.mark.parametrize("prefix", ["", "workload."])
def test_an_entry_of_a_mapping_is_named_once(prefix: str) -> None:
    whole, entry = ("params", {"lr": 2, "depth": 3}), (f"{prefix}params.lr", 1)
    for given in ((whole, entry), (entry, whole)):
        assert overridden(*given)[1] == [f"{prefix}params.lr: the same field as params. Name it once"]
    draft, problems = overridden(whole, (f"{prefix}params.width", 1))
    assert (draft["workload"]["params"], problems) == ({"lr": 2, "depth": 3, "width": 1}, [])
