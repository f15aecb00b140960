"""Speed-up, efficiency, paired gains, and the sentences about them, from rates that are known."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from configs.common.execution import Layout
from configs.plans.plan import CellPoint, Plan, PlannedExperiment
from configs.records.rates import Rates
from configs.records.record import Record, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from reports.charts.experiments import scaling_charts
from reports.experiments.comparison import optimization, optimization_sentence, sweep, sweep_sentence
from reports.experiments.scaling import scaling, scaling_law_lines, scaling_sentence, scaling_table
from reports.numbers.statistics import Ratio, pair_ratios
from reports.plots.experiments.scaling import draw_scaling
from reports.plots.experiments.sweep import sweep_axes
from reports.plots.style import axis_positions, drawn
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading


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
    cells = {
        label: Cell(workload=NoopWorkload(label=label, items=n if kind == "weak" else 1), layout=Layout(dp=n))
        for label, (n, _) in speeds.items()
    }
    results = {}
    for label, (_, values) in speeds.items():
        cell = cells[label]
        measurements = {repeat: reading(cell, repeat, value) for repeat, value in enumerate(values)}
        results[cell.key] = CellResult(cell.key, cell, label, "no model", len(values), measurements, None)
    experiment = PlannedExperiment.model_validate(
        {
            "name": kind,
            "kind": kind,
            "model": None,
            "points": [
                CellPoint(cell=cell.key, values={"ranks": cell.layout.ranks}, label=label, baseline=position == 0)
                for position, (label, cell) in enumerate(cells.items())
            ],
        }
    )
    plan = Plan(
        study="s", models=(), targets=(), measuring=Measuring(), pack=True, experiments=(experiment,),
        cells={cell.key: cell for cell in cells.values()}, repeats={},
    )  # fmt: skip
    return StudyResult(Path(), plan, results, (), {}), experiment


def values(ratios: list[Ratio | None]) -> list[float | None]:
    return [None if ratio is None else ratio.value for ratio in ratios]


def test_speedup_and_efficiency_against_the_baseline() -> None:
    result = scaling(*study_of({"a": (2, [10.0, 11.0, 9.0]), "b": (4, [18.0]), "c": (8, [24.0])}, "strong"))
    assert values([point.speedup for point in result.points]) == [1.0, 1.8, 2.4]
    assert values([point.efficiency for point in result.points]) == pytest.approx([1.0, 0.9, 0.6])
    text = scaling_sentence(result)
    assert text == (
        "8 ranks give 2.40 times (1 pair) the throughput of 2 ranks with the total work fixed: 60.0 % of linear."
    )
    assert scaling_table(result).rows[1][:5] == ("4", "1 of 1", "18.0", "1.80", "90.0 %")


def test_speedups_are_paired_by_repeat_and_corrected() -> None:
    """Every second block is half as fast, for all cells: pairs do not see it."""
    slow = [1.0, 0.5] * 5
    speeds = {name: (n, [10 * n**0.9 * block for block in slow]) for name, n in (("a", 1), ("b", 2), ("c", 4))}
    result = scaling(*study_of(speeds, "strong"))
    last = result.points[-1]
    assert last.speedup is not None and last.efficiency is not None and last.speedup.comparisons == 2
    assert last.speedup.interval == pytest.approx((4**0.9, 4**0.9))
    assert last.efficiency.interval == pytest.approx((4**-0.1, 4**-0.1))
    assert scaling_table(result).rows[2][3:5] == ("3.48 (3.48 to 3.48)", "87.1 % (87.1 to 87.1)")
    assert scaling_table(result).rows[0][3:5] == ("1", "100 %")


def test_few_repeats_give_a_range_in_brackets() -> None:
    result = scaling(*study_of({"a": (1, [10.0, 10.0]), "b": (2, [18.0, 19.0])}, "strong"))
    assert scaling_table(result).rows[1][3:5] == ("1.85 [1.80 to 1.90]", "92.5 % [90.0 to 95.0]")
    assert "range of 2 pairs" in scaling_sentence(result)


def test_where_efficiency_is_first_lost_is_said() -> None:
    result = scaling(*study_of({"a": (1, [10.0]), "b": (2, [15.0]), "c": (4, [16.0])}, "weak"))
    assert scaling_sentence(result).endswith("Efficiency is first below 80 % at 2 ranks.")


def test_ranks_that_slow_it_down_are_said() -> None:
    result = scaling(*study_of({"a": (1, [10.0]), "b": (2, [5.0])}, "strong"))
    assert scaling_sentence(result) == (
        "2 ranks give 0.500 times (1 pair) the throughput of 1 rank with the total work fixed: 25.0 % of linear. "
        "More ranks make it slower."
    )


def test_more_than_linear_is_said_aloud() -> None:
    """The interval decides; without one it may be noise."""
    few = scaling(*study_of({"a": (1, [10.0, 12.0]), "b": (2, [22.0, 26.0])}, "strong"))
    assert "The speed-up is more than linear at 2 (109 % of it, range 108 to 110) ranks; without an interval" in (
        scaling_sentence(few)
    )
    base = [10.0, 10.1, 10.2, 9.9, 10.0, 10.1, 10.0, 9.8]
    clear = scaling(*study_of({"a": (1, base), "b": (2, [3 * value for value in base])}, "strong"))
    assert "ranks: the likely cause is capacity" in scaling_sentence(clear)
    unsure = [2.02 * value for value in reversed(base)]
    assert "which may be noise" in scaling_sentence(scaling(*study_of({"a": (1, base), "b": (2, unsure)}, "strong")))
    weak = scaling(*study_of({"a": (1, base), "b": (2, [3 * value for value in base])}, "weak"))
    assert "caches do not explain it" in scaling_sentence(weak)


def test_so_many_repeats_give_an_interval_as_are_said_to() -> None:
    """Six give one of a single speed-up; two of them in one table take seven."""
    base = [10.0, 10.1, 10.2, 9.9, 10.0, 10.1, 9.8]

    def sentence(repeats: int) -> str:
        speeds = {
            name: (ranks, [1.1 * ranks * value for value in base[:repeats]]) for name, ranks in (("b", 2), ("c", 4))
        }
        return scaling_sentence(scaling(*study_of({"a": (1, base[:repeats]), **speeds}, "strong")))

    assert "without an interval (7 or more repeats give one)" in sentence(6)
    assert "without an interval" not in sentence(7)


def test_points_that_are_missing() -> None:
    no_base = scaling(*study_of({"a": (1, [None]), "b": (2, [20.0])}, "strong"))
    assert [point.speedup for point in no_base.points] == [None, None]
    assert scaling_sentence(no_base) == "The baseline, 1 rank, has no figure (timeout), so no speed-up is given."
    assert scaling_law_lines(no_base) == []
    alone = scaling(*study_of({"a": (1, [10.0]), "b": (2, [None])}, "strong"))
    assert scaling_sentence(alone).startswith("Only the baseline, 1 rank, has a figure")
    assert scaling_table(alone).rows[1] == ("2", "0 of 1", "–", "–", "–", "timeout")
    apart = scaling(*study_of({"a": (1, [10.0, None]), "b": (2, [None, 20.0])}, "strong"))
    assert apart.points[1].speedup is None and apart.points[1].throughput is not None
    idle = scaling(*study_of({"a": (1, [0.0, 0.0]), "b": (2, [20.0, 21.0])}, "strong"))
    for result in (apart, idle):
        assert scaling_sentence(result).startswith(
            "No block has a throughput above 0 of both the baseline, 1 rank, and"
        )
    for result in (no_base, alone, apart, idle):
        assert drawn(partial(draw_scaling, result=result))["png"]


def test_a_baseline_that_is_not_the_smallest() -> None:
    """Speed-ups are against the baseline; the laws are in units of the fewest ranks."""
    speeds = {"base": (4, [36.0]), "small": (1, [10.0]), "middle": (2, [19.0]), "large": (8, [64.0])}
    result = scaling(*study_of(speeds, "strong"))
    assert values([point.speedup for point in result.points]) == pytest.approx([10 / 36, 19 / 36, 1, 64 / 36])
    assert result.laws.unit_ranks == 1 and "amdahl" in result.laws.fits
    assert "slower" not in scaling_sentence(result)
    del speeds["large"]
    below = scaling_sentence(scaling(*study_of({**speeds, "small": (1, [18.0]), "middle": (2, [19.0])}, "strong")))
    assert "2 ranks give 0.528 times" in below and "more than linear" not in below
    one = scaling_sentence(scaling(*study_of({"base": (2, [19.0]), "small": (1, [10.0])}, "strong")))
    assert one.startswith("1 rank gives 0.526 times (1 pair) the throughput of 2 ranks")


def test_laws_are_listed_or_refused() -> None:
    speeds = {str(n): (n, [10.0 * n / (1 + 0.1 * (n - 1))] * 3) for n in (1, 2, 4)}
    lines = scaling_law_lines(scaling(*study_of(speeds, "strong")))
    assert lines[0].startswith("Amdahl: lambda 10.0 items/s (10.0 to 10.0), serial fraction f 0.100")
    assert any(line.startswith("Universal Scalability Law: not fitted; it fits 3") for line in lines)
    assert not any(line.startswith("Gustafson") for line in lines), "that it is for weak scaling is no news"
    weak = scaling_law_lines(scaling(*study_of(speeds, "weak")))
    assert weak[0].startswith("Gustafson: lambda") and not any(line.startswith("Amdahl") for line in weak)


def test_the_law_of_a_chart_ends_where_measuring_did() -> None:
    """On the page it went on over the ranks that ran out of memory, with its band; in the figure it does not."""
    speeds: dict[str, tuple[int, list[float | None]]] = {
        str(n): (n, [10.0 * n / (1 + 0.1 * (n - 1))] * 3) for n in (1, 2, 4)
    }
    throughput, _ = scaling_charts(scaling(*study_of({**speeds, "8": (8, [None]), "64": (64, [None])}, "strong")))
    ideal, law = throughput.series[1:]
    assert (ideal.name, [point.x for point in ideal.points]) == ("ideal: linear", [1, 2, 4, 8, 64])
    assert [point.x for point in law.points] == [x for x, _, _ in law.band] == [1, 2, 4]
    assert [x for x, _ in throughput.lost] == [8, 64]


def test_what_else_changed_is_marked() -> None:
    study, experiment = study_of({"a": (1, [10.0]), "b": (2, [19.0]), "c": (4, [30.0])}, "strong")
    keys = [point.cell for point in experiment.points]
    cell = study.cells[keys[2]].cell
    other = cell.model_copy(update={"nodes": 2, "dtype": "bfloat16", "env": {"NCCL_ALGO": "Ring"}})
    study.cells[keys[2]] = dataclasses.replace(study.cells[keys[2]], cell=other)
    result = scaling(study, experiment)
    changed = ("dtype bfloat16 instead of float32", "NCCL_ALGO Ring instead of None", "nodes 2 instead of 1")
    assert [point.changed for point in result.points] == [(), (), changed]
    assert "also changed" in scaling_table(result).columns
    assert "Not only the ranks changed: 4 ranks (dtype bfloat16" in scaling_sentence(result)
    assert drawn(partial(draw_scaling, result=result))["svg"]


def test_growing_work_is_no_change_in_weak_scaling() -> None:
    study, experiment = study_of({"a": (1, [10.0]), "b": (2, [19.0]), "c": (4, [30.0])}, "weak")
    for point in experiment.points:
        result = study.cells[point.cell]
        items = 8 * result.cell.layout.ranks + (result.cell.layout.ranks == 4)
        work = result.cell.workload.model_copy(update={"items": items})
        study.cells[point.cell] = dataclasses.replace(result, cell=result.cell.model_copy(update={"workload": work}))
    points = scaling(study, experiment).points
    assert [point.changed for point in points] == [(), (), ("items 33 instead of 32",)]


def test_a_batch_that_cannot_be_filled_counts_as_a_change() -> None:
    study, experiment = study_of({"a": (1, [10.0]), "b": (2, [19.0]), "c": (4, [30.0])}, "strong")
    for point in experiment.points:
        result = study.cells[point.cell]
        work = GenerateWorkload(num_prompts=16, batch_size=8)
        study.cells[point.cell] = dataclasses.replace(result, cell=result.cell.model_copy(update={"workload": work}))
    points = scaling(study, experiment).points
    assert [point.changed for point in points] == [(), (), ("batch_size 4 instead of 8",)]


def test_another_machine_is_a_change() -> None:
    study, experiment = study_of({"a": (1, [10.0]), "b": (2, [19.0])}, "strong")
    for position, point in enumerate(experiment.points):
        (measurement,) = study.cells[point.cell].measurements.values()
        study.cells[point.cell].measurements[0] = dataclasses.replace(
            measurement, record=measurement.record.model_copy(update={"environment": f"e{position}"})
        )
        study.environments[f"e{position}"] = {"hostname": f"host{position}", "threads": position, "torch": "2"}
    assert scaling(study, experiment).points[1].changed == ("environment: hostname",)


def test_gains_are_paired_by_repeat() -> None:
    """The machine is twice as slow in the second block, for both: the pairs still agree."""
    study, experiment = study_of({"baseline": (1, [10.0, 5.0, 10.0]), "v": (1, [15.0, 7.5, None])}, "optimization")
    base, gains = optimization(study, experiment)
    assert gains[0].throughput_by_repeat == {0: 1.5, 1: 1.5}
    assert optimization_sentence(base, gains) == (
        "v gives 1.50 times (1.50 to 1.50, range of 2 pairs) the baseline's throughput."
    )
    assert pair_ratios({0: 1.0, 2: 4.0}, {1: 1.0, 2: 2.0}) == {2: 2.0}


def test_pairs_that_disagree_and_variants_that_failed() -> None:
    speeds = {"baseline": (1, [10.0, 10.0]), "v": (1, [9.0, 11.0]), "w": (1, [None, None])}
    text = optimization_sentence(*optimization(*study_of(speeds, "optimization")))
    assert "Its pairs disagree on which is faster." in text and "w has no figure (timeout)" in text
    lost = study_of({"baseline": (1, [None]), "v": (1, [1.0])}, "optimization")
    assert optimization_sentence(*optimization(*lost)) == "The baseline has no figure (timeout), so no gain is given."


def test_a_variant_that_shares_no_block_or_does_no_work_has_figures_all_the_same() -> None:
    for values in ([None, 10.0], [0.0, 0.0]):
        found = optimization(*study_of({"baseline": (1, [10.0, None]), "v": (1, [*values])}, "optimization"))
        assert optimization_sentence(*found) == "No block has a throughput above 0 of both v and the baseline."


def test_of_many_variants_the_best_and_the_worst_are_told() -> None:
    speeds = {"baseline": (1, [10.0, 10.0]), "a": (1, [9.0, 11.0]), "b": (1, [20.0, 20.0]), "c": (1, [5.0, 5.0])}
    assert optimization_sentence(*optimization(*study_of(speeds, "optimization"))) == (
        "b gives 2.00 times (2.00 to 2.00, range of 2 pairs) the baseline's throughput; a 0.995 times (0.900 to 1.10, "
        "range of 2 pairs) and c 0.500 times (0.500 to 0.500, range of 2 pairs). Pairs with the baseline disagree on "
        "which is faster: a."
    )
    text = optimization_sentence(*optimization(*study_of(speeds | {"d": (1, [8.0, 8.0])}, "optimization")))
    assert text.startswith("b gives 2.00 times (2.00 to 2.00, range of 2 pairs) the baseline's throughput, the most; c")
    assert "range of 2 pairs), the least." in text


def test_a_sweep_names_its_best_point_and_what_is_lost() -> None:
    points = sweep(*study_of({"x 1": (1, [10.0]), "x 2": (1, [25.0]), "x 4": (1, [None])}, "sweep"))
    assert sweep_sentence(points) == (
        "Throughput is highest at x 2: 25.0 items/s, 2.50 times (1 pair) that of x 1. "
        "Without a figure, drawn as a cross: x 4 (timeout)."
    )
    assert sweep_sentence(points[2:]) == "No point of this sweep has a figure."
    idle = sweep(*study_of({"x 0": (1, [0.0]), "x 1": (1, [25.0])}, "sweep"))
    assert sweep_sentence(idle) == "Throughput is highest at x 1: 25.0 items/s; at x 0 it is 0."
    assert sweep_sentence(idle[:1]) == "Throughput is highest at x 0: 0 items/s."


def test_a_peak_that_is_the_same_everywhere_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    points = sweep(*study_of({"x 1": (1, [10.0]), "x 2": (1, [25.0])}, "sweep"))
    monkeypatch.setattr(CellResult, "peak_bytes", property(lambda result: 100 * 2**20 + len(result.cell.key)))
    assert sweep_sentence(points).endswith(" Peak memory is 100 MiB everywhere.")


def test_the_best_median_of_a_sweep_may_lose_in_the_common_blocks() -> None:
    points = sweep(*study_of({"x 1": (1, [30.0, 30.0, 9.0]), "x 2": (1, [None, None, 10.0])}, "sweep"))
    assert sweep_sentence(points) == (
        "Throughput is highest at x 1: 30.0 items/s, not told apart from x 2; in the blocks that both have it is 0.900 "
        "times (1 pair) that of x 2."
    )


def test_the_best_point_of_a_sweep_names_those_that_are_as_good() -> None:
    """A reader changed a setting for what the next run's noise took back."""
    speeds = {"x 1": [10.0, 10.0], "x 2": [20.0, 20.6], "x 4": [20.1, 20.2], "x 8": [20.3, 20.1]}
    points = sweep(*study_of({label: (1, [*values]) for label, values in speeds.items()}, "sweep"))
    assert sweep_sentence(points) == (
        "Throughput is highest at x 2: 20.3 items/s, not told apart from x 4 and x 8; it is 2.03 times (2.00 to 2.06, "
        "range of 2 pairs) that of x 1."
    )
    many = {"baseline": (1, [10.0, 10.0]), **{label: (1, [*values]) for label, values in speeds.items()}}
    text = optimization_sentence(*optimization(*study_of(many, "optimization")))
    assert "the baseline's throughput, the most, not told apart from x 8 and x 4; x 1 1.00 times" in text


