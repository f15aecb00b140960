"""One section per experiment and model: a figure, its explanation and its table."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from configs.plans.plan import PlannedExperiment
from reports.charts.chart import MAX_ROWS
from reports.charts.experiments import (
    compression_charts,
    gain_charts,
    latency_charts,
    load_charts,
    scaling_charts,
    split_charts,
    sweep_charts,
    target_charts,
)
from reports.charts.others import forecast_charts, layout_charts, profile_charts
from reports.correctness.section import JudgedCell, completions_table, correctness_table, reference_sentence
from reports.document.album import Album
from reports.document.structure import Section
from reports.experiments.communication import communication, communication_sentence, communication_table, links_table
from reports.experiments.comparison import (
    optimization,
    optimization_sentence,
    optimization_table,
    sweep,
    sweep_sentence,
    sweep_table,
)
from reports.experiments.compression import (
    compression,
    compression_lines,
    compression_sentence,
    compression_table,
)
from reports.experiments.engines import engines, engines_lines, engines_sentence, engines_table
from reports.experiments.latency import latency, latency_curves, latency_sentence, latency_table
from reports.experiments.load.experiment import load_experiment
from reports.experiments.load.text import (
    latencies_table,
    limits_table,
    load_lines,
    load_sentence,
    load_table,
    servers_table,
)
from reports.experiments.scaling import Scaling, scaling, scaling_law_lines, scaling_sentence, scaling_table
from reports.experiments.targets import side_by_side, targets_lines, targets_sentence, targets_table
from reports.planning.forecast import forecast_lines, forecast_sentence, forecast_table, study_forecast
from reports.planning.layouts import layout_ranking, layouts_lines, layouts_sentence, layouts_table
from reports.plots.experiments.compression import compression_height, draw_compression, drawn_rows
from reports.plots.experiments.latency import draw_latency
from reports.plots.experiments.load import draw_load, drawn_axis, load_height
from reports.plots.experiments.optimization import draw_optimization
from reports.plots.experiments.profiled import draw_profiled, profiled_height
from reports.plots.experiments.scaling import draw_scaling
from reports.plots.experiments.sweep import draw_sweep, sweep_axes, sweep_height
from reports.plots.experiments.targets import draw_targets, targets_height
from reports.plots.experiments.time_split import draw_time_split
from reports.plots.planning.forecast import draw_forecast
from reports.plots.planning.layouts import draw_layouts, drawable_layouts, drawn_layouts, layouts_height
from reports.plots.style import MOST_BARS, bars_text, series_lines
from reports.profiles.perf import perf_lines, perf_sentence, perf_table, recorded_cells
from reports.profiles.profiled import profiled_cells, profiled_lines, profiled_sentence, profiled_table
from reports.profiles.time_split import time_split, time_split_sentence, time_split_table
from reports.reading.load import CellResult, StudyResult

MAX_RECORDS = 60
"""Named under a figure; the page's cells and `records.parquet` have all."""
_MAX_REFUSED = 12
"""Points of a grid that this version cannot measure, named with an experiment; plan.json has all."""

LINKS_SENTENCE = "A line, seconds = latency + size / bandwidth, was fitted to each repeat with relative errors."

LATENCIES_SENTENCE = (
    "In milliseconds, medians over the repeats. TTFT and end to end count from when a request was due. TPOT is "
    "(last - first token) / (tokens - 1) of a request, and in parentheses end to end / tokens; ITL is each time "
    "between two tokens."
)
SERVERS_SENTENCE = "How each server was started; options that a cell asks for and a server lacks are named."
LIMITS_SENTENCE = (
    "Each rate passes where the wanted quantile of latency over objective is surely below 1, and fails where it is "
    "surely above."
)


def experiments_of(study: StudyResult, kind: str) -> list[PlannedExperiment]:
    return [experiment for experiment in study.plan.experiments if experiment.kind == kind and experiment.points]


def experiment_sections(
    study: StudyResult, album: Album, judged: Sequence[tuple[str, JudgedCell]] = ()
) -> dict[str, list[Section]]:
    """The experiments' sections by kind, in the order of the study file. `judged`: (model, verdict) of all answers."""
    makers = {
        "strong": _scaling,
        "weak": _scaling,
        "sweep": _sweep,
        "optimization": _optimization,
        "compression": _compression,
        "layouts": _layouts,
        "communication": _communication,
        "load": _load,
    }
    return {
        kind: [
            replace(
                _with_engines(study, experiment, maker(study, experiment, album), judged),
                records=(paths := records_of(study, experiment))[:MAX_RECORDS],
                num_records=len(paths),
            )
            for experiment in experiments_of(study, kind)
        ]
        for kind, maker in makers.items()
    }


