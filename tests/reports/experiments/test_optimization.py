"""The section of an optimization: intervals of added repeats, and many variants."""

from pathlib import Path

import pytest

from configs.spec.measuring import Measuring
from reports.document.album import Album
from reports.experiments.comparison import optimization, optimization_table
from reports.numbers.statistics import CONFIDENCE, estimate
from reports.numbers.stopping import confidence
from reports.reading.load import load_run
from reports.sections.experiments import experiment_sections
from reports.text import estimate_cell
from tests.support.run_folders.report_runs import (
    TEN,
    experiment,
    generate,
    generated,
    plan_of,
    write_plan,
    write_record,
)


def test_the_interval_of_the_latency_is_widened_where_one_looked_before_stopping(tmp_path: Path) -> None:
    """Throughput and latency stand in one row: both intervals cover 95 %."""
    base, half = generate(), generate(dtype="bfloat16")
    points = [(base, {"variant": "baseline"}, "baseline"), (half, {"variant": "half"}, "half")]
    rules = Measuring(repeats=10, max_repeats=40, target_interval=0.01)
    plan = plan_of([base, half], [experiment("half", "optimization", points)], repeats=10)
    run = write_plan(tmp_path / "run", plan.model_copy(update={"measuring": rules}))
    for cell in (base, half):
        for repeat, share in enumerate(TEN):
            samples = generated(cell, share)
            gaps = {"0/request_seconds": [0.1 * share**60] * len(samples["0/request_seconds"])}
            write_record(run, cell, repeat, samples=samples | gaps)
    study = load_run(run)
    table = optimization_table(*optimization(study, study.plan.experiments[0]))
    column = next(place for place, name in enumerate(table.columns) if name.startswith("ms TPOT"))
    values = study.cells[half.key].latency_values.values()
    wide, narrow = (estimate_cell(estimate(values, level), 1000) for level in (confidence(rules), CONFIDENCE))
    assert table.rows[1][column] == wide != narrow


def test_a_figure_of_many_variants_is_no_taller_than_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,200 variants, a row each, the image was 540 inches tall, and of 2,900 the library refused to open it."""
    cells = [generate(num_prompts=8 * size) for size in range(1, 1202)]
    points = [(cell, {"variant": str(size)}, f"variant {size}") for size, cell in enumerate(cells)]
    run = write_plan(tmp_path / "run", plan_of(cells, [experiment("all", "optimization", points)], repeats=1))
    for cell in (cells[0], cells[1], cells[-1]):
        write_record(run, cell, samples=generated(cell, 1.0))
    heights: list[float] = []

    def drawn(draw: object, height: float) -> dict[str, bytes]:
        heights.append(height)
        return {}

    monkeypatch.setattr("reports.document.album.drawn", drawn)
    (section,) = experiment_sections(load_run(run), Album())["optimization"]
    assert max(heights) < 20 and section.table is not None and len(section.table.rows) == len(cells)
    assert section.lines == ("The figure shows the first 40 of 1,200 variants, the table all.",)


def test_a_rise_of_latency_and_peak_memory_has_its_sign(tmp_path: Path) -> None:
    base, more = generate(), generate(dtype="bfloat16")
    points = [(base, {"variant": "baseline"}, "baseline"), (more, {"variant": "more"}, "more")]
    run = write_plan(tmp_path / "run", plan_of([base, more], [experiment("e", "optimization", points)], repeats=1))
    for cell, times in ((base, 1.0), (more, 2.0)):
        samples = generated(cell, 1.0)
        samples["0/request_seconds"] = [times * seconds for seconds in samples["0/request_seconds"]]
        write_record(run, cell, samples=samples)
        write_record(run, cell, figures={"peak_memory_bytes": int(times * 2**20)}, measuring_pass="memory")
    study = load_run(run)
    table = optimization_table(*optimization(study, study.plan.experiments[0]))
    for name in ("change of it (interval)", "change of peak"):
        assert table.rows[1][table.columns.index(name)].startswith("+")
