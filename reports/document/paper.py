"""The report as a paper in two columns: Typst source made by Jinja, compiled to PDF/A by the package `typst`.

    source = paper_text(study, context)             # paper.typ; its figures are plots/*.svg beside it
    pdf = compile_paper(run.paper_source, paper_time(study))     # the extra `paper`

Every text goes into the source as a string literal, so that no name or log is read as markup. Compiling again gives
the same bytes: the time is that of the last record, and fonts are those of the package.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.common.printable import printable, shortened
from reports.document.assemble import EXPERIMENTS
from reports.document.inline import inline_plain, tokens
from reports.document.references import REFERENCES
from reports.document.structure import Document, Section, as_markdown
from reports.numbers.statistics import LEAST_REPEATS
from reports.reading.load import StudyResult
from reports.text import UNKNOWN, Table, first_of, joined, plural

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_ROWS, MAX_COLUMNS = 9, 9
"""Of a table in the paper; the appendix has all of it."""
MAX_CELL = 90
_MAX_WORD = 16
_LONG_WORD = re.compile(rf"\S{{{_MAX_WORD + 1},}}")
IN_WORDS = ("Latency",)
"""Sections whose sentence stands alone; the appendix has their figures and tables."""
LEFT_OUT = ("Speed and utilization", "Checkpoints")
"""Sections that only the appendix has: throughput is in the results of the experiments."""
_ALIKE = ("Latency", "Where the time goes")
_PREDICTION = "Prediction against measurement"
_WHERE_SCALING_ENDS = ("strong", "weak")


@dataclass(frozen=True)
class Result:
    """A section of the results, with its sections below in one list."""

    title: str
    question: str
    method: str
    parts: tuple[Section, ...]


def paper_text(study: StudyResult, context: Mapping[str, Any]) -> str:
    """The Typst source."""
    document: Document = context["document"]
    return (
        _environment()
        .get_template("paper.typ.j2")
        .render(
            document=document,
            facts=_facts(study),
            results=_results(document),
            limits=_limits(context),
            threats=_threats(study, context),
            how=next(section for section in document.sections if section.title == "How it was measured"),
            reproducing=_reproducing(study, context),
            references=REFERENCES,
            date=paper_time(study).date().isoformat(),
        )
    )


_WAYS_TO_COMPILE: tuple[tuple[bool, Literal["a-2b"] | None], ...] = ((True, "a-2b"), (False, "a-2b"), (True, None))
"""Whether by Typst's own fonts alone, which are the same everywhere, and the standard. Names in Chinese, say, need a
font of this machine; without one they are boxes, which PDF/A does not allow."""


def compile_paper(source: Path, moment: datetime) -> bytes:
    """The PDF. Raises ValueError where the extra is missing, or the source does not compile."""
    try:
        import typst
    except ImportError as error:
        raise ValueError("--format pdf: typst is not installed. Run: pip install 'rankwise[paper]'") from error
    failed: Exception | None = None
    for own_fonts, standard in _WAYS_TO_COMPILE:
        try:
            found = typst.compile(
                str(source),
                root=str(source.parent),
                timestamp=moment,
                ignore_system_fonts=own_fonts,
                pdf_standards=standard,
            )
        except typst.TypstError as error:
            failed = error
            if "could not be displayed" not in str(error):
                break
        else:
            assert isinstance(found, bytes)
            return found
    raise ValueError(f"{source}: typst cannot compile it: {printable(str(failed), 300)}") from failed


def paper_time(study: StudyResult) -> datetime:
    """When the last record was finished; the epoch without one."""
    ended = [reading.record.finished_at for reading in study.readings if reading.record.finished_at]
    return (
        datetime.fromisoformat(max(ended)).astimezone(UTC).replace(microsecond=0)
        if ended
        else datetime(1970, 1, 1, tzinfo=UTC)
    )


def _facts(study: StudyResult) -> dict[str, str]:
    plan = study.plan
    kinds = [kind for kind in EXPERIMENTS if any(one.kind == kind and one.points for one in plan.experiments)]
    judged = ["correctness"] if any(one.kind == "correctness" and one.points for one in plan.experiments) else []
    known = [f"{model.name}{' (random weights)' if model.synthetic else ''}" for model in plan.models]
    most = max((result.cell.layout.ranks for result in study.cells.values()), default=1)
    return {
        "models": joined(known) or "no model",
        "targets": f"target{'' if len(plan.targets) == 1 else 's'} {joined([target.name for target in plan.targets])}",
        "experiments": joined([*(EXPERIMENTS[kind].lower() for kind in kinds), *judged]) or "none",
        "ranks": plural(most, "rank"),
    }


def _results(document: Document) -> tuple[Result, ...]:
    """The sections that answer a question of the study, flat."""
    wanted = {*EXPERIMENTS.values(), "Targets side by side", "Time split", "Correctness", "Training", "Strategies"}
    wanted |= {"Objectives", _PREDICTION}
    found = (
        Result(section.title, section.question, section.method, tuple(_flat(section)))
        for section in document.sections
        if section.title in wanted
    )
    return tuple(result for result in found if result.title != _PREDICTION or any(part.plot for part in result.parts))


def _flat(section: Section, within: str = "") -> Iterator[Section]:
    """A section and those below it; the caption of one of several alike names what it is a part of."""
    if section.title in LEFT_OUT:
        return
    if section.sentence or section.table or section.plot:
        title = f"{section.title} in {within}" if within and section.title in _ALIKE else section.title
        drawn_below = any(part.title == "The same learning" and part.plot for part in section.more)
        shown = replace(section, title=title, plot=None if drawn_below else section.plot)
        yield replace(shown, plot=None, table=None) if section.title in IN_WORDS else shown
    for part in section.more:
        yield from _flat(part, section.title)


def _limits(context: Mapping[str, Any]) -> tuple[str, ...]:
    """What the scaling sections say of the end of scaling: laws and forecasts, what several have in common once."""
    found: list[str] = []
    for kind in _WHERE_SCALING_ENDS:
        for section in context[kind]:
            below = [part for part in section.more if part.title == "Forecast"]
            lines = [*section.lines, *(part.sentence for part in below), *(line for p in below for line in p.lines)]
            own = [line for line in lines if line not in found]
            found += [f"{section.title}: {own[0]}", *own[1:]] if own else []
    return tuple(found)


def _threats(study: StudyResult, context: Mapping[str, Any]) -> tuple[str, ...]:
    """What could make the figures wrong, as far as the records show it."""
    found = []
    timed = [
        result for result in study.cells.values() if not result.cell.workload.keeps_answers
    ]  # kept once, by design
    few = [result for result in timed if result.completed and len(result.completed) < LEAST_REPEATS]
    if few:
        verb, whose = ("has", "its") if len(few) == 1 else ("have", "their")
        found.append(
            f"{len(few):,} of {plural(len(timed), 'cell')} {verb} fewer than six repeats: {whose} bounds are the "
            "range of the repeats, which is not a confidence interval."
        )
    if context["noise"]:
        found.append(context["noise"])
    lost = [result for result in study.cells.values() if not result.completed]
    if lost:
        named = first_of([f"{shortened(result.title, 90)} ({result.status.replace('_', ' ')})" for result in lost], 4)
        found.append(f"{plural(len(lost), 'cell')} without a figure: {named}.")
    random = [model.name for model in study.plan.models if model.synthetic]
    if random:
        found.append(
            f"{joined(random)} {'has' if len(random) == 1 else 'have'} random weights: speed and memory are those of "
            "the architecture, and answers mean nothing."
        )
    if context["unsteady"]:
        found.append("Some measurements reached no steady state; the appendix lists them.")
    if study.unreadable:
        verb = "is" if len(study.unreadable) == 1 else "are"
        found.append(f"{plural(len(study.unreadable), 'file')} could not be read and {verb} left out.")
    hosts = {host for reading in study.readings if reading.used for host in reading.record.hosts}
    if len(hosts) == 1:
        found.append("All ranks ran on one machine: nothing here shows what a network between machines would cost.")
    found.append("Each repeat is a launch of its own; what changes between days or sites is not in the intervals.")
    return tuple(found)


def _reproducing(study: StudyResult, context: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Name and value of what one needs to measure it again."""
    wanted = ("commit", "dirty", "python", "torch", "cpu", "cores", "kernel", "platform", "slurm")
    table = context["environment"]
    known = {inline_plain(row[0]): inline_plain(row[1]) for row in table.rows} if table else {}
    found = [(name, value) for name, value in known.items() if name.rpartition(".")[2] in wanted or name in wanted]
    return (
        ("study", study.plan.study),
        ("models", joined([model.identity for model in study.plan.models]) or UNKNOWN),
        ("command", "rankwise run study.yaml (kept in the run folder)"),
        ("data", "records.parquet has a row for each record, cells.csv one for each cell"),
        *((name, shortened(value, 90)) for name, value in found[:12]),
    )


