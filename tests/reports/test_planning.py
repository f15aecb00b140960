"""Prediction against measurement, layouts and forecasts in the report of made-up runs with known answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from configs.common.execution import Layout, Strategy
from configs.hardware.catalog import instance
from configs.hardware.hardware import Accelerator, Link, Machine
from configs.plans.paths import RunPaths
from configs.plans.plan import CellPoint, ConsideredLayout, Plan, PlannedExperiment, PlannedForecast
from configs.plans.prediction import Prediction
from configs.records.record import Status
from configs.spec.cell import Cell
from configs.workloads.generate import GenerateWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.forecasting.forecast import Half
from flows.cli.plan.forecast import print_forecast
from reports.experiments.scaling import scaling
from reports.planning.accuracy import MEMORY, accuracy_headline, accuracy_summary, error_groups, judge, unjudged
from reports.planning.forecast import (
    StudyForecast,
    forecast_lines,
    forecast_sentence,
    forecast_table,
    half_text,
    study_forecast,
)
from reports.planning.layouts import layout_ranking, layouts_lines, layouts_sentence, layouts_table
from reports.planning.text import NO_PREDICTIONS, prediction_lines, prediction_sentence
from reports.plots.planning.forecast import draw_forecast
from reports.plots.planning.prediction import panels
from reports.reading.load import load_run
from reports.render import render_report
from tests.support.run_folders.priced_runs import (
    TINY,
    cell,
    figures_of,
    make_plan,
    strong,
    train_cell,
    write_measurements,
    write_record,
    write_run,
)
from tests.support.run_folders.reports import whole_report

MIB = 1 << 20
ACCELERATOR = Accelerator(
    name="this-cpu",
    kind="cpu",
    memory_bytes=1 << 34,
    bytes_per_second=1e10,
    peak_flops={"float32": 1e11},
    source="measured here",
)
MACHINE = Machine(
    name="this machine",
    accelerator=ACCELERATOR,
    accelerators=4,
    inside=Link(name="gloo, measured", latency_seconds=1e-4, bytes_per_second=1e9),
)


def said(rate: float, **fields: object) -> Prediction:
    return Prediction.model_validate({"tokens_per_second": rate, "factor": 1.3, "basis": "measured here", **fields})


def predicted(plan: Plan, predictions: dict[str, Prediction]) -> Plan:
    return plan.model_copy(update={"predictions": predictions})


def judged_run(folder: Path) -> RunPaths:
    """Rates of 100 predicted 10 % too high, right, 40 % too low and not at all; two more are not measured alike."""
    cells = [cell(batch_size=size) for size in (1, 2, 3, 4)]
    lost, answers = cell(batch_size=5), cell(batch_size=6, answers=True)
    plan = make_plan([*cells, lost, answers], repeats=6, experiments=[strong(cells[:2])])
    predictions = {
        cells[0].key: said(110, peak_memory_bytes=220 * MIB, correction=1.1, learnt_from=12),
        cells[1].key: said(100, peak_memory_bytes=190 * MIB),
        cells[2].key: said(60),
        cells[3].key: Prediction(reason="the architecture is not known"),
        lost.key: said(1),
        answers.key: said(1),
    }
    run = write_run(folder / "run", predicted(plan, predictions))
    for item in (*cells, answers):
        write_measurements(run, item, [100] * 6)
    write_record(run, lost, status=Status.OUT_OF_MEMORY)
    for item in cells[:2]:
        write_record(run, item, measuring_pass="memory", figures={"peak_memory_bytes": 200 * MIB})
    return run


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    study = load_run(judged_run(tmp_path))
    judged = judge(study)
    assert [round(item.error, 6) for item in accuracy_headline(judged)] == [0.1, 0.0, 0.4]
    assert [item.within for item in accuracy_headline(judged)] == [True, True, False]
    assert [round(item.ratio, 3) for item in judged if item.figure == MEMORY] == [1.1, 0.95]
    whole = accuracy_summary(judged)
    assert whole is not None
    assert (whole.cells, whole.within, whole.stated) == (3, 2, 3)
    assert (whole.median, whole.worst) == pytest.approx((0.1, 0.4)) and whole.p90 == pytest.approx(0.34)
    groups = {(group.name, group.figure): group for group in error_groups(study, judged)}
    assert groups["all generate cells", MEMORY].median == pytest.approx(0.075)
    assert groups["strong: tiny", "tokens_per_second"].worst == pytest.approx(0.1)
    assert list(panels(judged)) == ["generate: tokens/s", "peak memory of the fullest rank: MiB"]


def test_no_cell_is_dropped_without_a_word(tmp_path: Path) -> None:
    study = load_run(judged_run(tmp_path))
    reasons = unjudged(study, judge(study))
    assert sum(reasons.values()) + 3 == len(study.cells)
    assert reasons["the architecture is not known"] == 1 and reasons["not measured (out of memory)"] == 1
    text = "\n".join(prediction_lines(study, judge(study)))
    assert "3 cells of 6 not judged by their rates." in text
    assert "multiplied by 1.10, learnt from 12 past records of this hardware (1 cell)" in text
    sentence = prediction_sentence(study, judge(study))
    assert "off by 10 % in the median of 3 cells (P90 34 %, worst 40 %)" in sentence
    assert "2 of 3 lie within the factor" in sentence


def test_one_cell_is_told_in_the_singular(tmp_path: Path) -> None:
    study = load_run(judged_run(tmp_path))
    first = accuracy_headline(judge(study))[:1]
    sentence = prediction_sentence(study, first)
    assert "in the median of 1 cell " in sentence and "1 of 1 lies within the factor" in sentence
    assert "1 of 1 was predicted too fast." in sentence


def test_the_report_shows_it(tmp_path: Path) -> None:
    run = judged_run(tmp_path)
    render_report(run)
    text = whole_report(run)
    assert "## Prediction against measurement" in text and "plots/prediction-against-measurement.png" in text
    assert "| all generate cells | tokens/s | 3 | 10 % | 34 % | 40 % | 2 of 3 (67 %) |" in text
    assert "| +10.0 % | 1.3 | yes | 220 | 200 | +10.0 % |" in text
    assert "| -40.0 % |" in text and "**no**" in text


def test_a_run_that_predicted_nothing_says_so_in_a_sentence(tmp_path: Path) -> None:
    one = cell()
    run = write_run(tmp_path / "run", make_plan([one], repeats=1))
    write_measurements(run, one, [100])
    render_report(run)
    part = whole_report(run).partition("## Prediction against measurement")[2].partition("##")[0].strip()
    assert part == NO_PREDICTIONS


def layout_run(
    folder: Path, rates: Sequence[float | None], ranked: Sequence[float | None], slower: int = 0
) -> tuple[RunPaths, Plan]:
    """dp=4, dp=2 and one rank were to be measured; a layout that cannot be was predicted fastest, one does not fit."""
    cells = [cell(dp=dp, batch_size=8 // dp) for dp in (4, 2, 1)]
    labels = ["dp=4", "dp=2", "1 rank"]
    candidates = [
        ConsideredLayout(label="tp=4", layout=Layout(tp=4), prediction=said(900), reason="tp is not measured"),
        *(
            ConsideredLayout(
                label=label,
                layout=item.layout,
                prediction=Prediction(reason="no link is known") if rate is None else said(rate),
                cell=item.key,
            )
            for label, item, rate in zip(labels, cells, ranked, strict=True)
        ),
        *(
            ConsideredLayout(label=f"slow {place}", layout=Layout(), prediction=said(50 - place), reason="slower")
            for place in range(slower)
        ),
        ConsideredLayout(
            label="pp=4", layout=Layout(pp=4), prediction=said(999, fits=False), reason="does not fit: 3 GiB"
        ),
    ]
    points = tuple(
        CellPoint(cell=item.key, values={"layout": label}, label=label, baseline=label == labels[0])
        for label, item in zip(labels, cells, strict=True)
    )
    experiment = PlannedExperiment(
        name="layouts", kind="layouts", model=TINY.name, points=points, candidates=tuple(candidates)
    )
    plan = make_plan(cells, repeats=6, experiments=[experiment])
    run = write_run(folder / "run", plan)
    for item, rate in zip(cells, rates, strict=True):
        if rate is not None:
            write_measurements(run, item, [rate] * 6)
    return run, plan


def test_where_the_best_layout_stood_in_the_prediction(tmp_path: Path) -> None:
    run, plan = layout_run(tmp_path, rates=(250, 300, 100), ranked=(400, 350, 120))
    study = load_run(run)
    result = layout_ranking(study, plan.experiments[0])
    sentence = layouts_sentence(result)
    assert sentence.startswith("The best measured layout, dp=2, gives 300 tokens/s")
    assert "It was number 3 of 4 in the prediction, number 2 of the 3 that were measured." in sentence
    assert "Of 3 pairs of measured layouts 2 came out in the order that was predicted." in sentence
    lines = layouts_lines(result)
    assert lines[0] == "Predicted faster than the best measured one, and not measured: tp=4."
    assert any("does not fit" in line for line in lines)
    rows = layouts_table(result).rows
    assert [row[:2] for row in rows] == [("1", "tp=4"), ("2", "dp=4"), ("3", "dp=2"), ("4", "1 rank"), ("5", "pp=4")]
    assert rows[0][-1] == "not measured: tp is not measured" and rows[1][-1] == "measured"
    assert rows[1][5] == "+60.0 %" and rows[4][-2] == "no"
    render_report(run)
    text = whole_report(run)
    assert "## Layouts" in text and "plots/layouts-tiny.png" in text


def test_the_best_layout_names_those_that_are_as_good(tmp_path: Path) -> None:
    run, plan = layout_run(tmp_path, rates=(300, 300, 100), ranked=(400, 350, 120))
    sentence = layouts_sentence(layout_ranking(load_run(run), plan.experiments[0]))
    assert sentence.startswith("The best measured layout, dp=4, gives 300 tokens/s (")
    assert ", not told apart from dp=2. It was number 2 of 4 in the prediction" in sentence


@pytest.mark.parametrize(("slower", "told"), [(12, False), (13, True)])
def test_of_many_layouts_the_figure_says_which_it_shows(tmp_path: Path, slower: int, told: bool) -> None:
    run, _ = layout_run(tmp_path, rates=(250, 300, 100), ranked=(400, 350, 120), slower=slower)
    render_report(run)
    line = "The figure shows 16 of 17 layouts: what was measured, then the best predictions."
    assert (line in whole_report(run)) is told


def test_layouts_without_figures(tmp_path: Path) -> None:
    run, plan = layout_run(tmp_path, rates=(None, None, None), ranked=(1, 2, 3))
    result = layout_ranking(load_run(run), plan.experiments[0])
    assert layouts_sentence(result) == "No layout has a figure; 3 layouts were to be measured."
    other, plan = layout_run(tmp_path / "one", rates=(None, 5, None), ranked=(3, 2, 1))
    assert "the only one that was measured" in layouts_sentence(layout_ranking(load_run(other), plan.experiments[0]))


def test_layouts_without_a_prediction_are_in_no_predicted_order(tmp_path: Path) -> None:
    """Nothing was said of one rank, which is slower than dp=2; of dp=2 too, nothing is left to compare."""
    run, plan = layout_run(tmp_path, rates=(300, 250, 100), ranked=(400, 350, None))
    sentence = layouts_sentence(layout_ranking(load_run(run), plan.experiments[0]))
    assert "It was number 2 of 3 in the prediction, number 1 of the 2 of these that were measured." in sentence
    assert "Of 1 pair of measured layouts 1 came out in the order that was predicted." in sentence
    other, plan = layout_run(tmp_path / "one", rates=(300, 250, 100), ranked=(400, None, None))
    sentence = layouts_sentence(layout_ranking(load_run(other), plan.experiments[0]))
    assert "number 2 of 2 in the prediction, and the only one of these that was measured, so the order" in sentence


def train(dp: int, batch: int, strategy: Strategy = "ddp", tp: int = 1) -> Cell:
    layout = Layout(dp=dp, tp=tp, strategy=strategy if dp > 1 else "none")
    return Cell(model=TINY.identity, workload=TrainWorkload(global_batch_size=batch), layout=layout, nodes=dp)


def scaling_run(
    folder: Path, kind: str, strategy: Strategy = "ddp", tp: int = 1, **changes: object
) -> tuple[RunPaths, Plan]:
    """Training on 1, 2 and 4 replicas: 1 s of compute a step on one, and 10 M gradients over the link."""
    cells = [train(dp, 32 if kind == "strong" else 8 * dp, strategy, tp) for dp in (1, 2, 4)]
    points = strong(cells).points
    experiment = PlannedExperiment.model_validate(
        {"name": kind, "kind": kind, "model": TINY.name, "grow": "dp", "points": points}
    )
    plan = make_plan(cells, repeats=6, experiments=[experiment]).model_copy(
        update={"machines": {"local": MACHINE}, **changes}
    )
    run = write_run(folder / "run", plan)
    for item in cells:
        ranks = item.layout.ranks
        sent = 0.0 if ranks == 1 else 2 * 2 * (ranks - 1) * 1e-4 + 2 * (ranks - 1) / ranks * 40e6 / 1e9
        seconds = (1 / ranks if kind == "strong" else 1.0) + sent
        samples = {f"{rank}/step_seconds": [seconds] * 4 for rank in range(ranks)}
        figures = {**figures_of(item), "tokens_per_step": 4096, "model_parameters": 10e6}
        for repeat in range(6):
            write_record(run, item, repeat, samples=samples, figures=figures)
    return run, plan


def forecast_of(run: RunPaths, plan: Plan) -> StudyForecast:
    study = load_run(run)
    found = study_forecast(study, scaling(study, plan.experiments[0]))
    assert isinstance(found, StudyForecast), found
    return found


@pytest.mark.slow
def test_weak_scaling_is_forecast_to_4096_ranks(tmp_path: Path) -> None:
    run, plan = scaling_run(tmp_path, "weak")
    found = forecast_of(run, plan)
    assert found.measured_to == 4 and found.last.ranks == 4096
    true = 1 + 2 * 2 * 4095 * 1e-4 + 2 * 4095 / 4096 * 40e6 / 1e9
    low, high = found.last.seconds_interval
    assert low < true < high
    assert forecast_sentence(found).startswith("At 4,096 ranks a step is forecast to take ")
    lines = forecast_lines(found)
    assert lines[0].startswith(
        "As if all ranks were joined like those of this machine: gloo, measured (100 µs, 1.00 GB/s)"
    )
    assert lines[1].startswith("Checked: fitted without 4 ranks it predicts") and "inside the interval" in lines[1]
    rows = forecast_table(found).rows
    assert [row[1] for row in rows[:4]] == ["measured", "measured", "measured", "forecast"]
    render_report(run)
    text = whole_report(run)
    assert "#### Forecast" in text and "plots/weak-tiny-forecast.png" in text


def test_a_crossing_is_named_only_where_measurements_tell_it(tmp_path: Path) -> None:
    found = forecast_of(*scaling_run(tmp_path, "weak"))
    for half, expected in (
        (Half(51.0, 2.0, None), "What was measured does not tell where efficiency falls under 50 %: anywhere from 2 "
         "ranks to beyond 4,096."),
        (Half(51.0, 20.0, None), "Efficiency falls under 50 % at about 51 ranks (20 to beyond 4,096)."),
        (Half(51.0, 2.0, 90.0), "Efficiency falls under 50 % at about 51 ranks (2 to 90)."),
        (Half(None, None, None), "Efficiency does not fall under 50 % up to 4,096 ranks, nor in its interval."),
    ):  # fmt: skip
        assert half_text(replace(found, found=replace(found.found, half=half))) == expected
    points = found.found.points
    for share, shown in ((0.498, "49.8 %"), (0.5004, "50.04 %"), (0.5, "50 %"), (0.47, "47 %")):
        last = replace(points[-1], efficiency=share)
        near = replace(found, found=replace(found.found, points=(*points[:-1], last)))
        assert f"efficiency to be {shown} (" in forecast_sentence(near)
        assert forecast_table(near).rows[-1][4].startswith(f"{shown} (")


def test_the_hardware_s_figures_are_said_once(tmp_path: Path) -> None:
    run = judged_run(tmp_path)
    study = load_run(run)
    bases = [
        "here with 1 of 2 cores busy",
        "here with 2 of 2 cores busy; a note",
        "here with 1 of 2 cores busy; a note",
    ]
    told = {key: said(1.0, basis=basis) for key, basis in zip(study.cells, bases, strict=False)}
    study = replace(study, plan=predicted(study.plan, told))
    assert "The hardware's figures: here with 1 and 2 of 2 cores busy; a note." in prediction_lines(study, [])


def test_strong_scaling_ends_with_the_work(tmp_path: Path) -> None:
    found = forecast_of(*scaling_run(tmp_path, "strong"))
    assert found.last.ranks == 32
    assert forecast_lines(found)[-1] == "A batch of 32 sequences feeds no more ranks, so the forecast ends there."


def test_efficiencies_above_linear_are_within_the_figure(tmp_path: Path) -> None:
    """What caches gave beyond 112 % of linear was cut off: two of three measured points were not to be seen."""
    found = forecast_of(*scaling_run(tmp_path, "strong"))
    one = found.seconds[1]
    found = replace(found, seconds={1: one, 2: one.scaled(0.5 / 1.3), 4: one.scaled(0.25 / 1.6)})
    figure = Figure()
    draw_forecast(figure, found)
    right = figure.axes[1]
    assert right.get_title().startswith("Efficiency")
    measured = [line for line in right.lines if line.get_marker() == "o"]
    assert max(float(np.max(line.get_ydata())) for line in measured) == pytest.approx(160)
    assert right.get_ylim()[1] > 160


def test_the_interconnect_of_the_study(tmp_path: Path) -> None:
    over = PlannedForecast(to=64, machine=instance("aws/p4d.24xlarge"))
    run, plan = scaling_run(tmp_path, "weak", forecast=over)
    found = forecast_of(run, plan)
    assert found.stated and found.last.ranks == 64
    assert forecast_lines(found)[0].startswith(
        "Over the interconnect of aws/p4d.24xlarge, as the study states: 8 ranks"
    )
    table = forecast_table(found)
    assert "forecast over aws/p4d.24xlarge" in table.columns[3] and table.rows[1][1] == "measured here"


def test_why_there_is_no_forecast(tmp_path: Path) -> None:
    run, plan = scaling_run(tmp_path / "a", "weak", machines={})
    study = load_run(run)
    assert "link between them is not known" in str(study_forecast(study, scaling(study, plan.experiments[0])))
    run, plan = scaling_run(tmp_path / "b", "weak", forecast=PlannedForecast(to=4))
    study = load_run(run)
    assert "forecast.to is 4" in str(study_forecast(study, scaling(study, plan.experiments[0])))
    for strategy, tp, why in (
        ("fsdp", 1, "what fsdp sends is not known"),
        ("ddp", 2, "only data parallelism is forecast"),
    ):
        run, plan = scaling_run(tmp_path / f"{strategy}{tp}", "weak", strategy, tp)  # type: ignore[arg-type]
        study = load_run(run)
        assert why in str(study_forecast(study, scaling(study, plan.experiments[0])))
    cells = [cell(dp=dp, batch_size=8 // dp, num_prompts=8) for dp in (1, 2)]
    plan = make_plan(cells, repeats=6, experiments=[strong(cells)])
    run = write_run(tmp_path / "c" / "run", plan)
    for item in cells:
        write_measurements(run, item, [100 * item.layout.dp] * 6)
    study = load_run(run)
    why = study_forecast(study, scaling(study, plan.experiments[0]))
    assert why is None or "fill no more than" in str(why)  # batches differ by ranks: no pure scaling
    assert isinstance(cells[0].workload, GenerateWorkload)


def test_the_command_prints_it_for_another_interconnect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = scaling_run(tmp_path, "weak")
    assert print_forecast(run.folder, 16, "aws/p4d.24xlarge") == 0
    printed = capsys.readouterr().out
    assert "At 16 ranks" in printed and "aws/p4d.24xlarge" in printed
    with pytest.raises(ValueError, match="--to: got 9999, expected 1 to 4096"):
        print_forecast(run.folder, 9999, None)
    with pytest.raises(ValueError, match="p4d"):
        print_forecast(run.folder, None, "aws/p4d")
    other = write_run(tmp_path / "other", make_plan([train_cell()]))
    with pytest.raises(ValueError, match="expected an experiment of kind strong or weak"):
        print_forecast(other.folder, None, None)


def test_the_links_of_a_forecast_are_told_by_what_they_join(tmp_path: Path) -> None:
    """`NVLink (...) inside, 100 GbE (...).`, and of nodes with one rank `no known link inside`."""
    found = forecast_of(*scaling_run(tmp_path, "weak"))
    link = MACHINE.inside
    assert link is not None
    several = replace(found, machine=MACHINE.model_copy(update={"accelerators": 8, "between": link}))
    told = "gloo, measured (100 µs, 1.00 GB/s)"
    assert forecast_lines(several)[0] == (
        f"Over more nodes like the measured ones: {told} inside a node, {told} between nodes."
    )
    single = replace(found, machine=MACHINE.model_copy(update={"accelerators": 1, "inside": None, "between": link}))
    assert forecast_lines(single)[0] == f"Over more nodes like the measured ones: {told} between nodes."
    assert "1 rank a node, nodes over gloo" in forecast_lines(replace(single, stated=True))[0]
