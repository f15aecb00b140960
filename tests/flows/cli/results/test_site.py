"""`rankwise site`, and the pages of `compare` and `history`: hostile names, one policy, bounds, and a real browser."""

import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from configs.plans.paths import RunPaths
from flows.cli.results.compare import compare_runs, history_add, history_list, history_show
from flows.cli.results.site import build_site
from reports.document import site as pages
from reports.document.html import policy
from tests.support.browser import chromium, find_chromium, serious_faults
from tests.support.run_folders.made_studies import cells_of, planned, write_measurements, write_plan

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">{{7*7}}"
STUDY = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}
experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2]}}}
"""


def made(folder: Path, day: int, seconds: float, text: str = STUDY) -> RunPaths:
    """A run of two cells, whose study and model have hostile names."""
    plan = planned(text)
    named = plan.models[0].model_copy(update={"name": HOSTILE})
    again = [one.model_copy(update={"model": HOSTILE}) for one in plan.experiments]
    run = write_plan(folder, plan.model_copy(update={"models": (named,), "experiments": tuple(again)}))
    for _, cell in cells_of(plan):
        write_measurements(run, cell, seconds)
    for path in run.records.glob("*/*.json"):
        path.write_text(path.read_text().replace("2026-01-01", f"2026-01-0{day}"))
    return run


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, two of which share cells, one folder that cannot be read, and a link to elsewhere."""
    runs = tmp_path_factory.mktemp("site")
    made(runs / "first", 1, 0.01)
    made(runs / "deep" / "<b>second", 2, 0.02)
    made(runs / "other", 3, 0.01, STUDY.replace("prompt_tokens: 8", "prompt_tokens: 16"))
    (runs / "old").mkdir()
    (runs / "old" / "plan.json").write_text('{"schema_version": 1}')
    (runs / "loop").symlink_to(runs)
    assert build_site(runs, runs / "out") == 3, "one run could not be read"
    return runs / "out"


def test_every_page_is_there_and_every_link_leads_to_one(site: Path) -> None:
    found = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert found.keys() == {
        "index.html",
        "history.html",
        *(f"runs/{name}.html" for name in ("first", "deep-b-second", "other")),
        *("compare/first--deep-b-second.html", "compare/deep-b-second--first.html"),
    }
    for name, text in found.items():
        assert "default-src 'none'" in policy() and policy().split(";")[1].strip().split("'")[1] in text, name
        assert "<img" not in text and 'onerror="' not in text and "{{7*7}}" in text, name
        for address in re.findall(r'href="([^"#]+)"', text):
            target = (site / name).parent / address
            assert target.is_file() and site in target.resolve().parents, (name, address)
        assert len(text) < 400_000, name
    assert "old" in found["index.html"] and "schema_version: got 1, expected" in found["index.html"]
    assert "2.00" in found["history.html"] or "100\u00a0%" in found["history.html"], "speeds lie a factor of 2 apart"
    assert "largest median above the smallest" in found["history.html"], "100 % above, which is no ratio of 1"
    run_folder = "rendered from the run folder alone"
    assert run_folder not in found["history.html"] and sum(run_folder in text for text in found.values()) > 1


def test_a_site_is_made_again_to_the_byte_and_does_not_read_itself(site: Path) -> None:
    before = {path: path.read_bytes() for path in site.rglob("*.html")}
    assert build_site(site.parent, site) == 3
    assert before == {path: path.read_bytes() for path in site.rglob("*.html")}


def test_a_site_may_lie_beside_its_runs(tmp_path: Path) -> None:
    """`rankwise site public --out public` found no run there."""
    made(tmp_path / "first", 1, 0.01)
    for _ in range(2):
        assert build_site(tmp_path, tmp_path) == 0
        assert [page.name for page in (tmp_path / "runs").iterdir()] == ["first.html"]


def test_comparisons_are_bounded(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAIRS", 1)
    assert build_site(site.parent, tmp_path / "out") == 3
    assert len(os.listdir(tmp_path / "out" / "compare")) == 1


@pytest.mark.parametrize("wrong", ["missing", "empty"])
def test_a_folder_without_runs_is_a_wrong_argument(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no such folder|no run folder"):
        build_site(tmp_path / wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_compare_and_history_as_pages(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = site.parent / "first", site.parent / "deep" / "<b>second"
    assert compare_runs(first, second, html_file=tmp_path / "compare.html") == 4
    text = (tmp_path / "compare.html").read_text()
    assert "rendered from the run folder" not in text, "it is of two"
    assert "Regression:</strong> 2 of 2 cells are worse" in text and "Page       " in capsys.readouterr().out
    history = tmp_path / "h.sqlite"
    assert history_add(first, "main", history) == history_add(second, None, history) == 0
    assert history_list(history, html_file=tmp_path / "list.html") == 0
    assert (tmp_path / "list.html").read_text().count('<figure class="chart">') == 2
    key = re.findall(r'cell-key="?|<code>([0-9a-f]{16})</code>', (tmp_path / "list.html").read_text())[0]
    assert history_show(key, history, html_file=tmp_path / "cell.html") == 0
    assert (tmp_path / "cell.html").read_text().count('<figure class="chart">') == 1
    assert history_show("main", history, html_file=tmp_path / "run.html") == 0
    assert "2 of 2 cells completed." in (tmp_path / "run.html").read_text()
    both = {"plot": tmp_path / "cell.png", "html_file": tmp_path / "both.html"}
    assert history_show(key, history, **both) == 0 and all(file.stat().st_size for file in both.values())
    assert history_show("main", history, plot=tmp_path / "no.png", html_file=tmp_path / "no.html") == 2
    assert not (tmp_path / "no.html").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium")
def test_a_browser_searches_and_compares(site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((site / "index.html").as_uri())
        assert serious_faults(page) == []
        rows = page.locator("table tbody tr:visible")
        expect(rows).to_have_count(3)
        page.get_by_label("Search runs").fill("second")
        expect(rows).to_have_count(1)
        page.locator("#first").select_option(label="other (2026-01-03 00:00)")
        page.locator("#go").click()
        expect(page.locator("#compared")).to_contain_text("no cell in common")
        page.locator("#first").select_option(label="first (2026-01-01 00:00)")
        page.locator("#second").select_option(label="deep/<b>second (2026-01-02 00:00)")
        page.locator("#go").click()
        expect(page.locator("#decision")).to_contain_text("Regression")
        assert serious_faults(page) == []
        page.locator("header a").click()
        page.get_by_text("History of all runs").click()
        expect(page.locator("figure.chart")).not_to_have_count(0)
        assert serious_faults(page) == []
        assert "owned" not in page.title() and said == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
