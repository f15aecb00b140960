"""Size of the report's page and how long a browser takes to open it: python -m benchmarks.report_page

    python -m benchmarks.report_page [--records 10000 100000] [--rounds 5]

For each number it makes up the run folder of `benchmarks.report` (ten records a cell), renders `report.html`, and
opens it in a headless Chromium at 1440 by 900, each time in a window without a cache. Opened is: the load event is
over, the first rows of the table of cells have their buttons from the script, and the next frame is drawn. Ends with
exit code 1 where the page is larger than 3 MB for 1,000 cells or 10 MB for more, or where the median is over 1 s.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.report import REPEATS, render_alone, write_run
from configs.plans.paths import RunPaths
from tests.support.browser import chromium

BAR_SECONDS = 1.0
BAR_BYTES = {1000: 3_000_000, 10_000: 10_000_000}
"""Cells -> size of a page of at most so many."""
_DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


@dataclass(frozen=True)
class Opening:
    """A page, and the seconds of each time that it was opened."""

    cells: int
    size_bytes: int
    seconds: tuple[float, ...]


def open_page(page_file: Path, rounds: int) -> tuple[float, ...]:
    """Seconds from the address to the first frame with the script's rows, each in a window of its own."""
    seconds = []
    with chromium() as browser:
        for _ in range(rounds):
            with browser.new_context(viewport={"width": 1440, "height": 900}) as window:
                page = window.new_page()
                began = time.monotonic()
                page.goto(page_file.as_uri(), wait_until="load")
                page.wait_for_selector("#cells-table tbody button", state="attached")
                page.evaluate(_DRAWN)
                seconds.append(time.monotonic() - began)
    return tuple(seconds)


def missed(openings: list[Opening]) -> list[str]:
    """What the bars ask for and was not reached, in sentences."""
    found = []
    for item in openings:
        limit = next((size for cells, size in sorted(BAR_BYTES.items()) if item.cells <= cells), None)
        if limit is not None and item.size_bytes > limit:
            size = f"{item.size_bytes / 1e6:.2f} MB, expected at most {limit / 1e6:.0f} MB"
            found.append(f"{item.cells:,} cells: the page has {size}")
        if median(item.seconds) > BAR_SECONDS:
            found.append(f"{item.cells:,} cells: opens in {median(item.seconds):.2f} s, expected {BAR_SECONDS:.0f} s")
    return found


def main() -> int:
    """Write, render, open and print each; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    openings = []
    print(f"{'cells':>9} {'MB':>7} {'opens in s, median':>20} {'each':>8}")
    for records in sorted(arguments.records):
        with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as scratch:
            run = RunPaths(Path(scratch) / "run")
            written = write_run(run.folder, records)
            size = render_alone(run.folder, written, "html").page_bytes
            item = Opening(written // REPEATS, size, open_page(run.page, arguments.rounds))
        openings.append(item)
        each = " ".join(f"{seconds:.2f}" for seconds in item.seconds)
        print(f"{item.cells:>9,} {item.size_bytes / 1e6:>7.2f} {median(item.seconds):>20.2f}     {each}", flush=True)
    lines = missed(openings)
    print("\n".join(f"MISSED: {line}" for line in lines) or "the bars are met")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
