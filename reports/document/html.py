"""The report as one HTML page: no network, no inline handlers, a policy that lets nothing else run.

    page = report_page(document, cells_data(study))

Jinja escapes whatever is not made here; what is made here (`Markup`) comes from `inline`, `svg` and our own files. The
policy names the hashes of the one style sheet and the one script. Rendering again gives the same bytes.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from configs.common.printable import printable
from reports.charts.chart import Chart
from reports.document.inline import inline_html, section_html
from reports.document.structure import Document, Section
from reports.document.svg import log_able, svg
from reports.text import anchor

if TYPE_CHECKING:
    from jinja2 import Environment

    from reports.document.cells import CellsData


_EXPONENT = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?e-\d+(?![\w.-])")


@dataclass(frozen=True)
class LiveHeader:
    """What a page of a run under way says on top. `version` changes with every record."""

    version: str
    text: str
    done: int
    planned: int


@dataclass(frozen=True)
class ListedRun:
    """A run in the index of a site: its page, and what is told of it (study, time, commit, cells, decision)."""

    name: str
    page: str
    facts: tuple[str, ...]

    @property
    def label(self) -> str:
        """Of its entry in a list to choose from."""
        return f"{self.name} ({self.facts[1]})"


@dataclass(frozen=True)
class SiteIndex:
    """The first page of a site. pairs: places of two runs -> page of their comparison."""

    title: str
    told: str
    history: str
    columns: tuple[str, ...]
    runs: tuple[ListedRun, ...]
    pairs: dict[tuple[int, int], str]
    left_out: tuple[tuple[str, str], ...] = ()


def report_page(
    document: Document,
    cells: "CellsData | None" = None,
    live: LiveHeader | None = None,
    home: str | None = None,
    linked: bool = True,
) -> str:
    """The page of one report; `cells`: all cells with their samples, `live`: where its run is under way.

    home: address of the index of its site. linked: whether the page lies in the run folder, so that records have links.
    """
    from markupsafe import Markup

    shown = None
    if cells is not None:
        shown = {"columns": cells.columns, "first": cells.first_rows, "data": Markup(json_block(cells.data))}
    return _page(
        "page.html.j2",
        live is not None,
        title=document.title,
        document=document,
        ids=_ids(document.sections),
        cells=shown,
        live=live,
        home=home,
        linked=linked,
    )


def index_page(index: SiteIndex) -> str:
    """The first page of a site: all runs, a search, and a choice of two to compare."""
    from markupsafe import Markup

    pairs = json_block({f"{first},{second}": page for (first, second), page in sorted(index.pairs.items())})
    return _page("site.html.j2", title=index.title, index=index, pairs=Markup(pairs), home=None)


def _page(template: str, is_live: bool = False, **values: Any) -> str:
    from markupsafe import Markup

    css, js = _sources()
    text = (
        html_environment()
        .get_template(template)
        .render(css=Markup(css), js=Markup(js), policy=policy(is_live), **values)
    )
    return "\n".join(line for line in text.split("\n") if line.strip()) + "\n"


def policy(live: bool = False) -> str:
    """What the page may do: its own style sheet and script, by hash, and nothing from elsewhere."""
    css, js = _sources()
    connect = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; {connect}"
        "base-uri 'none'; form-action 'none'"
    )


def json_block(value: Any) -> str:
    """JSON for a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def html_environment() -> "Environment":
    """Jinja with everything escaped by itself."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from reports.templating import TEMPLATES

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters.update(
        inline=lambda text: Markup(_unbroken(inline_html(printable(text)))),
        told=lambda text: Markup(_unbroken(inline_html(printable(text), markdown=False))),
        text=lambda text: Markup(_unbroken(section_html(type(text)(printable(text))))),
        svg=_svg,
        log_able=log_able,
        id_of=_id_of,
        path=lambda text: quote(text),
    )
    return environment


def _with_unit(html: str) -> str:
    """A number stays on one line with its per cent sign."""
    return html.replace(" %", "\u00a0%")


def _unbroken(html: str) -> str:
    """And with its exponent."""
    return _EXPONENT.sub(r'<span class="nb">\g<0></span>', _with_unit(html))


def _printable(value: Any) -> Any:
    """Without control characters and overrides of direction; what is markup already was made so."""
    return printable(value) if type(value) is str else value


def _svg(chart: Chart) -> Any:
    from markupsafe import Markup

    return Markup(svg(chart))


@cache
def _sources() -> tuple[str, str]:
    """The style sheet and the script, as they stand in the page."""
    from reports.templating import template_source

    return _dense(template_source("page.css")), _dense(template_source("page.js"))


def _dense(text: str) -> str:
    """Without empty lines and indents."""
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _ids(sections: tuple[Section, ...]) -> dict[str, str]:
    """Title -> fragment; of equal titles the first."""
    found: dict[str, str] = {}
    pending = list(sections)
    while pending:
        section = pending.pop(0)
        pending = [*section.more, *pending]
        if section.title and section.title not in found:
            name = f"s-{anchor(section.title)}"
            found[section.title] = name if name not in found.values() else f"{name}-{len(found)}"
    return found


def _id_of(section: Section, ids: dict[str, str]) -> str:
    """The fragment of a heading: that of its title for the first section of it, else one of its own."""
    first = ids.get(section.title, "s")
    return (
        first if ids.setdefault(f"\0{section.title}", str(id(section))) == str(id(section)) else f"{first}-{_nth(ids)}"
    )


def _nth(ids: dict[str, str]) -> int:
    ids["\0count"] = str(int(ids.get("\0count", "1")) + 1)
    return int(ids["\0count"])
