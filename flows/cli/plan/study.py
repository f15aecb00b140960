"""`rankwise plan STUDY.yaml`: predict the performance and cost of every cell of a study before it is run.

rankwise plan study.yaml
rankwise plan study.yaml --accelerator aws/p5.48xlarge      # as if it ran there
rankwise plan study.yaml --learn-from 'runs/*' --output cells.csv
"""

import csv
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.common.printable import csv_text, plural, plural_noun
from configs.plans.plan import PlannedExperiment
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.spec.study import load_study
from configs.workloads import descriptor_of
from engine.planner.cells import interval
from flows.cli.options import write_output
from flows.cli.plan.planned_study import PlannedStudy, planned
from flows.cli.plan.request import NOTHING_FITS, PLANNED
from flows.cli.tables import print_table
from flows.folders import cache_folder
from reports.planning.text import sources

_HEADER = ("", "ranks", "predicted", "low to high", "TTFT", "peak memory", "fits", "USD / M tokens")
_MODELS_IN_ANSWER = 3


def plan_study(
    path: Path,
    assignments: list[str],
    as_json: bool = False,
    top: int = 12,
    learn_from: str | None = None,
    machine: str | None = None,
    output: Path | None = None,
    own: Path | None = None,
) -> int:
    """Predict a study and print it. Returns the exit code, 3 where no cell fits.

    top: maximum rows per experiment. machine: `provider/instance`, or an accelerator of the catalog, instead of
    the targets' own. learn_from: glob of run folders. output: CSV of all cells. own: the user's catalog file.
    Raises StudyError, and ValueError naming the wrong option.
    """
    study = planned(load_study(path, assignments), path.parent, cache_folder(), learn_from, machine, own)
    if output is not None:
        write_output(output, cells_csv(study))
    code = NOTHING_FITS if all(said.fits is False for said in study.plan.predictions.values()) else PLANNED
    if as_json:
        print(json.dumps(as_data(study), indent=1))
        return code
    print_plan(study, top)
    if output is not None:
        print(f"{plural(len(study.plan.cells), 'cell')} written to {output}")
    return code


def print_plan(study: PlannedStudy, top: int) -> None:
    """Print the summary, then a table for each experiment."""
    print(answer(study))
    for line in _remarks(study):
        print(f"  {line}")
    for experiment in study.plan.experiments:
        print()
        _print_experiment(study, experiment, top)


def answer(study: PlannedStudy) -> str:
    """Return a one-sentence summary: best prediction, cells that do not fit, duration and cost."""
    plan, said = study.plan, study.plan.predictions
    parts = [f"{plan.study}: {plural(len(plan.cells), 'cell')}"]
    for model in plan.models[:_MODELS_IN_ANSWER]:
        keys = [key for key, cell in plan.cells.items() if cell.model == model.identity and _runs(said[key])]
        if keys:
            best = max(keys, key=lambda key: said[key].throughput or 0.0)
            cell = plan.cells[best]
            where = f" on {cell.target}" if len(plan.targets) > 1 else ""
            parts.append(f"{model.name} predicted fastest at {cell.label}{where}: {_rate(cell, said[best])}")
    too_large = sum(1 for each in said.values() if each.fits is False)
    unknown = sum(1 for each in said.values() if each.throughput is None)
    if too_large:
        parts.append(f"{too_large} {'does' if too_large == 1 else 'do'} not fit")
    elif all(each.fits for each in said.values()):
        parts.append("all fit")
    if unknown:
        parts.append(f"{unknown} without a prediction")
    return "; ".join([*parts, study.cost.text]) + "."


def _runs(said: Prediction) -> bool:
    """Whether a cell is predicted to have a speed: what does not fit has none."""
    return said.throughput is not None and said.fits is not False


def _remarks(study: PlannedStudy) -> list[str]:
    stand_on = sources(study.basis)
    lines = [f"speeds: {text}" for text in stand_on[:3]]
    if len(stand_on) > 3:
        lines.append(f"speeds: {plural(len(stand_on) - 3, 'more source')}")
    learned = correction_text(list(study.plan.predictions.values()))
    lines += [line for line in (learned, study.learnt) if line]
    reasons: dict[str, int] = {}
    for said in study.plan.predictions.values():
        if said.reason:
            reasons[said.reason] = reasons.get(said.reason, 0) + 1
    lines += [f"{count} x {reason}" for reason, count in list(reasons.items())[:3]]
    return lines + ([study.advice] if study.advice else [])


def correction_text(predictions: Sequence[Prediction]) -> str | None:
    """Return the correction of the times and its number of records; None without a correction."""
    taught = [said for said in predictions if said.correction is not None]
    if not taught:
        return None
    times = sorted(said.correction or 1.0 for said in taught)
    middle, records = statistics.median(times), max(said.learnt_from for said in taught)
    spread = "" if times[-1] - times[0] < 0.005 else f" ({times[0]:.2f} to {times[-1]:.2f} by cell)"
    return f"corrected: time x {middle:.2f}{spread}, from {plural(records, 'record')} of this machine"


