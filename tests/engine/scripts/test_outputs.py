"""Output of ranks, by line: each line has the time at which its text came."""

import os
import time
from pathlib import Path

import pytest

from configs.workloads.script_figures import LinePattern
from engine.scripts.line_figures import LineReader
from engine.scripts.outputs import Line, Outputs


@pytest.mark.parametrize(("begin", "end"), [("\r", ""), ("", "\n")], ids=["progress bar", "lines"])
def test_a_line_has_the_time_of_its_text(begin: str, end: str, tmp_path: Path) -> None:
    """A bar's line had that of the next line, and its last that of the script's end, with all that came between."""
    found, times = [], []
    with Outputs(tmp_path, [0], lambda rank: tmp_path / f"{rank}.log") as outputs:
        pipe = os.open(tmp_path / "err_0", os.O_WRONLY)
        for number in range(3):
            sent = time.perf_counter()
            os.write(pipe, f"{begin}step {number}{end}".encode())
            found += list(outputs.read(1.0))
            times.append((sent, time.perf_counter()))
            time.sleep(0.05)
        os.close(pipe)
        found += list(outputs.rest())
    assert [line.text for line in found] == [f"step {number}" for number in range(3)]
    assert all(sent <= line.at <= read for line, (sent, read) in zip(found, times, strict=True))


def test_a_line_that_comes_after_a_younger_one_takes_no_negative_time() -> None:
    reader = LineReader(LinePattern(pattern=r"step (?P<step>\d+)", rank="any"), ranks=2)
    for rank, step, at in ((0, 1, 10.0), (1, 2, 12.0), (0, 3, 11.0), (1, 4, 14.0)):
        reader.see(Line(rank, False, f"step {step}", at))
    assert reader.series.seconds == [None, 1.0, 1.0, 2.0]
