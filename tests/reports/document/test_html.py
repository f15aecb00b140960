"""The HTML page: hostile names and logs, one policy, the same bytes, and a real browser that uses it."""

import ast
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape
from playwright.sync_api import Page, expect

from configs.plans.paths import RunPaths
from configs.records.record import Failure, Status
from reports.document.cells import cells_data
from reports.document.html import html_environment, json_block, policy, report_page
from reports.document.inline import inline_html, inline_plain
from reports.document.paper import rich
from reports.document.structure import Document, Section
from reports.reading.load import load_run
from reports.render import analyze_run, render_page, render_report, report_text
from reports.text import Table
from tests.support.browser import chromium, find_chromium, serious_faults
from tests.support.run_folders.made_studies import cells_of, planned, write_measurements, write_plan, write_record

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{7*7}}{% x %}`'\"\\"
)
STUDY = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3, batch_size: 4}
experiments:
  sizes: {kind: sweep, over: {batch_size: [1, 2, 4]}}
  more: {kind: strong, grow: dp, to: 2, base: {num_prompts: 8}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A sweep and a scaling experiment, one cell of which failed with a hostile message; the model's name is too."""
    plan = planned(STUDY)
    named = plan.models[0].model_copy(update={"name": HOSTILE})
    again = [one.model_copy(update={"model": HOSTILE}) for one in plan.experiments]
    plan = plan.model_copy(update={"models": (named,), "experiments": tuple(again)})
    made = write_plan(tmp_path_factory.mktemp("page") / "run", plan)
    cells = {cell.key: cell for place in (0, 1) for _, cell in cells_of(plan, place)}
    lost, *kept = cells.values()
    for index, cell in enumerate(kept):
        write_measurements(made, cell, 0.01 * (index + 1))
    write_record(made, lost, 0, status=Status.FAILED, failure=Failure(message=HOSTILE))
    return made


class _Attributes(HTMLParser):
    """Names of all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {name for name, _ in attrs}


def test_the_page_is_one_file_without_network(run: RunPaths) -> None:
    text = render_page(run)
    assert text == render_page(run), "another rendering has other bytes"
    assert not re.search(r"""(src|href)=["'](https?:)?//""", text) and "@import" not in text
    found = _Attributes()
    found.feed(text)
    assert {"class", "href"} <= found.names, found.names
    assert not {name for name in found.names if name == "style" or name.startswith("on")}, "refused by the policy"
    assert text.count("<script") == text.count("</script>") == 2
    assert str(escape(policy())) in text and "default-src 'none'" in policy() and "unsafe" not in policy()


def test_markdown_and_page_hold_the_same_sections(run: RunPaths) -> None:
    render_report(run)
    text = render_page(run)
    for heading in re.findall(r"^## (.+)$", run.appendix.read_text(), flags=re.M):
        assert f">{heading}</h2>" in text


def test_a_list_of_records_says_that_there_are_more(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an experiment of 140 records stood `Records (60)`."""
    (count,) = set(re.findall(r"<summary>Records \((\d+)\)", render_page(run))[:1])
    monkeypatch.setattr("reports.sections.experiments.MAX_RECORDS", 1)
    assert f"<summary>Records (1 of {count}; records.parquet has all)</summary>" in render_page(run)


def test_the_samples_of_a_cell_are_named_by_what_they_are(run: RunPaths) -> None:
    """Of generation the column has the time of a token, the samples are whole requests, many times as long."""
    data = cells_data(load_run(run))
    assert "ms TPOT" in data.columns
    told = {cell.get("samples") for cell in data.data["cells"] if "range" in cell}
    assert told == {"latency of a request"}
    assert "share of samples; ${c.samples}, ms (logarithmic)" in report_page(analyze_run(run, False).document, data)


def test_json_in_a_script_cannot_end_it() -> None:
    text = json_block({"name": HOSTILE})
    assert "<" not in text and json.loads(text) == {"name": HOSTILE}


@pytest.mark.parametrize(
    ("text", "html", "plain"),
    [
        ("a\\_b `x<y` **c**", "a_b <code>x&lt;y</code> <strong>c</strong>", "a_b x<y c"),
        ("&lt;b&gt; <b>", "&lt;b&gt; &lt;b&gt;", "<b> <b>"),
        ("`a\\|b` \\$c\\$", "<code>a|b</code> $c$", "a|b $c$"),
        ("**open `", "<strong>open `</strong>", "open `"),
    ],
)
def test_inline_marks(text: str, html: str, plain: str) -> None:
    assert inline_html(text) == html and inline_plain(text) == plain


