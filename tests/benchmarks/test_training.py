"""The bench of training: its measurements, its verdicts, and once for real with models that are too small to say
anything."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.training import bench as bench_training
from benchmarks.training.bench import (
    ROWS,
    RowResult,
    both_sides,
    is_theirs,
    line,
    main,
    measurements_of,
    quick,
    write_job,
)
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from reports.numbers.statistics import paired_ratio

APART, NONE, _, _, CHECKPOINTS = ROWS


def found(ours: list[float], theirs: list[float], row: bench_training.Row = NONE) -> RowResult:
    ratio = paired_ratio(dict(enumerate(ours)), dict(enumerate(theirs)))
    assert ratio is not None
    return RowResult(row, ratio, float(np.median(ours)), float(np.median(theirs)))


def test_measurements_take_turns_and_no_order_is_favoured() -> None:
    assert [is_theirs(CHECKPOINTS, number) for number in range(4)] == [False, True, True, False]
    for row in ROWS:
        measurements = measurements_of(row)
        assert len({measurement.name for measurement in measurements}) == len(measurements)
        assert len({measurement.cell.pack_key for measurement in measurements}) == 1
        if row is not CHECKPOINTS:
            assert len(measurements) == row.pairs and len({measurement.cell.key for measurement in measurements}) == 1
            continue
        assert len(measurements) == 2 * row.pairs
        firsts = [is_theirs(row, measurement.repeat) for measurement in measurements[::2]]
        assert 2 * sum(firsts) == len(firsts)


def test_only_what_is_compared_differs() -> None:
    def work(cell: Cell) -> TrainWorkload:
        assert isinstance(cell.workload, TrainWorkload)
        return cell.workload

    ours, theirs = (work(measurement.cell) for measurement in measurements_of(CHECKPOINTS)[:2])
    assert (ours.checkpoint_every, theirs.checkpoint_every, ours.checkpoint_mode) == (10, None, "async")
    assert ours.model_copy(update={"checkpoint_every": None}) == theirs
    assert work(APART.cell).accumulation(2) == 8


@pytest.mark.parametrize(
    ("share", "noise", "count", "verdict"),
    [(1.0, 0.001, 12, "met"), (1.05, 0.001, 12, "missed"), (1.02, 0.01, 12, "undecided"), (1.0, 0.001, 4, "undecided")],
)
def test_the_interval_decides(share: float, noise: float, count: int, verdict: str) -> None:
    drift = [1 + 0.3 * number for number in range(count)]
    ours = [share * slow * (1 + noise * (-1) ** number) for number, slow in enumerate(drift)]
    assert found(ours, drift).verdict == verdict
    assert line(found(ours, drift)).endswith(f"| 1.0200 | {verdict} |")


def test_a_row_of_throughput_says_so() -> None:
    text = line(found([1.0] * 8, [0.98] * 8, APART))
    assert "| 0.9800 | 0.9800 to 0.9800 | 8 | 0.9700 | met |" in text


def test_a_step_is_the_slowest_ranks_and_of_those_apart_their_common_pace(tmp_path: Path) -> None:
    row = quick(APART)
    paths: JobPaths = write_job(row, tmp_path)
    paths.parts.mkdir()
    for measurement in measurements_of(row):
        for rank, seconds in enumerate((1.0, 3.0)):
            columns = {"step_seconds": np.full(4, seconds), "partner_seconds": np.full(4, seconds)}
            np.savez(paths.samples(measurement.name, rank), **columns)
    assert both_sides(row, paths) == [(3.0, pytest.approx(2 / (1 / 1.0 + 1 / 3.0)))] * row.pairs


def test_what_a_checkpoint_holds_up_counts(tmp_path: Path) -> None:
    row = quick(CHECKPOINTS)
    paths = write_job(row, tmp_path)
    paths.parts.mkdir()
    for measurement in measurements_of(row):
        for rank in range(row.ranks):
            held_up = {} if is_theirs(row, measurement.repeat) else {"checkpoint_seconds": np.array([0, 0, 2.0, 0])}
            np.savez(paths.samples(measurement.name, rank), step_seconds=np.full(4, 3.0), **held_up)
    assert both_sides(row, paths) == [(3.5, 3.0)] * row.pairs


@pytest.mark.nightly
def test_all_rows_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--runs", str(tmp_path)]) == 2, "two pairs decide nothing"
    lines = [text for text in capsys.readouterr().out.splitlines() if text.endswith("| undecided |")]
    assert len(lines) == len(ROWS)
    for text in lines:
        ours, theirs, ratio = (float(cell) for cell in text.split(" | ")[1:4])
        assert ours > 0 and theirs > 0 and ratio > 0
    assert list(tmp_path.rglob("step_*")), "checkpoints were really written"
