"""A static site of many runs: an index with a search, a page for each run, comparisons of any two, their history.

    for name, text in site_pages(runs, left_out): write(folder / name, text)

Pages are linked by relative addresses, so a CI can publish the folder as it is. Each keeps the content security policy
of the report's page. Raw records stay in the run folders, so their paths are texts here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from configs.common.printable import file_slug
from reports.document.between import cells_done, comparison_document, history_document
from reports.document.html import ListedRun, SiteIndex, index_page, report_page
from reports.runs.compare import DEFAULT_THRESHOLD, compare
from reports.runs.compare_text import short_commit
from reports.runs.history import KeptRun
from reports.text import UNKNOWN, plural

MAX_PAIRS = 1000
"""Comparisons of a site, in both directions: those of the newest runs."""
INDEX, HISTORY = "index.html", "history.html"
HOME = f"../{INDEX}"
"""The index, from a page of a run."""
COLUMNS = ("run", "study", "measured, UTC", "commit", "environment", "cells", "decision")


@dataclass(frozen=True)
class SiteRun:
    """A run of a site. page: its report, made with `home=HOME`."""

    kept: KeptRun
    decision: str
    page: str


def site_pages(
    runs: Sequence[SiteRun], left_out: Sequence[tuple[str, str]] = (), title: str = "Runs"
) -> Iterator[tuple[str, str]]:
    """(path, text) of every page; the index last. `left_out`: folders that could not be read, and why."""
    newest = sorted(runs, key=lambda run: (run.kept.figures.started_at or "", run.kept.number), reverse=True)
    names = _names([run.kept.title for run in newest])
    for run, name in zip(newest, names, strict=True):
        yield f"runs/{name}.html", run.page
    pairs: dict[tuple[int, int], str] = {}
    for first, second in _pairs(newest):
        page = f"compare/{names[first]}--{names[second]}.html"
        pairs[first, second] = page
        try:
            found = compare(newest[first].kept.figures, newest[second].kept.figures, DEFAULT_THRESHOLD)
        except ValueError:
            del pairs[first, second]
            continue
        yield page, report_page(comparison_document(found), home="../index.html")
    kept = [run.kept for run in reversed(newest)]
    yield HISTORY, report_page(history_document(kept), home=INDEX)
    listed = tuple(_listed(run, name) for run, name in zip(newest, names, strict=True))
    studies = len({run.kept.figures.study for run in newest})
    told = f"{plural(len(newest), 'run')} of {studies} {'study' if studies == 1 else 'studies'}, the newest first."
    index = SiteIndex(title, told, HISTORY, COLUMNS, listed, pairs, tuple(left_out))
    yield INDEX, index_page(index)


def _pairs(runs: Sequence[SiteRun]) -> list[tuple[int, int]]:
    """Places of runs with a cell in common; of too many those of the newest runs."""
    keys = [run.kept.figures.cells.keys() for run in runs]
    found = [(one, two) for one, two in permutations(range(len(runs)), 2) if keys[one] & keys[two]]
    return sorted(found, key=lambda pair: (max(pair), min(pair), pair))[:MAX_PAIRS]


def _names(titles: Sequence[str]) -> list[str]:
    """A file's name for each title, no two alike."""
    found: list[str] = []
    for title in titles:
        slug, count = file_slug(title), 1
        name = slug
        while name in found:
            count += 1
            name = f"{slug}-{count}"
        found.append(name)
    return found


def _listed(run: SiteRun, name: str) -> ListedRun:
    figures = run.kept.figures
    facts = (
        figures.study,
        figures.started_at[:16].replace("T", " ") if figures.started_at else UNKNOWN,
        short_commit(figures.commit) if figures.commit else UNKNOWN,
        figures.environment or UNKNOWN,
        cells_done(run.kept),
        run.decision,
    )
    return ListedRun(run.kept.title, f"runs/{name}.html", facts)