def test_sentences_of_the_report_have_no_links_that_only_markdown_reads() -> None:
    """The page and the paper showed `[AWS](https://...)` as it stands: their texts have code and emphasis alone."""
    for path in (Path(__file__).parents[3] / "reports").rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert [text for text in texts if isinstance(text, str) and re.search(r"\]\(https?:", text)] == [], path


def test_numbers_are_not_broken() -> None:
    told = html_environment().from_string("{{ text | told }}")
    assert told.render(text="5 % off by 1.6e-5 <x-1e-5> *a*") == (
        '5\u00a0% off by <span class="nb">1.6e-5</span> &lt;x-1e-5&gt; *a*'
    )


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_a_browser_uses_the_page(run: RunPaths, tmp_path: Path) -> None:
    """Values by keyboard, series, scale, sorting, filtering, a cell's detail; nothing hostile has run."""
    page_file = tmp_path / "report.html"
    page_file.write_text(render_page(run))
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
        _use_chart(page)
        record = _use_cells(page)
        assert (run.folder / record).is_file(), record
        assert "owned" not in page.title() and page.locator("img").count() == 0
        assert said == []


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_a_printed_page_is_light_and_names_the_series(run: RunPaths, tmp_path: Path) -> None:
    """On paper the lines of a chart had no names, and the dark theme was pale letters without their background."""
    page_file = tmp_path / "report.html"
    page_file.write_text(render_page(run))
    with chromium() as browser:
        page = browser.new_page(color_scheme="dark")
        page.goto(page_file.as_uri())
        dark = page.evaluate("getComputedStyle(document.body).color")
        page.emulate_media(media="print", color_scheme="dark")
        for theme in ("", "dark"):
            page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
            assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)" != dark
        several = page.locator("figure.chart", has=page.locator('[data-s="1"][aria-pressed]')).first
        expect(several.locator('[data-s="0"][aria-pressed]')).to_be_visible()
        expect(several.locator('[data-s="1"][aria-pressed] .swatch')).to_be_visible()
        expect(several.locator(".scale")).to_be_hidden()


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_a_wide_table_is_whole_on_paper(tmp_path: Path) -> None:
    """The last of the columns on compression, with the perplexity that decides, lay beyond the edge of the paper.

    Chromium shrinks a page that is wider than A4 to two thirds, not further.
    """
    figures = ["1,270 (1,270 to 1,280)", "50.5 %"] * 7
    columns = ("weights", "passes that were run", *["tokens/s, median (interval)", "not zero"] * 7, "KL", "state")
    row = ("uncompressed, bfloat16 (base)", "prune_50", *figures, "2.02e-7", "unsupported")
    long = Table(("point", "state"), (("x" * 120, "completed"),))
    section = Section("Compression", table=Table(columns, (row,), text_columns=2), tables=(("Names", long),))
    page_file = tmp_path / "report.html"
    page_file.write_text(report_page(Document("wide", (), "", (section,))))
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 794, "height": 1123})
        page.goto(page_file.as_uri())
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1.5 * 794
        exponent = page.get_by_text("2.02e-7", exact=True)
        assert exponent.evaluate("e => e.getClientRects().length") == 1, "an exponent on a line of its own"


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_a_table_is_sorted_by_sizes_and_not_by_their_digits(tmp_path: Path) -> None:
    """256 KiB came after 64 MiB in the table of collectives."""
    sizes = ["64 MiB", "256 KiB", "1,000 B", "1 GiB", "16 KiB", "–"]
    table = Table(("operation", "size"), tuple(("all-reduce", size) for size in sizes))
    page_file = tmp_path / "report.html"
    page_file.write_text(report_page(Document("sizes", (), "", (Section("Collectives", table=table),))))
    with chromium() as browser:
        page = browser.new_page()
        page.goto(page_file.as_uri())
        page.get_by_role("button", name="size", exact=True).click()
        shown = page.locator("tbody td:nth-child(2)").all_text_contents()
        assert [text.replace("\u00a0", " ") for text in shown] == [
            "1,000 B", "16 KiB", "256 KiB", "64 MiB", "1 GiB", "–"
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_axe_finds_no_fault(run: RunPaths, tmp_path: Path) -> None:
    """Light and dark, wide and narrow, everything unfolded, and with a cell opened."""
    page_file = tmp_path / "report.html"
    page_file.write_text(render_page(run))
    with chromium() as browser:
        for scheme, width in (("light", 1440), ("dark", 390)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(page_file.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
            assert serious_faults(page) == [], (scheme, width)
            page.locator("#cells-table tbody button").first.click()
            expect(page.locator("#cell")).to_be_visible()
            assert serious_faults(page) == [], (scheme, width, "cell")
            page.close()


def _use_chart(page: Page) -> None:
    figure = page.locator("figure.chart", has=page.locator(".scale")).first
    figure.locator(".plot").focus()
    page.keyboard.press("ArrowRight")
    expect(figure.locator(".tip")).to_contain_text("10 repeats")
    before = figure.locator("circle.m").last.get_attribute("cy")
    figure.locator(".scale").click()
    expect(figure.locator(".scale")).to_have_text("Scale: logarithmic")
    assert figure.locator("circle.m").last.get_attribute("cy") != before or figure.locator("circle.m").count() == 1
    several = page.locator("figure.chart", has=page.locator('[data-s="1"][aria-pressed]')).first
    several.locator('[data-s="0"][aria-pressed]').click()
    expect(several.locator('g[data-s="0"]')).to_be_hidden()


def _use_cells(page: Page) -> str:
    """Sort, filter, open a cell; gives the address of its first record."""
    rows = page.locator("#cells-table tbody tr")
    count = rows.count()
    page.locator("#cells-table th button").nth(4).click()
    expect(page.locator("#cells-table th").nth(4)).to_have_attribute("aria-sort", "ascending")
    expect(rows.last.locator("td").nth(4)).to_have_text("–")
    page.locator("#cells-table th button").nth(4).click()
    expect(page.locator("#cells-table th").nth(4)).to_have_attribute("aria-sort", "descending")
    expect(rows.last.locator("td").nth(4)).to_have_text("–")  # the fastest first, what failed still last
    page.locator("#cells-filter").fill("failed")
    expect(rows).to_have_count(1)
    page.locator("#cells-filter").fill("")
    expect(rows).to_have_count(count)
    page.locator("#cells-filter").fill("completed")
    rows.first.locator("button").click()
    expect(page.locator("#cell")).to_be_visible()
    expect(page.locator("#cell-body svg path.line")).to_have_count(10)
    record = page.locator("#cell-body a").first.get_attribute("href") or ""
    page.locator("#cell-close").click()
    expect(page.locator("#cell")).to_be_hidden()
    return record


def test_commands_of_plain_sentences_are_code_in_every_form(run: RunPaths) -> None:
    """The report said \\`rankwise run\\`, and the page had the backticks."""
    analysis = analyze_run(run, False)
    told = "`rankwise run` measures a_b again"
    document = replace(analysis.document, sentences=(("Damaged:", told, None),), next_lines=(told,))
    context = analysis.context | {"document": document, "next_lines": [told]}
    assert report_text(context).count("`rankwise run` measures a\\_b again") == 2
    page = report_page(document, cells_data(load_run(run)))
    assert page.count("<code>rankwise run</code> measures a_b again") == 2
    assert '#raw("rankwise run");' in rich(told)
