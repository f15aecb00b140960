"""The benchmark of the page: it opens a real page in a real browser, and its bars are held against figures."""

from pathlib import Path

import pytest

from benchmarks.report import write_run
from benchmarks.report_page import Opening, missed, open_page
from configs.plans.paths import RunPaths
from reports.render import render_page
from tests.support.browser import find_chromium


def test_what_misses_the_bars() -> None:
    assert missed([Opening(1000, 2_900_000, (0.4, 1.6, 0.5)), Opening(10_000, 9_900_000, (0.9,))]) == []
    assert missed([Opening(1000, 3_100_000, (0.5,)), Opening(10_000, 9_000_000, (1.2, 1.3))]) == [
        "1,000 cells: the page has 3.10 MB, expected at most 3 MB",
        "10,000 cells: opens in 1.25 s, expected 1 s",
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_a_page_is_opened(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    write_run(run.folder, 200, samples=20)
    page_file = tmp_path / "report.html"
    page_file.write_text(render_page(run))
    assert len(open_page(page_file, 2)) == 2
