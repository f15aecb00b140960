"""The pure parts of `make bench-planner-links`: its studies, the orders of layouts, its verdicts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.links import LINKS, ONE_NODE, Row, orders_of, places, study_of, tables
from configs.spec.study import load_study
from configs.targets.target import SlurmTarget

ROWS = [
    Row("two nodes, 1gbit", 1, "1 rank", predicted=11.0, measured=10.0, low=9.0, high=11.0, others=0.02),
    Row("two nodes, 1gbit", 1, "tp=2", predicted=6.3, measured=6.0, low=5.9, high=6.1, others=0.01),
    Row("two nodes, 1gbit", 1, "pp=2", predicted=9.8, measured=9.9, low=9.0, high=11.0, others=0.03),
]


@pytest.mark.parametrize("place", places(LINKS))
def test_every_place_is_a_study_of_one_rank_and_of_both_splits(place: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps(study_of(place, "synthetic:llama-110m@0")))
    (target,) = load_study(path).targets
    assert isinstance(target, SlurmTarget)
    assert target.nodes * target.ranks_per_node == 2
    assert target.partition == (
        "lab" if place == ONE_NODE or place.endswith("none") else f"link-{place.split(', ')[1]}"
    )


def test_orders_are_judged_where_they_are_clear() -> None:
    orders = {order.layouts: order for order in orders_of(ROWS)}
    assert orders["1 rank", "tp=2"].clear
    assert orders["1 rank", "tp=2"].right
    assert not orders["1 rank", "pp=2"].clear


def test_bars_are_held() -> None:
    text, wrong = tables(ROWS)
    assert wrong == []
    assert "| two nodes, 1gbit | 1 | tp=2 | 6.0 (5.9 to 6.1) | 6.3 | +5% | 1% |" in text
    assert "3 cells: median error 5.0%, worst 10.0%." in text
    assert "Other processes" not in text


def test_a_wrong_order_and_a_large_error_are_told() -> None:
    _, wrong = tables([ROWS[0], replace(ROWS[1], predicted=20.0), ROWS[2]])
    assert wrong == [
        "two nodes, 1gbit, batch 1: of 1 rank and tp=2 the slower was foreseen as the faster",
        "two nodes, 1gbit, batch 1: of tp=2 and pp=2 the slower was foreseen as the faster",
    ]
    _, wrong = tables([replace(row, predicted=2 * row.measured) for row in ROWS])
    assert wrong == ["the median error is 100.0%, above 15%"]


def test_a_busy_machine_is_told() -> None:
    text, _ = tables([replace(row, others=0.9) for row in ROWS])
    assert "Other processes took 90% of the CPU: these figures say nothing of the planner." in text
