"""A run folder becomes its report: `report.md`, plots, `cells.csv` and `records.parquet`.

    summary = render_report(RunPaths(folder))

Everything is derived from the plan, the records and the environments in the folder, and nothing else:
rendering again gives the same bytes. The template is made of parts; Jinja refuses unknown names.
"""

import importlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.base import write_atomically
from configs.paths import RunPaths
from reports import provenance, tables
from reports.answer import answer
from reports.decisions.context import decision_context
from reports.experiments.correctness import Judged, judge_experiment
from reports.experiments.sections import (
    correctness_section,
    experiment_sections,
    experiments_of,
    perf_section,
    profile_section,
    target_sections,
)
from reports.experiments.training_sections import strategy_sections, trained_sections
from reports.export import cells_csv, records_parquet
from reports.planning.text import planning_context
from reports.plots.album import Album
from reports.plots.style import COLOURS
from reports.plots.training import draw_losses
from reports.preflight import preflight_sections
from reports.quality import quality_lines, stopped_table
from reports.reading.load import StudyResult, load_study
from reports.scheduler import scheduler_table
from reports.steady_text import steady_lines, unsteady_table
from reports.text import escaped, plural

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class ReportSummary:
    """What a terminal or an artifact says of the report."""

    path: Path
    sentences: tuple[str, ...]
    statuses: dict[str, int]
    cells_without_measurement: int


def preload() -> None:
    """Import what rendering will need: a caller that waits for something else can have it done meanwhile."""
    drawing = ("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")
    for name in (*drawing, "pyarrow.parquet", "scipy.stats"):
        importlib.import_module(name)
    template_environment().get_template("report.md.j2")


def render_report(run: RunPaths) -> ReportSummary:
    """Write the report of a run folder. Raises the errors of `configs.record` for files that cannot be read."""
    study = load_study(run)
    album = Album()
    verdicts = [
        (experiment, *judge_experiment(study, experiment)) for experiment in experiments_of(study, "correctness")
    ]
    judged = [(base.model, item) for _, base, items in verdicts for item in items]
    sections = {
        **experiment_sections(study, album, judged),
        "correctness": [correctness_section(study, *verdict) for verdict in verdicts],
    }
    sentences = answer(study, judged)
    text = report_text({**sections, **_study_wide(study, album, judged), "sentences": sentences})
    album.write(run)
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


def _study_wide(study: StudyResult, album: Album, judged: list[tuple[str, Judged]]) -> dict[str, Any]:
    """What the parts of the template need beside the experiments' sections."""
    curves = {}
    for result in study.cells.values():
        if result.cell.workload.kind == "train" and result.completed:
            losses = tables.loss_curve(study, result.completed[min(result.completed)])
            if losses is not None:
                curves[result.title] = losses
    height = 2.6 + 0.2 * min(len(curves), len(COLOURS))  # the legend has a line for each
    loss_plot = album.add("training loss", partial(draw_losses, curves=curves), height) if curves else None
    return {
        **decision_context(study, album, judged),
        **planning_context(study, album),
        "sides": target_sections(study, album),
        "profiled": profile_section(study, album),
        "recorded": perf_section(study),
        "study": study,
        "statuses": tables.status_counts(study),
        "visits": sum(study.plan.repeats.values()),
        "leftover": tables.leftover_sentence(study),
        "training": tables.training_table(study),
        "loss_plot": loss_plot,
        "trained": trained_sections(study, album),
        "strategies": strategy_sections(study, album),
        "resources": tables.resources_table(study),
        "loading": provenance.loading_table(study),
        "noise": tables.noise_warning(study),
        "scheduler": scheduler_table(study),
        "preflight": preflight_sections(RunPaths(study.folder)),
        "failures": tables.failures_table(study),
        "models": provenance.models_table(study),
        "measuring": [*provenance.measuring_lines(study), *steady_lines(study), *quality_lines(study)],
        "stopped": stopped_table(study),
        "unsteady": unsteady_table(study),
        "environment": provenance.environment_table(study),
        "environments": provenance.environment_sentence(study),
        "differences": provenance.environment_differences(study),
        "provenance": provenance.provenance_table(study),
    }
