"""The profile pass in the report: waiting for late ranks, the section, the objective; and a throttled GPU's mark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from configs.plans.paths import RunPaths
from configs.records.record import Record, Status
from configs.spec.cell import Cell
from reports.answer import answer
from reports.decisions.cost import cell_costs
from reports.decisions.decision import decide
from reports.decisions.objectives import judge_objectives
from reports.plots.experiments.profiled import draw_profiled, parts
from reports.plots.style import drawn
from reports.profiles.profiled import late_shares, profiled_cells, profiled_lines, profiled_sentence, profiled_table
from reports.profiles.time_split import time_split, time_split_sentence, time_split_table
from reports.reading.load import load_run
from reports.render import render_report
from tests.support.run_folders.priced_runs import (
    at,
    cell,
    make_plan,
    strong,
    train_cell,
    write_measurements,
    write_record,
    write_run,
)
from tests.support.run_folders.reports import whole_report

GROUP = 7
Told = tuple[str, int, int, float, float]
"""Operation, group, sequence, begin and duration of one collective on one rank."""


def samples_of(*ranks: Sequence[Told]) -> dict[str, Any]:
    """Columns of the collectives of each rank."""
    columns: dict[str, Any] = {}
    for rank, told in enumerate(ranks):
        operations, groups, sequences, begins, seconds = zip(*told, strict=True) if told else ([], [], [], [], [])
        columns |= {
            f"{rank}/collective_operation": np.array(operations, dtype=np.str_),
            f"{rank}/collective_group": np.array(groups, dtype=np.int64),
            f"{rank}/collective_sequence": np.array(sequences, dtype=np.int64),
            f"{rank}/collective_began_seconds": np.array(begins, dtype=np.float64),
            f"{rank}/collective_seconds": np.array(seconds, dtype=np.float64),
        }
    return columns


def sums(*spans: tuple[float, float]) -> list[Told]:
    """All-reduces of one group, by begin and duration."""
    return [("all_reduce", GROUP, place, *span) for place, span in enumerate(spans)]


def test_who_comes_early_waits_for_the_last() -> None:
    samples = samples_of(sums((0, 5), (6, 1)), sums((4, 1), (5, 2)), sums((3, 2), (6, 1)))
    assert late_shares(samples, [10, 10, 10]) == pytest.approx([0.4, 0.1, 0.1])


def test_a_sum_that_takes_long_on_every_rank_is_transfer() -> None:
    assert late_shares(samples_of(sums((0, 5)), sums((0.5, 5))), [10, 10]) == [0, 0]


def test_the_last_to_come_waited_for_nothing_at_all() -> None:
    """Moments and durations that are no sums of powers of two left 5e-16 %."""
    late, early = (0.3, 0.1), (0.1, 0.3)
    assert late_shares(samples_of(sums(late), sums(early)), [0.7, 0.7])[0] == 0


def test_waits_that_overlap_count_once_and_only_within_the_region() -> None:
    # Two sums under way at once: rank 0 waits from 0 to 6 for both, and beyond its wall time of 8 for the third.
    samples = samples_of(sums((0, 5), (1, 6), (7, 9)), sums((4, 1), (6, 1), (15, 1)))
    assert late_shares(samples, [8, 20]) == pytest.approx([(6 + 1) / 8, 0])


def test_only_what_ranks_did_together_is_compared() -> None:
    def waits(one: Told, other: Told) -> list[float]:
        return late_shares(samples_of([one], [other]), [10, 10])

    assert waits(("all_reduce", 7, 0, 0, 5), ("all_reduce", 7, 0, 0, 1)) == pytest.approx([0.4, 0])
    assert waits(("receive", 7, 0, 0, 5), ("send", 7, 0, 0, 1)) == pytest.approx([0.4, 0])
    for other in (("all_reduce", 8, 0, 0, 1), ("all_reduce", 7, 1, 0, 1), ("broadcast", 7, 0, 0, 1)):
        assert waits(("all_reduce", 7, 0, 0, 5), other) == [0, 0]
    assert waits(("send", 0, 0, 0, 5), ("receive", 0, 0, 0, 1)) == [0, 0]  # 0: it is not known with whom
    missing = samples_of(sums((0, 5)), sums((0, 1)))
    del missing["1/collective_seconds"]
    assert late_shares(missing, [10, 10]) == []


@given(some.lists(some.tuples(some.floats(0, 5), some.floats(0, 5), some.floats(0.01, 1)), max_size=5))
def test_the_last_rank_never_waits(places: list[tuple[float, float, float]]) -> None:
    """Ranks that come at `one` and `other` to a collective that then takes `transfer`: nobody waits for the last."""
    ranks: list[list[tuple[float, float]]] = [[], []]
    for number, (one, other, transfer) in enumerate(places):
        end = max(one, other) + transfer
        for rank, came in enumerate((one, other)):
            ranks[rank].append((10.0 * number + came, end - came))
    waited = late_shares(samples_of(*(sums(*spans) for spans in ranks)), [100, 100])
    expected = [sum(max(0.0, other - one) for one, other, _ in places), sum(max(0.0, a - b) for a, b, _ in places)]
    assert waited == pytest.approx([seconds / 100 for seconds in expected], abs=1e-9)


# --- in a run folder ---------------------------------------------------------------------------------------


def write_profile(run: RunPaths, of: Cell, ranks: Sequence[dict[str, float]], samples: dict[str, Any]) -> None:
    """A completed profile pass with these figures of each rank."""
    path = run.record(of.key, "profile", 0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = Record(
        key=of.key, cell=of, measuring_pass="profile", repeat=0, attempt=1, status=Status.COMPLETED, job="p",
        position=0, started_at=at(0), finished_at=at(1), num_columns=len(samples), figures=dict(ranks[0]),
        rank_figures={name: [rank[name] for rank in ranks] for name in ranks[0]},
    )  # fmt: skip
    path.write_text(record.model_dump_json())
    if samples:
        np.savez(path.with_suffix(".npz"), **samples)


def figures(compute: float, communication: float, exposed: float, wall: float = 0.1) -> dict[str, float]:
    return {
        "profile_wall_seconds": wall, "compute_share": compute, "communication_share": communication,
        "exposed_communication_share": exposed, "idle_share": 1 - compute - exposed, "collectives": 2,
        "communication_bytes": 2e6,
    }  # fmt: skip


def profiled_run(folder: Path, bound: float = 0.3) -> tuple[RunPaths, list[Cell]]:
    """One and two ranks, both profiled; two ranks, not profiled; and two ranks with less communication."""
    cells = [cell(dp=1), cell(dp=2), cell(dp=2, batch_size=8), cell(dp=2, batch_size=16)]
    plan = make_plan(
        cells, 2, objectives={"exposed_communication_share": bound}, experiments=[strong(cells[:2]), strong(cells[2:3])]
    )
    run = write_run(folder, plan)
    for item in cells:
        # A pass of 20 tokens a rank takes 80 ms.
        write_measurements(run, item, [(item.workload.num_prompts or 1) * 5 / 0.08] * 2)  # type: ignore[union-attr]
    write_profile(run, cells[0], [figures(0.9, 0.0, 0.0)], samples_of([]))
    both = [figures(0.5, 0.4, 0.25), figures(0.6, 0.3, 0.2, wall=0.096)]
    write_profile(run, cells[1], both, samples_of(sums((0, 0.02)), sums((0.01, 0.01))))
    write_profile(run, cells[3], [figures(0.8, 0.1, 0.1), figures(0.8, 0.1, 0.1)], {})
    return run, cells


def test_the_section_has_each_cell_with_the_spread_over_ranks(tmp_path: Path) -> None:
    run, cells = profiled_run(tmp_path / "run")
    found = profiled_cells(load_run(run))
    assert [item.result.key for item in found] == [cells[0].key, cells[1].key, cells[3].key]
    table = profiled_table(found)
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert row["pass, ms"] == "100" and row["over a timed pass"] == "1.25 times"
    assert row["communication"] == "35.0 % [30.0 to 40.0]" and row["exposed communication"] == "22.5 % [20.0 to 25.0]"
    assert row["waiting for late ranks"] == "5.00 % [0 to 10.0]" and row["MB a rank"] == "2.00"
    assert dict(zip(table.columns, table.rows[2], strict=True))["waiting for late ranks"] == "–"
    sentence = profiled_sentence(found)
    assert sentence.startswith("Most exposed: tiny, ")
    assert "communication takes 35.0 % of a pass (mean of 2 ranks)" in sentence
    assert "22.5 % of the pass is exposed" in sentence and "5.00 % is waiting for late ranks" in sentence
    assert "Least exposed: " in sentence and "10.0 % of the pass is exposed" in sentence
    assert "1.25 times as long as a timed one" in profiled_lines(found)[0]
    assert [sum(parts(item).values()) for item in found] == pytest.approx([1, 1, 1])
    assert drawn(lambda figure: draw_profiled(figure, found))["svg"].startswith(b"<?xml")
    assert "nothing is communicated" in profiled_sentence(found[:1])


@pytest.mark.slow
def test_the_report_shows_it_and_says_so_where_time_goes(tmp_path: Path) -> None:
    run, _ = profiled_run(tmp_path / "run")
    render_report(run)
    text = whole_report(run)
    assert "## Time split" in text and "(plots/time-split.png)" in text and (run.plots / "time-split.svg").exists()
    assert "recorded a profile only" in text and "ui.perfetto.dev" in text
    study = load_run(run)
    known, unknown = (time_split(study, experiment) for experiment in study.plan.experiments)
    assert known is not None and unknown is not None
    table = time_split_table(known)
    assert [row[table.columns.index("communication")] for row in table.rows] == [
        "none: one rank", "35.0 %, 22.5 % exposed",
    ]  # fmt: skip
    assert "unknown" not in time_split_sentence(known) and "unknown" in time_split_sentence(unknown)
    said = (
        "Within these parts communication takes 35.0 % of the recorded pass, waiting for other ranks in it included; "
    )
    assert said + "22.5 % of the pass is exposed." in time_split_sentence(known), "a pipeline's pass was `own work`"
    assert "Within these parts" not in time_split_sentence(unknown)


def test_the_opening_says_what_scaling_loses_to_communication(tmp_path: Path) -> None:
    """It gave the efficiency of the most ranks without a word on what it was lost to."""
    cells = [cell(dp=ranks) for ranks in (1, 2, 4)]
    run = write_run(tmp_path / "run", make_plan(cells, 2, experiments=[strong(cells)]))
    for item, rate in zip(cells, (1000.0, 1800.0, 2900.0), strict=True):
        write_measurements(run, item, [rate] * 2)

    def opening() -> str:
        study = load_run(run)
        told = [sentence.text for sentence in answer(study, [], decide(study, cell_costs(study)))]
        return next(text for text in told if "strong scaling" in text)

    assert "exposed communication" not in opening()
    write_profile(run, cells[2], [figures(0.7, 0.3, 0.19)] * 4, {})
    assert "; exposed communication takes 19 % of a pass at 4 ranks" in opening()
    write_profile(run, cells[1], [figures(0.9, 0.1, 0.04)] * 2, {})
    assert "; exposed communication takes 4.0 % of a pass at 2 ranks and 19 % at 4" in opening()


def test_without_a_profile_there_is_no_section(tmp_path: Path) -> None:
    one = cell()
    run = write_run(tmp_path / "run", make_plan([one], 1))
    write_measurements(run, one, [100.0])
    render_report(run)
    assert "Time split" not in whole_report(run)


@pytest.mark.parametrize(
    ("bound", "word", "reason"),
    [
        (0.3, "met", "every rank is within the bound, in one recorded pass"),
        (0.15, "missed", "every rank is beyond the bound, in one recorded pass"),
        (0.22, "undecided", "ranks lie on both sides of the bound, in one recorded pass"),
    ],
)
def test_the_objective_asks_every_rank(tmp_path: Path, bound: float, word: str, reason: str) -> None:
    run, cells = profiled_run(tmp_path / "run", bound)
    judgements = judge_objectives(load_run(run))
    found = {judgement.result.key: judgement for judgement in judgements if judgement.result is not None}
    assert set(found) == {item.key for item in cells[1:]}  # one rank has nobody to talk to
    judged = found[cells[1].key]
    assert (judged.word, judged.reason) == (word, reason)
    assert judged.value == pytest.approx(0.225) and judged.interval == (0.2, 0.25)
    missing = found[cells[2].key]
    assert missing.word == "undecided" and "measuring.profile: true asks for one" in missing.reason


def test_a_profile_that_failed_is_listed_and_costs_time(tmp_path: Path) -> None:
    one = train_cell()
    run = write_run(tmp_path / "run", make_plan([one], 1))
    write_measurements(run, one, [100.0])
    write_record(run, one, status=Status.FAILED, measuring_pass="profile")
    study = load_run(run)
    assert profiled_cells(study) == [] and study.cells[one.key].memory is None
    render_report(run)
    assert "| profile pass | failed |" in whole_report(run)


def test_a_throttled_cell_bears_a_mark(tmp_path: Path) -> None:
    cool, hot = cell(), cell(batch_size=8)
    run = write_run(tmp_path / "run", make_plan([cool, hot], 2))
    write_measurements(run, cool, [100.0, 100.0], figures={"throttled": False})
    write_measurements(run, hot, [100.0, 100.0], figures={"throttled": None})
    names = {result.key: result.name for result in load_run(run).cells.values()}
    assert not any("throttled" in name for name in names.values())
    write_measurements(run, hot, [100.0], figures={"throttled": True})
    names = {result.key: result.name for result in load_run(run).cells.values()}
    assert names[hot.key].endswith(", GPU throttled") and "throttled" not in names[cool.key]
