"""The recorded table of measured training memory has the predictions of today's planner."""

import csv
from pathlib import Path

import pytest

from benchmarks.planner.memory import SHAPES, cells, predicted

RECORDED = Path(__file__).parents[2] / "docs" / "measurements"
FIELDS = ("shape", "strategy", "precision", "checkpointing", "accumulation")


@pytest.mark.parametrize(("file", "tp"), [("planner_memory.csv", 1), ("planner_memory_tp.csv", 2)])
def test_predictions_are_the_recorded_ones(file: str, tp: int) -> None:
    with (RECORDED / file).open() as lines:
        recorded = {tuple(row[name] for name in FIELDS): int(row["planner_bytes"]) for row in csv.DictReader(lines)}
    shapes = {name: shape for group in SHAPES.values() for name, shape in group.items()}
    today = {tuple(str(cell[name]) for name in FIELDS): predicted(cell) for cell in cells(shapes, tp)}
    assert today == recorded
