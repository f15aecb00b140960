"""The bench of training: its visits, its verdicts, and once for real with models that are too small to say anything."""

from pathlib import Path

import numpy as np
import pytest

from configs.cell import Cell
from configs.paths import JobPaths
from configs.training import TrainWorkload
from engine.training.comparison.side_by_side import is_partners
from flows import bench_training
from flows.bench_training import ROWS, Found, is_theirs, line, main, quick, step_seconds, visits_of, write_job
from reports.numbers.statistics import paired_ratio

APART, NONE, _, _, CHECKPOINTS = ROWS


def found(ours: list[float], theirs: list[float], row: bench_training.Row = NONE) -> Found:
    ratio = paired_ratio(dict(enumerate(ours)), dict(enumerate(theirs)))
    assert ratio is not None
    return Found(row, ratio, float(np.median(ours)), float(np.median(theirs)))


def test_sides_take_turns_and_no_order_is_favoured() -> None:
    numbers = range(24)
    assert [is_theirs(number) for number in numbers] == [is_partners(number) for number in numbers]
    assert [is_theirs(number) for number in numbers[:4]] == [False, True, True, False]
    for row in ROWS:
        visits = visits_of(row)
        assert len({visit.name for visit in visits}) == len(visits) == 2 * row.pairs
        firsts = [is_theirs(visit.repeat) for visit in visits[::2]]
        assert abs(2 * sum(firsts) - len(firsts)) <= 1
        assert len({visit.cell.pack_key for visit in visits}) == 1


def test_only_what_is_compared_differs() -> None:
    def work(cell: Cell) -> TrainWorkload:
        assert isinstance(cell.workload, TrainWorkload)
        return cell.workload

    ours, theirs = (work(visit.cell) for visit in visits_of(CHECKPOINTS)[:2])
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
    ours, theirs = visits_of(row)[:2]
    paths.parts.mkdir()
    for rank, seconds in enumerate((1.0, 3.0)):
        for visit in (ours, theirs):
            np.savez(paths.samples(visit.name, rank), step_seconds=np.full(4, seconds))
    assert step_seconds(ours, row, paths) == 3.0
    assert step_seconds(theirs, row, paths) == pytest.approx(2 / (1 / 1.0 + 1 / 3.0))
    np.savez(paths.samples(ours.name, 0), step_seconds=np.full(4, 3.0), checkpoint_seconds=np.array([0, 0, 2.0, 0]))
    assert step_seconds(ours, row, paths) == 3.5


@pytest.mark.slow
def test_all_rows_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--runs", str(tmp_path)]) == 2, "two pairs decide nothing"
    lines = [text for text in capsys.readouterr().out.splitlines() if text.endswith("| undecided |")]
    assert len(lines) == len(ROWS)
    for text in lines:
        ours, theirs, ratio = (float(cell) for cell in text.split(" | ")[1:4])
        assert ours > 0 and theirs > 0 and ratio > 0
    assert list(tmp_path.rglob("step_*")), "checkpoints were really written"
