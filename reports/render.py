"""Render the report of a run folder: `report.md`, `appendix.md`, plots, `cells.csv` and `records.parquet`.

    summary = render_report(RunPaths(folder))

Everything is derived from the plan, the records and the environments in the folder, and nothing else:
rendering again gives the same bytes. The template is made of parts; Jinja refuses unknown names.
"""

import importlib
import re
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.common.base import write_atomically
from configs.common.printable import printable
from configs.plans.paths import RunPaths
from reports import provenance, tables
from reports.answer import Sentence, answer
from reports.correctness.section import JudgedCell, judge_experiment
from reports.document.album import Album
from reports.document.assemble import assemble, rentals_section
from reports.document.cells import cells_data
from reports.document.html import LiveHeader, report_page
from reports.document.paper import compile_paper, paper_text, paper_time
from reports.document.structure import Document, anchors, as_markdown
from reports.export import cells_csv, records_parquet
from reports.preflight import preflight_sections
from reports.quality import quality_lines, stopped_table
from reports.reading.collecting import set_apart
from reports.reading.devices import load_comparable
from reports.reading.load import StudyResult
from reports.rentals import rental_overview, rental_sections
from reports.scheduler import scheduler_table
from reports.sections.decisions import decision_context
from reports.sections.experiments import (
    correctness_section,
    experiment_sections,
    experiments_of,
    perf_section,
    profile_section,
    target_sections,
)
from reports.sections.kinds import kind_parts
from reports.sections.planning import planning_context
from reports.steady_text import steady_lines, unsteady_table
from reports.templating import template_environment

if TYPE_CHECKING:
    from jinja2 import Environment

SHOWN_KINDS = ("strong", "weak", "sweep", "optimization", "compression", "layouts", "communication", "load")
"""Kinds of experiments in the order of the report."""

MAX_ROWS = 12
"""Of a table in the short form."""


@dataclass(frozen=True)
class ReportSummary:
    """What a terminal or an artifact says of the report."""

    path: Path
    sentences: tuple[str, ...]
    statuses: dict[str, int]
    cells_without_measurement: int


def preload_reports() -> None:
    """Import what rendering will need: a caller that waits for something else can have it done meanwhile."""
    drawing = ("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")
    for name in (*drawing, "pandas", "pyarrow.parquet", "scipy.special"):
        importlib.import_module(name)
    _environment().get_template("report.md.j2")


class Analysis:
    """What the records of a run say: figures, verdicts, fits, recommendations; and the data of its plots.

    A plain class: Prefect would walk through a dataclass that a task returns.
    """

    def __init__(self, study: StudyResult, album: Album, context: dict[str, Any]) -> None:
        self.study, self.album, self.context = study, album, context

    @property
    def document(self) -> Document:
        """The structure that all forms are rendered from."""
        found: Document = self.context["document"]
        return found


def analyze_run(run: RunPaths, draws: bool = True) -> Analysis:
    """Compute all that a report says. Raises the errors of `configs.records.record` for files that cannot be read.

    draws: whether images are wanted; the HTML page draws its charts itself.
    """
    study, album = load_comparable(run), Album(draws=draws)
    with set_apart():
        return Analysis(study, album, analyzed(study, album))


def render_analysis(run: RunPaths, analysis: Analysis) -> ReportSummary:
    """Write `report.md`, its plots and tables to the run folder."""
    study, sentences = analysis.study, analysis.context["sentences"]
    text, appendix = report_text(analysis.context), appendix_text(analysis.context)
    analysis.album.write(run)
    with set_apart():
        write_atomically(run.cells_csv, cells_csv(study))
        write_atomically(run.records_parquet, records_parquet(study))
    write_atomically(run.appendix, appendix)
    write_atomically(run.report, text)
    return ReportSummary(
        path=run.report,
        sentences=tuple(printable(sentence.text) for sentence in sentences),
        statuses=tables.status_counts(study),
        cells_without_measurement=sum(not result.completed for result in study.cells.values()),
    )


def render_report(run: RunPaths) -> ReportSummary:
    """Analyze and render in one.

    Again where another process, such as the run that now ends, has rendered meanwhile: it may have had more records.
    """
    before = _rendered_as(run)
    analysis = analyze_run(run)
    if _rendered_as(run) != before:
        analysis = analyze_run(run)
    return render_analysis(run, analysis)


