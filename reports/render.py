"""A run folder becomes its report: `report.md`, plots, `cells.csv` and `records.parquet`.

    summary = render_report(RunPaths(folder))

Everything is derived from the plan, the records and the environments in the folder, and nothing else:
rendering again gives the same bytes. The template is made of parts; Jinja refuses unknown names.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.base import write_atomically
from configs.paths import RunPaths
from configs.plan import PlannedExperiment
from reports import tables
from reports.answer import answer
from reports.comparison import (
    optimization,
    optimization_sentence,
    optimization_table,
    sweep,
    sweep_sentence,
    sweep_table,
)
from reports.correctness import Judged, completions_table, correctness_table, judge_experiment, tolerance_table
from reports.export import cells_csv, records_parquet
from reports.load import CellResult, StudyResult, load_study
from reports.plots.optimization import draw_optimization
from reports.plots.scaling import draw_scaling
from reports.plots.style import COLOURS, drawn
from reports.plots.sweep import draw_sweep, sweep_axes
from reports.plots.training import draw_losses
from reports.scaling import scaling, scaling_sentence, scaling_table
from reports.text import Table, escaped, plural

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """One experiment of one model: a figure, what to see in it, and the table behind it."""

    title: str
    sentence: str
    table: Table
    plot: str | None = None
    completions: Table | None = None


@dataclass(frozen=True)
class ReportSummary:
    """What a terminal or an artifact says of the report."""

    path: Path
    sentences: tuple[str, ...]
    statuses: dict[str, int]
    cells_without_measurement: int


@dataclass
class _Drawing:
    """The images drawn so far, by file name in `plots/`."""

    images: dict[str, bytes] = field(default_factory=dict)

    def add(self, title: str, draw: Callable[["Figure"], None], height: float = 3.1) -> str:
        """Draw and keep both formats; gives the name without suffix, which no other figure has."""
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "figure"
        name, count = slug, 1
        while f"{name}.png" in self.images:
            count += 1
            name = f"{slug}-{count}"
        for suffix, content in drawn(draw, height).items():
            self.images[f"{name}.{suffix}"] = content
        return name


def preload() -> None:
    """Import what rendering will need: a caller that waits for something else can have it done meanwhile."""
    for name in ("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "pyarrow.parquet"):
        importlib.import_module(name)
    template_environment().get_template("report.md.j2")


def render_report(run: RunPaths) -> ReportSummary:
    """Write the report of a run folder. Raises the errors of `configs.record` for files that cannot be read."""
    study = load_study(run)
    drawing = _Drawing()
    verdicts = [(experiment, *judge_experiment(study, experiment)) for experiment in _experiments(study, "correctness")]
    sections = {**_sections(study, drawing), "correctness": [_correctness(study, *verdict) for verdict in verdicts]}
    judged = [(base.model, item) for _, base, items in verdicts for item in items]
    sentences = answer(study, judged)
    text = report_text({**sections, **_study_wide(study, drawing), "sentences": sentences})
    _write_plots(run, drawing.images)
    write_atomically(run.cells_csv, cells_csv(study))
    write_atomically(run.records_parquet, records_parquet(study))
    write_atomically(run.report, text)
    return ReportSummary(
        path=run.report,
        sentences=tuple(sentence.text for sentence in sentences),
        statuses=tables.status_counts(study),
        cells_without_measurement=sum(not result.completed for result in study.cells.values()),
    )


def report_text(context: dict[str, Any]) -> str:
    """The Markdown. Raises jinja2.UndefinedError where a part asks for what the context does not hold."""
    text = template_environment().get_template("report.md.j2").render(context)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def template_environment() -> "Environment":
    """Jinja as the report uses it: unknown names are errors, nothing is escaped for HTML by itself."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(escaped=escaped, plural=plural)
    return environment


def _experiments(study: StudyResult, kind: str) -> list[PlannedExperiment]:
    return [experiment for experiment in study.plan.experiments if experiment.kind == kind and experiment.points]