def records_of(study: StudyResult, experiment: PlannedExperiment) -> tuple[str, ...]:
    """Paths of the records behind an experiment's figures."""
    paths = [reading.path for result in study.points(experiment) for reading in result.completed.values()]
    return tuple(dict.fromkeys(paths))


def target_sections(study: StudyResult, album: Album) -> list[Section]:
    """Each experiment that several targets measured, these side by side."""
    sections = []
    for found in side_by_side(study):
        drawn = any(side.ranked for side in found.sides)
        plot = (
            album.add(
                f"targets {found.title}",
                partial(draw_targets, found=found),
                target_charts(found),
                targets_height(found),
            )
            if drawn
            else None
        )
        left_out = series_lines(len(found.labels), "points") if plot else ()
        lines = (*left_out, *targets_lines(found))
        sections.append(Section(found.title, targets_sentence(found), targets_table(found), plot, lines=lines))
    return sections


def _with_engines(
    study: StudyResult, experiment: PlannedExperiment, section: Section, judged: Sequence[tuple[str, JudgedCell]]
) -> Section:
    """The section, and where its cells are of several engines one that says which to use."""
    if experiment.kind not in ("sweep", "optimization"):
        return section
    lines = [f"{item.label} is unsupported: {item.reason}." for item in experiment.refused[:_MAX_REFUSED]]
    if len(experiment.refused) > len(lines):
        lines.append(f"{len(experiment.refused) - len(lines):,} more points are unsupported: plan.json lists them.")
    section = replace(section, lines=(*section.lines, *lines))
    found = engines(study, experiment, judged)
    if found is None:
        return section
    which = Section("Which engine", engines_sentence(found), engines_table(found), lines=tuple(engines_lines(found)))
    return replace(section, more=(which, *section.more))


def _compression(study: StudyResult, experiment: PlannedExperiment, album: Album) -> Section:
    result, title = compression(study, experiment), study.title(experiment)
    plot = None
    if len(drawn_rows(result)) > 1:
        plot = album.add(
            title, partial(draw_compression, result=result), compression_charts(result), compression_height(result)
        )
    lines = tuple(compression_lines(result))
    return Section(title, compression_sentence(result), compression_table(result), plot, lines=lines)


def _scaling(study: StudyResult, experiment: PlannedExperiment, album: Album) -> Section:
    result, title = scaling(study, experiment), study.title(experiment)
    measured = any(point.throughput for point in result.points)
    plot = album.add(title, partial(draw_scaling, result=result), scaling_charts(result)) if measured else None
    forecast, why_not = _forecast(study, result, title, album)
    more = (*_time_split(study, experiment, album), *forecast, *_latency(study, experiment, album))
    lines = (*scaling_law_lines(result), *why_not)
    return Section(title, scaling_sentence(result), scaling_table(result), plot, lines=lines, more=more)


def _forecast(
    study: StudyResult, result: Scaling, title: str, album: Album
) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """The forecast as a section of its own, or a line that says why there is none."""
    found = study_forecast(study, result)
    if found is None or isinstance(found, str):
        return (), () if found is None else (found,)
    plot = album.add(f"{title} forecast", partial(draw_forecast, result=found), forecast_charts(found))
    lines = tuple(forecast_lines(found))
    return (Section("Forecast", forecast_sentence(found), forecast_table(found), plot, lines=lines),), ()


def _layouts(study: StudyResult, experiment: PlannedExperiment, album: Album) -> Section:
    result, title = layout_ranking(study, experiment), study.title(experiment)
    drawn = drawn_layouts(result)
    plot = (
        album.add(title, partial(draw_layouts, result=result), layout_charts(result), layouts_height(result))
        if drawn
        else None
    )
    more, known = _latency(study, experiment, album), drawable_layouts(result)
    told = f"The figure shows {len(drawn)} of {len(known):,} layouts: what was measured, then the best predictions."
    lines = (*([told] if len(drawn) < len(known) else []), *layouts_lines(result))
    return Section(title, layouts_sentence(result), layouts_table(result), plot, lines=lines, more=more)


def _communication(study: StudyResult, experiment: PlannedExperiment, album: Album) -> Section:
    result, title = communication(study, experiment) or [], study.title(experiment)
    links = links_table(result)
    more = () if links is None else (Section("Latency and bandwidth", LINKS_SENTENCE, links),)
    return Section(title, communication_sentence(result), communication_table(result), more=more)


