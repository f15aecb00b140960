"""The paper: hostile names stay text, the PDF has the same bytes twice."""

from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from reports.document.paper import compile_paper, literal, paper_text, paper_time
from reports.document.structure import Markdown
from reports.render import analyze_run, write_paper
from tests.support.run_folders.made_studies import cells_of, planned, write_measurements, write_plan

STUDY = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3}
experiments: {sizes: {kind: sweep, over: {batch_size: [1, 2]}}}
"""
HOSTILE = '#panic("x"); \\ "quoted" $a$ @b <c> `d` *e* = F'


@pytest.mark.slow
@pytest.mark.parametrize("name", [HOSTILE, "模型 🚀"])
def test_a_paper_of_hostile_names(tmp_path: Path, name: str) -> None:
    """A name with a character that Typst's own fonts lack ended in an error, as PDF/A has no boxes in its place."""
    pytest.importorskip("typst")
    plan = planned(STUDY)
    named = plan.models[0].model_copy(update={"name": name})
    again = [one.model_copy(update={"model": name}) for one in plan.experiments]
    run = write_plan(tmp_path / "run", plan.model_copy(update={"models": (named,), "experiments": tuple(again)}))
    for index, (_, cell) in enumerate(cells_of(plan)):
        write_measurements(run, cell, 0.01 * (index + 1))
    found = [_written(run) for _ in range(2)]
    assert found[0] == found[1] and found[0][0].startswith(b"%PDF-")
    assert len(found[0][0]) > 20_000


def _written(run: RunPaths) -> tuple[bytes, bytes]:
    write_paper(run, analyze_run(run))
    return run.paper.read_bytes(), run.paper_source.read_bytes()


def test_texts_are_literals() -> None:
    assert literal('a "b" \\') == '#"a \\"b\\" \\\\";'
    assert not isinstance(Markdown("x") + "y", Markdown)


def test_a_cut_table_says_so(tmp_path: Path) -> None:
    """Rows and columns beyond the ninth were missing without a word, beside `No planned cell is left out below`."""
    sizes = [*range(1, 12)]
    plan = planned(STUDY.replace("[1, 2]", str(sizes)))
    run = write_plan(tmp_path / "run", plan)
    for index, (_, cell) in enumerate(cells_of(plan)):
        write_measurements(run, cell, 0.01 * (index + 1))
    analysis = analyze_run(run, draws=False)
    source = paper_text(analysis.study, analysis.context)
    assert 'Shown: 9 of 11 rows; the appendix has all."' in source and "left out below" not in source
    assert "batch_size 9" in source and '"batch_size 10"' not in source


def test_a_long_name_is_not_printed_over_the_next_column(tmp_path: Path) -> None:
    plan = planned(STUDY.replace("batch_size: [1, 2]", f"env.NAME: [a, {'x' * 40}]"))
    run = write_plan(tmp_path / "run", plan)
    for index, (_, cell) in enumerate(cells_of(plan)):
        write_measurements(run, cell, 0.01 * (index + 1))
    analysis = analyze_run(run, draws=False)
    rows = paper_text(analysis.study, analysis.context).partition("table(columns")[2].partition("\n")[0]
    assert '"xxxxxxxxxxxxxxxx";#sym.zws;#"xxxxxxxx";' in rows and "x" * 17 not in rows


def test_a_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    pytest.importorskip("typst")
    bad = tmp_path / "bad.typ"
    bad.write_text("#panic()")
    study = analyze_run(write_plan(tmp_path / "run", planned(STUDY)), draws=False).study
    with pytest.raises(ValueError, match=r"bad\.typ: typst cannot compile it"):
        compile_paper(bad, paper_time(study))