def _rendered_as(run: RunPaths) -> tuple[int, int] | None:
    """What tells a report in the folder from a later one; None: there is none."""
    try:
        status = run.report.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def render_page(run: RunPaths, live: LiveHeader | None = None) -> str:
    """The report as one HTML page; writes nothing. Raises as `analyze_run`."""
    analysis = analyze_run(run, draws=False)
    return report_page(analysis.document, cells_data(analysis.study), live)


def write_page(run: RunPaths, analysis: Analysis) -> None:
    """Write `report.html`."""
    with set_apart():
        write_atomically(run.page, report_page(analysis.document, cells_data(analysis.study)))


def write_paper(run: RunPaths, analysis: Analysis) -> None:
    """Write `paper.typ`, the figures that it shows, and `paper.pdf`. Raises ValueError without the extra `paper`."""
    analysis.album.write(run)
    write_atomically(run.paper_source, paper_text(analysis.study, analysis.context))
    write_atomically(run.paper, compile_paper(run.paper_source, paper_time(analysis.study)))


def compose(study: StudyResult, album: Album) -> tuple[list[Sentence], str, str]:
    """The opening sentences, the report and its appendix; the figures go to `album`."""
    context = analyzed(study, album)
    return context["sentences"], report_text(context), appendix_text(context)


def analyzed(study: StudyResult, album: Album) -> dict[str, Any]:
    """All that the parts of the template say, by name; the plots' data go to `album`."""
    verdicts = [
        (experiment, *judge_experiment(study, experiment)) for experiment in experiments_of(study, "correctness")
    ]
    judged = [(base.model, item) for _, base, items in verdicts for item in items]
    sections = {
        **experiment_sections(study, album, judged),
        "correctness": [correctness_section(study, *verdict) for verdict in verdicts],
    }
    wide = _study_wide(study, album, judged)
    shown = [section for kind in SHOWN_KINDS for section in sections[kind]]
    if wide["sides"]:
        shown += wide["sides"]
    context = {**sections, **wide, "sections_shown": shown, "sentences": answer(study, judged, wide["decisions"])}
    document = assemble(context, album.charts)
    return {**context, "rented": rentals_section(context), "document": document, "anchors": anchors(document)}


def report_text(context: dict[str, Any]) -> str:
    """The short form: the decision, and a figure with its table for each question.

    Raises jinja2.UndefinedError where a part asks for what the context does not hold.
    """
    return _rendered("report.md.j2", context)


def appendix_text(context: dict[str, Any]) -> str:
    """The evidence behind it. Raises as `report_text`."""
    return _rendered("appendix.md.j2", context)


def _rendered(template: str, context: dict[str, Any]) -> str:
    text = _environment().get_template(template).render(context)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment() -> "Environment":
    environment = template_environment()
    environment.filters["md"] = as_markdown
    environment.filters["short"] = partial(tables.first_rows, where="the appendix", max_rows=MAX_ROWS)
    return environment


def _study_wide(study: StudyResult, album: Album, judged: list[tuple[str, JudgedCell]]) -> dict[str, Any]:
    """What the parts of the template need beside the experiments' sections."""
    return {
        **decision_context(study, album, judged),
        **planning_context(study, album),
        "sides": target_sections(study, album),
        "profiled": profile_section(study, album),
        "recorded": perf_section(study),
        "study": study,
        "statuses": tables.status_counts(study),
        "measurements": sum(study.plan.repeats.values()),
        "leftover": tables.leftover_sentence(study),
        "kind_parts": kind_parts(study, album),
        "resources": tables.resources_table(study),
        "loading": provenance.loading_table(study),
        "noise": tables.noise_warning(study),
        "scheduler": scheduler_table(study),
        "rentals": rental_sections(RunPaths(study.folder)),
        "rental_overview": rental_overview(RunPaths(study.folder)),
        "preflight": preflight_sections(RunPaths(study.folder)),
        "failures": tables.failures_table(study),
        "unreadable": tables.unreadable_table(study),
        "models": provenance.models_table(study),
        "models_sentence": provenance.models_sentence(study),
        "measuring": [*provenance.measuring_lines(study), *steady_lines(study), *quality_lines(study)],
        "stopped": stopped_table(study),
        "unsteady": unsteady_table(study),
        "environment": provenance.environment_table(study),
        "environments": provenance.environment_sentence(study),
        "differences": provenance.environment_differences(study),
        "provenance": provenance.provenance_table(study),
    }
