"""A report as data: a tree of sections, each a question with its answer, figure, tables, method and records.

The Markdown, the HTML page, the paper and the JSON form are rendered from it. Texts are plain and escaped by the form
that shows them; what is `Markdown` holds inline marks (code, emphasis) already, as the cells of a `Table` do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from reports.charts.chart import Chart
from reports.text import Table, anchor, prose


class Markdown(str):
    """A text that is inline Markdown already."""


@dataclass(frozen=True)
class Section:
    """A question, the sentence that answers it, the figure to see it in, the tables behind it, and how it was measured.

    plot: name of the figure in the album. records: paths of the records, relative to the run folder.
    num_records: how many there are, of which `records` may be the first. short: whether the short form shows it.
    """

    title: str
    sentence: str = ""
    table: Table | None = None
    plot: str | None = None
    completions: Table | None = None
    lines: tuple[str, ...] = ()
    more: tuple["Section", ...] = ()
    question: str = ""
    method: str = ""
    caption: str = ""
    tables: tuple[tuple[str, Table], ...] = ()
    records: tuple[str, ...] = ()
    num_records: int = 0

    @property
    def all_tables(self) -> list[tuple[str, Table]]:
        """(title, table) of each; the first has none."""
        first = [("", self.table)] if self.table is not None else []
        prompts = [("Completions side by side:", self.completions)] if self.completions is not None else []
        return [*first, *self.tables, *prompts]


@dataclass(frozen=True)
class Document:
    """A report: what is decided, the sections behind it, and the charts of its figures by name."""

    title: str
    sentences: tuple[tuple[str, str, str | None], ...]
    """(lead, body, title of the section that has the evidence)."""
    counts: str
    sections: tuple[Section, ...]
    next_lines: tuple[str, ...] = ()
    charts: dict[str, tuple[Chart, ...]] = field(default_factory=dict)


def as_markdown(text: str) -> str:
    """The text with inline marks: as it is where it has them, else with those of code alone."""
    return text if isinstance(text, Markdown) else prose(text)


def anchors(document: Document) -> dict[str, str]:
    """The fragment of each heading of the appendix by its title, as GitHub makes them; of equal titles the first one's.

    Two titles may have one fragment, such as those of opt-1.3b and opt-13b: the second gets a number.
    """
    found: dict[str, str] = {}
    taken: dict[str, int] = {}
    for title in (f"{document.title}: the evidence", *_titles(document.sections)):
        plain = fragment = anchor(title)
        while fragment in taken:
            taken[plain] += 1
            fragment = f"{plain}-{taken[plain]}"
        taken[fragment] = 0
        found.setdefault(title, fragment)
    return found


def _titles(sections: Iterable[Section]) -> Iterator[str]:
    for section in sections:
        if section.title:
            yield section.title
        yield from _titles(section.more)