def _print_experiment(study: PlannedStudy, experiment: PlannedExperiment, top: int) -> None:
    plan = study.plan
    model = f": {experiment.model}" if experiment.model else ""
    points = list(experiment.points)
    shown = points
    title = f"{experiment.name}{model}"
    if len(points) > top:
        shown = sorted(points, key=lambda point: _place(study.said(point.cell)))[:top]
        title += f": {top} predicted fastest of {len(points)}"
    print(title)
    header = tuple("step" if name == "TTFT" and _trains(study, experiment) else name for name in _HEADER)
    rows = [_row(point.label, plan.cells[point.cell], study.said(point.cell)) for point in shown]
    print_table(header, rows)
    if experiment.candidates:
        _print_candidates(plan.cells[points[0].cell], experiment, top)


def _place(said: Prediction) -> tuple[bool, float]:
    """For sorting: the fastest first, and what does not fit behind all that does."""
    return said.fits is False, -(said.throughput or 0.0)


def _print_candidates(cell: Cell, experiment: PlannedExperiment, top: int) -> None:
    """Print all layouts by predicted rank and whether each is measured."""
    shown = experiment.candidates[:top]
    print(
        f"ranking of {plural(len(experiment.candidates), 'layout')}"
        + (f", the first {top}" if len(experiment.candidates) > top else "")
    )
    rows = [
        (
            each.label,
            "yes" if each.cell else f"no: {each.reason}",
            _rate(cell, each.prediction, "-"),
            {None: "-", True: "yes", False: "NO"}[each.prediction.fits],
        )
        for each in shown
    ]
    print_table(("layout", "to be measured", "predicted", "fits"), rows, words=2)


def _trains(study: PlannedStudy, experiment: PlannedExperiment) -> bool:
    return any(descriptor_of(study.plan.cells[point.cell].workload).trains for point in experiment.points)


def _row(label: str, cell: Cell, said: Prediction) -> tuple[str, ...]:
    first = said.ttft_seconds if said.ttft_seconds is not None else said.step_seconds
    bounds = interval(said.throughput, said.factor) if said.throughput is not None else None
    return (
        label,
        str(cell.layout.ranks),
        _rate(cell, said, "-"),
        f"{_short(bounds[0])} to {_short(bounds[1])}" if bounds else "-",
        "-" if first is None else f"{_short(first * 1e3)} ms" if first < 0.9995 else f"{_short(first)} s",
        "-" if said.peak_memory_bytes is None else f"{said.peak_memory_bytes / 2**20:,.0f} MiB",
        {None: "-", True: "yes", False: "NO"}[said.fits],
        "-" if said.usd_per_million_tokens is None else _short(said.usd_per_million_tokens),
    )


def _rate(cell: Cell, said: Prediction, unknown: str = "unknown") -> str:
    known = descriptor_of(cell.workload)
    rate = getattr(said, known.throughput)
    return unknown if rate is None else f"{_short(rate)} {plural_noun(known.unit)}/s"


def _short(value: float) -> str:
    """Format with three significant digits, or with all digits of an integer."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def as_data(study: PlannedStudy) -> dict[str, Any]:
    """Return the complete plan as plain data."""
    plan = study.plan
    return {
        "study": plan.study,
        "answer": answer(study),
        "basis": list(study.basis),
        "advice": study.advice,
        "correction": correction_text(list(plan.predictions.values())),
        "learnt": study.learnt,
        "launches": study.cost.launches,
        "measurements": study.cost.measurements,
        "seconds": study.cost.seconds,
        "usd": study.cost.usd,
        "experiments": [
            {
                "name": experiment.name,
                "kind": experiment.kind,
                "model": experiment.model,
                "points": [{"label": point.label, "cell": point.cell} for point in experiment.points],
                "candidates": [
                    {
                        "label": each.label,
                        "cell": each.cell,
                        "not_measured": each.reason,
                        **each.prediction.model_dump(mode="json"),
                    }
                    for each in experiment.candidates
                ],
            }
            for experiment in plan.experiments
        ],
        "cells": {
            key: {
                "label": cell.label,
                "target": cell.target,
                "ranks": cell.layout.ranks,
                **study.said(key).model_dump(mode="json"),
            }
            for key, cell in plan.cells.items()
        },
    }


def cells_csv(study: PlannedStudy) -> str:
    """Write a CSV row for each point of each experiment."""
    names = [name for name in Prediction.model_fields if name != "factor"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "model", "label", "cell", "ranks", *names, "throughput_low", "throughput_high"])
    for experiment in study.plan.experiments:
        for point in experiment.points:
            said = study.said(point.cell)
            bounds = interval(said.throughput, said.factor) if said.throughput is not None else None
            values = [*(getattr(said, name) for name in names), *(bounds or (None, None))]
            ranks = study.plan.cells[point.cell].layout.ranks
            row = (experiment.name, experiment.model, point.label, point.cell, ranks, *values)
            writer.writerow(map(csv_text, row))
    return text.getvalue()
