"""`rankwise site`: a static site of all runs below a folder, and the pages of `compare` and `history`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.common.base import WrongArgument, utc_now, write_atomically
from configs.common.printable import printable, shortened
from configs.plans.paths import RunPaths
from flows.cli.errors import resolved
from reports.document.cells import cells_data
from reports.document.html import report_page
from reports.document.site import HOME, SiteRun, site_pages
from reports.reading.run_figures import run_figures
from reports.render import analyze_run
from reports.runs.history import KeptRun
from reports.text import plural

MAX_DEPTH = 4
"""Folders below the one that is given."""
MAX_RUNS = 1000


def build_site(runs: Path, out: Path, title: str = "Runs") -> int:
    """Write the site. Exit code 3: at least one run could not be read; the index names it."""
    if not runs.is_dir():
        raise WrongArgument(f"{printable(str(runs))}: no such folder. Expected the parent folder of run folders")
    folders = sorted(_run_folders(runs, out))
    if not folders:
        raise WrongArgument(
            f"{printable(str(runs))}: no run folder within {MAX_DEPTH} levels. A run folder has a plan.json"
        )
    if len(folders) > MAX_RUNS:
        raise WrongArgument(f"{printable(str(runs))}: got {len(folders):,} runs, expected at most {MAX_RUNS:,}")
    found: list[SiteRun] = []
    left_out: list[tuple[str, str]] = []
    for number, folder in enumerate(folders, 1):
        name = folder.relative_to(runs).as_posix() if folder != runs else folder.resolve().name
        try:
            found.append(_site_run(folder, name, number))
        except (OSError, ValueError) as error:
            left_out.append((printable(name, 100), printable(str(error), 300)))
            print(f"{printable(name)}: left out: {printable(str(error))}", file=sys.stderr)
    count = 0
    for path, text in site_pages(found, left_out, title):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out / path, text)
        count += 1
    print(f"Site       {out / 'index.html'}: {plural(len(found), 'run')}, {plural(count, 'page')}")
    return 3 if left_out else 0


def _run_folders(parent: Path, out: Path) -> Iterator[Path]:
    """Run folders, not followed through links and not searched for further ones, nor is the site, which may have many
    pages; one that is written beside the runs has no folder of its own to leave out."""
    depth = len(parent.parts)
    for place, names, files in os.walk(parent):
        folder = Path(place)
        if "plan.json" in files:
            names.clear()
            yield folder
        elif len(folder.parts) - depth >= MAX_DEPTH or (folder != parent and resolved(folder) == resolved(out)):
            names.clear()


def _site_run(folder: Path, name: str, number: int) -> SiteRun:
    run = RunPaths(folder.absolute())
    analysis = analyze_run(run, draws=False)
    sentences = analysis.context["sentences"]
    decision = shortened(printable(sentences[0].lead).rstrip(":"), 200) if sentences else ""
    page = report_page(analysis.document, cells_data(analysis.study), home=HOME, linked=False)
    kept = KeptRun(number, (printable(name, 200),), str(folder), utc_now(), run_figures(analysis.study, name))
    return SiteRun(kept, decision, page)