def test_the_field_of_most_values_is_the_axis() -> None:
    (point,) = sweep(*study_of({"p": (1, [1.0])}, "sweep"))
    values = [{"dtype": kind, "workload.items": n} for kind in ("float32", "bfloat16") for n in (1, 2)]
    points = [type(point)(point.label, value, point.result) for value in values]
    assert sweep_axes(points) == ("workload.items", {"dtype float32": [0, 1], "dtype bfloat16": [2, 3]})


def test_numbers_that_yaml_takes_for_text_lie_on_a_scale() -> None:
    """YAML 1.1 reads 1e-3 as text; names and versions stay names."""
    assert axis_positions(["1e-4", 0.001, "3E-3", ".5e+1"]) == ([0.0001, 0.001, 0.003, 5.0], None)
    for names in (["a1e3", "b"], ["1e-4", "best"], ["1e999", "1e-1"], [True, 1]):
        assert axis_positions(names) == ([0.0, 1.0], [str(name).replace("True", "true") for name in names])


@pytest.mark.parametrize("base", [[None] * 3, [0.0] * 3])
def test_the_page_has_the_law_without_a_baseline_and_no_ideal_line_at_zero(base: list[float | None]) -> None:
    """As the figure: a baseline that failed, or did no work, leaves the other points and their law."""
    others: dict[str, tuple[int, list[float | None]]] = {
        f"c{n}": (n, [100.0 * n / (1 + 0.05 * (n - 1))] * 3) for n in (2, 4, 8, 16)
    }
    speed, _ = scaling_charts(scaling(*study_of({"c1": (1, base), **others}, "strong")))
    assert [series.name for series in speed.series] == ["measured", "Amdahl"]