def _load(study: StudyResult, experiment: PlannedExperiment, album: Album) -> Section:
    found, title = load_experiment(study, experiment), study.title(experiment)
    plot = None
    if drawn_axis(found):
        plot = album.add(title, partial(draw_load, found=found), load_charts(found), load_height(found))
    measured = any(point.valid for point in found.points)
    tables = (
        ("Search for the highest rate", LIMITS_SENTENCE, limits_table(found)),
        ("Latencies under load", LATENCIES_SENTENCE, latencies_table(found) if measured else None),
        ("Servers", SERVERS_SENTENCE, servers_table(found)),
    )
    more = [Section(name, told, table) for name, told, table in tables if table is not None]
    left_out = series_lines(len(found.series()), "series") if plot else ()
    lines = (*left_out, *load_lines(found))
    return Section(title, load_sentence(found), load_table(found), plot, lines=lines, more=tuple(more))


def _sweep(study: StudyResult, experiment: PlannedExperiment, album: Album) -> Section:
    points, title = sweep(study, experiment), study.title(experiment)
    measured = any(point.result.estimate("throughput") for point in points)
    draw, height = partial(draw_sweep, points=points), sweep_height(points)
    plot = album.add(title, draw, sweep_charts(points), height) if measured else None
    lines = series_lines(len(sweep_axes(points)[1]), "series") if plot else ()
    more = _latency(study, experiment, album)
    return Section(title, sweep_sentence(points), sweep_table(points), plot, lines=lines, more=more)


def _optimization(study: StudyResult, experiment: PlannedExperiment, album: Album) -> Section:
    (base, gains), title = optimization(study, experiment), study.title(experiment)
    plot, drawn = None, gains[:MAX_ROWS]
    if any(gain.throughput for gain in gains):
        plot = album.add(
            title, partial(draw_optimization, gains=drawn), gain_charts(drawn), height=1.35 + 0.45 * len(drawn)
        )
    told = f"The figure shows the first {MAX_ROWS} of {len(gains):,} variants, the table all."
    lines = (told,) if plot and len(gains) > MAX_ROWS else ()
    more = _latency(study, experiment, album)
    table = optimization_table(base, gains)
    return Section(title, optimization_sentence(base, gains), table, plot, lines=lines, more=more)


def _time_split(study: StudyResult, experiment: PlannedExperiment, album: Album) -> tuple[Section, ...]:
    found = time_split(study, experiment)
    if found is None or not found.names:
        return ()
    plot = album.add(
        f"{study.title(experiment)} time split", partial(draw_time_split, result=found), split_charts(found)
    )
    return (Section("Where the time goes", time_split_sentence(found), time_split_table(found), plot),)


def _latency(study: StudyResult, experiment: PlannedExperiment, album: Album) -> tuple[Section, ...]:
    """Latency of what somebody waits for; a noop's passes are nobody's."""
    found = latency(study, experiment)
    if found is None or not found.awaited:
        return ()
    curves = latency_curves(study, found)
    plot = album.add(f"{study.title(experiment)} latency", partial(draw_latency, drawn=curves), latency_charts(curves))
    shown, known = len(curves.curves), len(found.measured)
    lines = (f"The figure shows {shown} of {known:,} points, evenly chosen.",) if shown < known else ()
    return (Section("Latency", latency_sentence(found), latency_table(found), plot, lines=lines),)


def profile_section(study: StudyResult, album: Album) -> Section | None:
    """The profile pass of every cell that has one; None where none has."""
    cells = profiled_cells(study)
    if not cells:
        return None
    drawn = cells[:MOST_BARS]
    plot = album.add("time split", partial(draw_profiled, cells=drawn), profile_charts(drawn), profiled_height(drawn))
    told, lines = profiled_sentence(cells) + bars_text(cells, "cells"), tuple(profiled_lines(cells))
    return Section("Time split", told, profiled_table(cells), plot, lines=lines)


def perf_section(study: StudyResult) -> Section | None:
    """What perf counted, and where its files and those of nsys lie; None where neither was asked for."""
    cells = recorded_cells(study)
    if not cells:
        return None
    return Section("Under a profiler", perf_sentence(cells), perf_table(cells), lines=tuple(perf_lines(cells)))


def correctness_section(
    study: StudyResult, experiment: PlannedExperiment, base: CellResult, judged: list[JudgedCell]
) -> Section:
    sentence = reference_sentence(base)
    if experiment.refused:
        refused = [f"{item.label} ({item.reason})" for item in experiment.refused[:_MAX_REFUSED]]
        rest = len(experiment.refused) - len(refused)
        told = "; ".join([*refused, *([f"and {rest:,} more, which plan.json lists"] if rest else [])])
        sentence += f" Unsupported, so not judged: {told}."
    reached = dict.fromkeys(item.reach.text for item in judged if item.reach is not None)
    if reached:
        sentence += f" Answers were compared on {'; '.join(reached)}."
    completions = completions_table(study, base, judged)
    return Section(study.title(experiment), sentence, correctness_table(judged), completions=completions)