def _sections(study: StudyResult, drawing: _Drawing) -> dict[str, list[Section]]:
    """The experiments' sections by kind, in the order of the study file."""
    makers = {
        "strong": _scaling,
        "weak": _scaling,
        "sweep": _sweep,
        "optimization": _optimization,
    }
    return {
        kind: [maker(study, experiment, drawing) for experiment in _experiments(study, kind)]
        for kind, maker in makers.items()
    }


def _scaling(study: StudyResult, experiment: PlannedExperiment, drawing: _Drawing) -> Section:
    result, title = scaling(study, experiment), study.title(experiment)
    measured = any(point.throughput for point in result.points)
    plot = drawing.add(title, partial(draw_scaling, result=result)) if measured else None
    return Section(title, scaling_sentence(result), scaling_table(result), plot)


def _sweep(study: StudyResult, experiment: PlannedExperiment, drawing: _Drawing) -> Section:
    points, title = sweep(study, experiment), study.title(experiment)
    measured = any(point.result.estimate("throughput") for point in points)
    height = 3.1 + 0.2 * (len(sweep_axes(points)[1]) // 3)  # the legend has a line for three series
    plot = drawing.add(title, partial(draw_sweep, points=points), height) if measured else None
    return Section(title, sweep_sentence(points), sweep_table(points), plot)


def _optimization(study: StudyResult, experiment: PlannedExperiment, drawing: _Drawing) -> Section:
    (base, gains), title = optimization(study, experiment), study.title(experiment)
    plot = None
    if any(gain.throughput for gain in gains):
        plot = drawing.add(title, partial(draw_optimization, gains=gains), height=1.2 + 0.45 * len(gains))
    return Section(title, optimization_sentence(base, gains), optimization_table(base, gains), plot)


def _correctness(study: StudyResult, experiment: PlannedExperiment, base: CellResult, judged: list[Judged]) -> Section:
    sentence = f"The reference is {base.name}: unmodified, in a launch of its own."
    completions = completions_table(study, base, judged)
    return Section(study.title(experiment), sentence, correctness_table(judged), completions=completions)


def _study_wide(study: StudyResult, drawing: _Drawing) -> dict[str, Any]:
    """What the parts of the template need beside the experiments' sections."""
    curves = {}
    for result in study.cells.values():
        if result.cell.workload.kind == "train" and result.completed:
            losses = tables.loss_curve(study, result.completed[min(result.completed)])
            if losses is not None:
                curves[result.title] = losses
    height = 2.6 + 0.2 * min(len(curves), len(COLOURS))  # the legend has a line for each
    loss_plot = drawing.add("training loss", partial(draw_losses, curves=curves), height) if curves else None
    return {
        "study": study,
        "statuses": tables.status_counts(study),
        "visits": sum(study.plan.repeats.values()),
        "leftover": tables.leftover_sentence(study),
        "tolerances": tolerance_table(),
        "training": tables.training_table(study),
        "loss_plot": loss_plot,
        "resources": tables.resources_table(study),
        "loading": tables.loading_table(study),
        "noise": tables.noise_warning(study),
        "failures": tables.failures_table(study),
        "models": tables.models_table(study),
        "measuring": tables.measuring_lines(study),
        "environment": tables.environment_table(study),
        "environments": tables.environment_sentence(study),
        "differences": tables.environment_differences(study),
        "provenance": tables.provenance_table(study),
    }


def _write_plots(run: RunPaths, images: dict[str, bytes]) -> None:
    """Write the images, and remove those of an earlier report that this one does not show."""
    if images:
        run.plots.mkdir(exist_ok=True)
    for old in run.plots.glob("*") if run.plots.is_dir() else []:
        if old.suffix in (".png", ".svg") and old.name not in images:
            old.unlink()
    for name, content in images.items():
        write_atomically(run.plots / name, content)
