"""Percentiles, distributions and the time split of made-up measurements: every number is known beforehand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.common.execution import Layout
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from reports.charts.experiments import latency_charts
from reports.charts.others import loss_charts
from reports.document.svg import svg
from reports.experiments.latency import (
    MOST_CURVES,
    LatencyCurve,
    LatencyCurves,
    latency,
    latency_curves,
    latency_sentence,
    latency_table,
)
from reports.numbers.percentiles import Percentiles, percentiles, pool, quantiles
from reports.plots.experiments.latency import draw_latency
from reports.plots.experiments.time_split import draw_time_split
from reports.plots.style import drawn
from reports.profiles.time_split import time_split, time_split_sentence, time_split_table
from reports.reading.load import StudyResult, load_run
from tests.support.run_folders.report_runs import MODEL, experiment, generate, plan_of, write_plan, write_record


def passes(cell: Cell, count: int, ttft: float = 0.01, gap: float = 0.005, late: float = 0.0) -> dict[str, Any]:
    """One batch a pass; rank r spends r x `late` seconds on something else. The n-th request takes n ms longer."""
    samples: dict[str, Any] = {}
    for rank in range(cell.layout.ranks):
        longer = np.arange(count) / 1000
        gaps = 4  # five new tokens
        samples[f"{rank}/ttft_seconds"] = np.full(count, ttft)
        samples[f"{rank}/request_seconds"] = ttft + gaps * gap + longer
        samples[f"{rank}/gap_seconds"] = np.full(gaps * count, gap)
        samples[f"{rank}/pass_seconds"] = ttft + gaps * gap + longer + rank * late
        samples[f"{rank}/batch_sequences"] = np.full(count, 4.0)
    return samples


def study_of(folder: Path, counts: list[int], repeats: int = 6, late: float = 0.0, lost: bool = False) -> StudyResult:
    """Strong scaling over 1, 2, 3... ranks with so many passes a repeat; the last point is lost if so asked."""
    cells = [generate(dp=ranks, num_prompts=4 * ranks, batch_size=4) for ranks in range(1, len(counts) + 1)]
    points = [(cell, {"ranks": cell.layout.ranks}, f"dp {cell.layout.ranks}") for cell in cells]
    run = write_plan(folder, plan_of(cells, [experiment("strong", "strong", points, grow="dp")], repeats))
    for cell, count in zip(cells, counts, strict=True):
        for repeat in range(repeats):
            if lost and cell is cells[-1]:
                write_record(run, cell, repeat, status=Status.OUT_OF_MEMORY)
            else:
                figures = {"preprocess_seconds": 0.004, "load_seconds": 2.5}
                write_record(run, cell, repeat, samples=passes(cell, count, late=late), figures=figures)
    return load_run(run)


def test_percentiles_are_of_all_samples_and_marked_where_they_are_few(tmp_path: Path) -> None:
    study = study_of(tmp_path / "run", [11, 11])
    one, two = study.cells.values()
    found = one.percentiles("request")
    assert found is not None and found.samples == 66 and found.marked
    assert found.p50 == pytest.approx(0.035) and found.p90 == pytest.approx(0.039)
    pooled = np.repeat(0.030 + np.arange(11) / 1000, 6)
    assert found.p99 == pytest.approx(float(np.quantile(pooled, 0.99))) and found.p99_interval is None
    ttft, token = one.percentiles("ttft"), one.percentiles("token")
    assert ttft is not None and ttft.p99 == pytest.approx(0.010) and ttft.samples == 66
    assert token is not None and token.p50 == pytest.approx(0.005) and token.samples == 264
    both, wall = two.percentiles("request"), two.percentiles("pass")
    assert both is not None and both.samples == 132 and wall is not None and wall.samples == 66
    assert one.percentiles("step") is None
    latencies = one.estimate("latency_seconds")
    assert latencies is not None and latencies.median == pytest.approx(0.035)


def test_an_interval_of_p99_needs_repeats_that_have_one() -> None:
    rng = np.random.default_rng(3)
    parts = [rng.lognormal(0, 0.1, 200) for _ in range(10)]
    tails = [quantiles(part, (0.99,))[0] for part in parts]
    found = percentiles(pool(parts), tails, 0.95)
    assert found.p99_interval is not None and not found.marked
    low, high = found.p99_interval
    assert low < found.p99 < high and low * high == pytest.approx(found.p99**2)
    wider = percentiles(pool(parts), tails, 0.99).p99_interval
    assert wider is not None and wider[0] < low and wider[1] > high
    assert percentiles(pool(parts[:5]), tails[:5], 0.95).p99_interval is None
    assert percentiles(pool([part[:99] for part in parts]), tails, 0.95).p99_interval is None
    same = percentiles(pool([np.ones(100)] * 6), [1.0] * 6, 0.95)
    assert same.p99_interval == (1.0, 1.0)


def test_the_interval_of_p99_covers_it() -> None:
    """Repeats that differ by 3 % and skewed samples; 93.5 % to 95 % were found over 2,000 studies."""
    rng = np.random.default_rng(11)
    true = float(np.quantile(rng.lognormal(0, (0.2**2 + 0.03**2) ** 0.5, 2_000_000), 0.99))
    covered = 0
    for _ in range(400):
        samples = rng.lognormal(0, 0.2, (10, 300)) * np.exp(0.03 * rng.standard_normal((10, 1)))
        found = percentiles(pool(list(samples)), [quantiles(part, (0.99,))[0] for part in samples], 0.95)
        assert found.p99_interval is not None
        covered += found.p99_interval[0] <= true <= found.p99_interval[1]
    assert 0.90 <= covered / 400 <= 0.98


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 512, 2048, 2049, 5001])
def test_quantiles_are_those_of_the_statistics(count: int) -> None:
    values = np.random.default_rng(count).random(count)
    found = quantiles(values, (0.5, 0.9, 0.99))
    assert found == pytest.approx(np.quantile(values, [0.5, 0.9, 0.99]).tolist(), rel=1e-12)


def test_table_and_sentence_of_latency(tmp_path: Path) -> None:
    study = study_of(tmp_path / "run", [11, 11, 11], lost=True)
    result = latency(study, study.plan.experiments[0])
    assert result is not None and result.kind == "request"
    table = latency_table(result)
    assert table.rows[0] == ("dp 1", "66", "35.0", "39.0", "40.0†", "10.0†", "5.00†")
    assert table.rows[2][:2] == ("dp 3", "–")
    sentence = latency_sentence(result)
    assert sentence.startswith("P99 of a request is 40.0 ms† at dp 1")
    assert "† marks a P99 of fewer than 1,000 samples (2 of 2 points)" in sentence
    only = study_of(tmp_path / "one", [11])
    alone = latency(only, only.plan.experiments[0])
    assert alone is not None
    assert latency_sentence(alone).startswith("P99 of a request is 40.0 ms† at dp 1, 1.14 times P50. † marks")


def test_curves_are_few_and_go_through_the_percentiles(tmp_path: Path) -> None:
    study = study_of(tmp_path / "run", [15] * 9, repeats=1)
    result = latency(study, study.plan.experiments[0])
    assert result is not None
    curves = latency_curves(study, result).curves
    assert [curve.label for curve in curves] == ["dp 1", "dp 3", "dp 4", "dp 6", "dp 7", "dp 9"]
    assert len(curves) == MOST_CURVES
    first = curves[0]
    assert first.shares[-1] == 1 and first.seconds[-1] == pytest.approx(0.044)
    assert np.interp(0.5, first.shares, first.seconds) == pytest.approx(0.0365, abs=0.001)
    assert drawn(lambda figure: draw_latency(figure, latency_curves(study, result)))["png"].startswith(b"\x89PNG")


def test_an_experiment_without_figures_has_neither(tmp_path: Path) -> None:
    study = study_of(tmp_path / "run", [3], repeats=1, lost=True)
    assert latency(study, study.plan.experiments[0]) is None
    assert time_split(study, study.plan.experiments[0]) is None


def test_the_time_split_sums_to_the_wall_time(tmp_path: Path) -> None:
    """Rank 1 is 8 ms later than rank 0 in each pass: the mean rank waits 4 ms, and 4 ms are of no known part."""
    study = study_of(tmp_path / "run", [3, 3, 3], repeats=2, late=0.008, lost=True)
    result = time_split(study, study.plan.experiments[0])
    assert result is not None and result.unit == "pass"
    one, two, lost = result.points
    assert one.parts["prefill"] == pytest.approx(0.010) and one.parts["decode"] == pytest.approx(0.021)
    assert one.parts["waiting for the slowest rank"] == pytest.approx(0)
    assert two.parts["waiting for the slowest rank"] == pytest.approx(0.004)
    assert two.parts["other"] == pytest.approx(0.004)
    assert two.seconds == pytest.approx(0.010 + 0.020 + 0.001 + 0.008)
    assert not lost.parts
    table = time_split_table(result)
    assert table.rows[0][0] == "1 (baseline)" and table.rows[1][1] == "39.0"
    assert table.rows[1][table.columns.index("communication")] == "unknown"
    assert table.rows[0][table.columns.index("outside: loading, s")] == "2.50"
    sentence = time_split_sentence(result)
    assert sentence.startswith("At 2 ranks the largest part of a pass is decode (54 % of 39.0 ms)")
    assert "waiting for the slowest rank takes 10 %" in sentence and "Not measured: 3 ranks." in sentence
    assert "its share is unknown" in sentence
    assert drawn(lambda figure: draw_time_split(figure, result))["svg"].startswith(b"<?xml")


def test_a_training_step_is_own_work_and_waiting(tmp_path: Path) -> None:
    cells = [Cell(model=MODEL.identity, workload=TrainWorkload(), layout=Layout(dp=dp)) for dp in (1, 2)]
    points = [(cell, {"ranks": cell.layout.ranks}, f"dp {cell.layout.ranks}") for cell in cells]
    run = write_plan(tmp_path / "run", plan_of(cells, [experiment("strong", "strong", points, grow="dp")], 1))
    for cell in cells:
        seconds = {f"{rank}/step_seconds": [0.5 + 0.1 * rank] * 4 for rank in range(cell.layout.ranks)}
        write_record(run, cell, samples=seconds, figures={"tokens_per_step": 1024})
    study = load_run(run)
    split, spread = (found(study, study.plan.experiments[0]) for found in (time_split, latency))
    assert split is not None and split.unit == "step" and split.names == ["own work", "waiting for the slowest rank"]
    assert list(split.points[1].parts.values()) == pytest.approx([0.55, 0.05])
    assert spread is not None and spread.kind == "step" and latency_table(spread).rows[1][2] == "600"


def test_a_value_of_a_curve_is_read_with_its_place() -> None:
    """`dp=2: 50 %` was all that pointer and arrow keys gave of a distribution: of which latency was left out."""
    seconds = np.array([0.1, 0.2, 0.4, 0.8])
    curve = LatencyCurve("dp=2", seconds, np.arange(1, 5) / 4, Percentiles(0.2, 0.8, 0.8, 4, None))
    done, longer = (svg(chart) for chart in latency_charts(LatencyCurves("request", (curve,))))
    assert 'data-t="dp=2, 200 ms: 50.0 %"' in done and 'data-t="dp=2, 400 ms: 25.0 %"' in longer
    (loss,) = (svg(chart) for chart in loss_charts({"dp=2": np.array([3.0, np.nan, 2.0])}))
    assert 'data-t="dp=2, step 3: 2.00 nats"' in loss


def test_training_has_steps_and_inputs_and_neither_requests_nor_prompts(tmp_path: Path) -> None:
    cell = Cell(model=MODEL.identity, workload=TrainWorkload(steps=4))
    run = write_plan(
        tmp_path, plan_of([cell], [experiment("weak", "weak", [(cell, {"ranks": 1}, "dp 1")], grow="dp")], 1)
    )
    figures = {"tokens_per_step": 8, "preprocess_seconds": 0.004}
    write_record(run, cell, samples={"0/step_seconds": [0.1, 0.2, 0.1, 0.1]}, figures=figures)
    study = load_run(run)
    found, split = latency(study, study.plan.experiments[0]), time_split(study, study.plan.experiments[0])
    assert found is not None and split is not None
    assert latency_sentence(found).endswith("a few slow steps decide it.")
    assert "outside: preparing inputs, ms" in time_split_table(split).columns
