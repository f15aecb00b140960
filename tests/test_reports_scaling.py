"""Speed-up, efficiency, paired gains, and the sentences about them, from rates that are known."""

from pathlib import Path

import pytest

from configs.cell import Cell, Layout, NoopWorkload
from configs.job import Measuring
from configs.plan import Plan, PlannedExperiment, Point
from configs.rates import Rates
from configs.record import Record, Status
from reports.comparison import optimization, optimization_sentence, paired_ratio, sweep, sweep_sentence
from reports.load import CellResult, Reading, StudyResult
from reports.plots.sweep import sweep_axes
from reports.scaling import scaling, scaling_sentence, scaling_table


def reading(cell: Cell, repeat: int, speed: float | None) -> Reading:
    status = Status.COMPLETED if speed is not None else Status.TIMEOUT
    record = Record(
        key=cell.key, cell=cell, repeat=repeat, attempt=1, status=status, job="j", position=0,
        started_at=None, finished_at=None,
    )  # fmt: skip
    rates = Rates(wall_seconds=1.0, passes=1, items_per_second=speed) if speed is not None else None
    return Reading(record, f"records/{cell.key}/r{repeat}-a1.json", True, rates)


def study_of(speeds: dict[str, tuple[int, list[float | None]]], kind: str) -> tuple[StudyResult, PlannedExperiment]:
    """Cells by label: (ranks, items/s of each repeat); the first is the baseline."""
    cells = {label: Cell(workload=NoopWorkload(label=label), layout=Layout(dp=n)) for label, (n, _) in speeds.items()}
    results = {}
    for label, (_, values) in speeds.items():
        cell = cells[label]
        visits = {repeat: reading(cell, repeat, value) for repeat, value in enumerate(values)}
        results[cell.key] = CellResult(cell.key, cell, label, "no model", len(values), visits, None)
    experiment = PlannedExperiment.model_validate(
        {
            "name": kind,
            "kind": kind,
            "model": None,
            "points": [
                Point(cell=cell.key, values={"ranks": cell.layout.ranks}, label=label, baseline=position == 0)
                for position, (label, cell) in enumerate(cells.items())
            ],
        }
    )
    plan = Plan(
        study="s", models=(), targets=(), measuring=Measuring(), pack=True, experiments=(experiment,),
        cells={cell.key: cell for cell in cells.values()}, repeats={},
    )  # fmt: skip
    return StudyResult(Path(), plan, results, (), {}), experiment


def test_speedup_and_efficiency_against_the_baseline() -> None:
    result = scaling(*study_of({"a": (2, [10.0, 11.0, 9.0]), "b": (4, [18.0]), "c": (8, [24.0])}, "strong"))
    assert [point.speedup for point in result.points] == [1.0, 1.8, 2.4]
    assert [point.efficiency for point in result.points] == pytest.approx([1.0, 0.9, 0.6])
    text = scaling_sentence(result)
    assert text == "8 ranks give 2.40 times the throughput of 2 ranks with the total work fixed: 60.0 % of linear."
    assert scaling_table(result).rows[1][:5] == ("4", "1 of 1", "18.0", "1.80", "90.0 %")


def test_where_efficiency_is_first_lost_is_said() -> None:
    result = scaling(*study_of({"a": (1, [10.0]), "b": (2, [15.0]), "c": (4, [16.0])}, "weak"))
    assert scaling_sentence(result).endswith("Efficiency is first below 80 % at 2 ranks.")


def test_ranks_that_slow_it_down_are_said() -> None:
    result = scaling(*study_of({"a": (1, [10.0]), "b": (2, [5.0])}, "strong"))
    assert scaling_sentence(result) == (
        "2 ranks give 0.500 times the throughput of 1 rank with the total work fixed: 25.0 % of linear. "
        "More ranks make it slower."
    )


def test_more_than_linear_is_said_aloud() -> None:
    noisy = scaling(*study_of({"a": (1, [10.0, 12.0]), "b": (2, [22.0, 26.0])}, "strong"))
    assert "At 2 ranks the speed-up is more than linear (109 %); the ranges of the two reach linear" in (
        scaling_sentence(noisy)
    )
    clear = scaling(*study_of({"a": (1, [10.0, 10.1]), "b": (2, [30.0, 30.1])}, "strong"))
    assert "even the slowest repeat against the fastest of the baseline" in scaling_sentence(clear)


def test_points_that_are_missing() -> None:
    no_base = scaling(*study_of({"a": (1, [None]), "b": (2, [20.0])}, "strong"))
    assert [point.speedup for point in no_base.points] == [None, None]
    assert scaling_sentence(no_base) == "The baseline, 1 rank, has no figure (timeout), so no speed-up is given."
    alone = scaling(*study_of({"a": (1, [10.0]), "b": (2, [None])}, "strong"))
    assert scaling_sentence(alone).startswith("Only the baseline, 1 rank, has a figure")
    assert scaling_table(alone).rows[1] == ("2", "0 of 1", "–", "–", "–", "timeout")


def test_gains_are_paired_by_repeat() -> None:
    """The machine is twice as slow in the second block, for both: the pairs still agree."""
    study, experiment = study_of({"baseline": (1, [10.0, 5.0, 10.0]), "v": (1, [15.0, 7.5, None])}, "optimization")
    base, gains = optimization(study, experiment)
    assert gains[0].throughput_by_repeat == {0: 1.5, 1: 1.5}
    assert optimization_sentence(base, gains) == (
        "v gives 1.50 times the baseline's throughput (1.50 to 1.50, range of 2 pairs)."
    )
    assert paired_ratio({0: 1.0, 2: 4.0}, {1: 1.0, 2: 2.0}) == {2: 2.0}


def test_pairs_that_disagree_and_variants_that_failed() -> None:
    speeds = {"baseline": (1, [10.0, 10.0]), "v": (1, [9.0, 11.0]), "w": (1, [None, None])}
    text = optimization_sentence(*optimization(*study_of(speeds, "optimization")))
    assert "its pairs disagree on which is faster" in text and "w has no figure (timeout)" in text
    lost = study_of({"baseline": (1, [None]), "v": (1, [1.0])}, "optimization")
    assert optimization_sentence(*optimization(*lost)) == "The baseline has no figure (timeout), so no gain is given."


def test_a_sweep_names_its_best_point_and_what_is_lost() -> None:
    points = sweep(*study_of({"x 1": (1, [10.0]), "x 2": (1, [25.0]), "x 4": (1, [None])}, "sweep"))
    assert sweep_sentence(points) == (
        "Throughput is highest at x 2: 25.0 items/s, 2.50 times that of x 1. "
        "Without a figure, drawn as a cross: x 4 (timeout)."
    )
    assert sweep_sentence(points[2:]) == "No point of this sweep has a figure."


def test_the_field_of_most_values_is_the_axis() -> None:
    (point,) = sweep(*study_of({"p": (1, [1.0])}, "sweep"))
    values = [{"dtype": kind, "workload.items": n} for kind in ("float32", "bfloat16") for n in (1, 2)]
    points = [type(point)(point.label, value, point.result) for value in values]
    assert sweep_axes(points) == ("workload.items", {"dtype float32": [0, 1], "dtype bfloat16": [2, 3]})