@cache
def _environment() -> "Environment":
    """Jinja whose every text must go through `typ` or `rich`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from reports.templating import TEMPLATES

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        variable_start_string="<<", variable_end_string=">>", comment_start_string="<#", comment_end_string="#>",
    )  # fmt: skip
    environment.filters.update(
        typ=literal, rich=rich, grid=_grid, common=_common, left_out=_left_out, quoted=_quoted, cite=_cite
    )
    return environment


def _cite(key: str) -> str:
    """`[3]`, by the order of the references."""
    return literal(f"[{list(REFERENCES).index(key) + 1}]")


def literal(text: str) -> str:
    """A text as a string literal that ends its own expression: nothing after it is taken for a call."""
    unbroken = str(text).replace(" %", "\u00a0%")  # a number stays on one line with its per cent sign
    return f"#{_quoted(unbroken)};"


def rich(text: str) -> str:
    """A text of a section: code, and emphasis where it is Markdown."""
    parts, bold = [], False
    for kind, value in tokens(as_markdown(text)):
        if kind == "bold":
            bold = not bold
        elif kind == "code":
            parts.append(f"#raw({_quoted(value)});")
        else:
            parts.append(f"#strong({_quoted(value)});" if bold else literal(value))
    return "".join(parts)


def _quoted(text: str) -> str:
    flat = printable(" ".join(str(text).split(" ")))
    return '"' + flat.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _same_columns(table: Table) -> list[int]:
    """Columns of text whose value is the same in every row of several: the caption tells it once."""
    if len(table.rows) < 2:
        return []
    texts = range(1 if table.text_columns == 1 else 0, table.text_columns)
    same = [index for index in texts if len({row[index] for row in table.rows}) == 1]
    return same if len(same) < table.text_columns else same[1:]


def _common(table: Table) -> str:
    """What every row has in common, for the caption: ` Every row: model llama-40m.`"""
    cut = table.without_empty_columns()
    told = [f"{inline_plain(cut.columns[index])} {inline_plain(cut.rows[0][index])}" for index in _same_columns(cut)]
    return f" Every row: {', '.join(told)}." if told else ""


def _columns(cut: Table) -> list[int]:
    """Those that tell rows apart, in the order of the table."""
    same = _same_columns(cut)
    return [index for index in range(len(cut.columns)) if index not in same]


def _left_out(table: Table) -> str:
    """What the paper's form of a table lacks, for the caption: ` Shown: 9 of 12 rows; the appendix has all.`"""
    cut = table.without_empty_columns()
    rows = len(cut.rows) - bool(cut.left_out) + cut.left_out
    counts = (("row", rows, MAX_ROWS), ("column", len(_columns(cut)), MAX_COLUMNS))
    parts = [f"{most} of {plural(count, what)}" for what, count, most in counts if count > most]
    return f" Shown: {joined(parts)}; the appendix has all." if parts else ""


def _breakable(text: str) -> str:
    """A literal with places to break words that are longer than a column is wide, and were printed over the next."""
    parts = _LONG_WORD.sub(lambda word: "\n".join(textwrap.wrap(word[0], _MAX_WORD)), text.replace("\n", " "))
    return "#sym.zws;".join(map(literal, parts.split("\n")))


def _grid(table: Table) -> str:
    """A table, cut to what fits on a page: the first rows and columns."""
    cut = table.without_empty_columns()
    columns = _columns(cut)[:MAX_COLUMNS]
    align = ", ".join("left" if index < cut.text_columns else "right" for index in columns)
    cells = [f"[*{literal(inline_plain(cut.columns[index]))}*]" for index in columns]
    for row in cut.rows[:MAX_ROWS]:
        cells += [f"[{_breakable(shortened(inline_plain(row[index]), MAX_CELL))}]" for index in columns]
    widths = ", ".join("auto" for _ in columns)
    return f"table(columns: ({widths},), align: ({align},), {', '.join(cells)})"
