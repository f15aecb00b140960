"""Build the document of a report from what the sections' makers found (`reports.render.analyzed`).

    document = assemble(context, album.charts)

What says nothing has no section. The order is that of reading: decision, experiments, correctness, cost, predictions,
resources, failures, how it was measured.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from configs.plans.passes import passes_of
from reports.charts.chart import Chart
from reports.decisions.nodes import NodeTable
from reports.document.methods import METHODS, QUESTIONS
from reports.document.structure import Document, Markdown, Section
from reports.reading.load import StudyResult
from reports.text import Table, escaped, plural

EXPERIMENTS = {
    "strong": "Strong scaling",
    "weak": "Weak scaling",
    "sweep": "Sweep",
    "optimization": "Optimization",
    "compression": "Compression",
    "layouts": "Layouts",
    "load": "Load",
    "communication": "Communication",
}

TemplateContext = Mapping[str, Any]
NamedTables = tuple[tuple[str, Table], ...]


def assemble(context: TemplateContext, charts: Mapping[str, tuple[Chart, ...]]) -> Document:
    """The document. Raises KeyError where the context lacks a part."""
    study: StudyResult = context["study"]
    found = (
        _recommendations(context),
        _objectives(context),
        *(_group(title, kind, context[kind]) for kind, title in EXPERIMENTS.items()),
        _group("Targets side by side", "targets", context["sides"]),
        _lone("profile", context["profiled"]),
        _lone("perf", context["recorded"]),
        _correctness(context["correctness"]),
        *context["kind_parts"],
        _cost(context),
        _nodes(context),
        _predictions(context),
        _resources(context),
        _scheduler(context["scheduler"]),
        rentals_section(context),
        _preflight(context["preflight"]),
        failures_section(context),
        _how(context),
    )
    return Document(
        title=study.plan.study,
        sentences=tuple((one.lead, one.body, one.evidence) for one in context["sentences"]),
        counts=counts_text(context),
        sections=tuple(section for section in found if section is not None),
        next_lines=tuple(context["next_lines"]),
        charts=dict(charts),
    )


def counts_text(context: TemplateContext) -> str:
    """How many measurements were planned and how they ended, and the further passes, which measure a cell once."""
    ended = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in context["statuses"].items()) or "none"
    cells = plural(len(context["study"].cells), "cell")
    left = f" {context['leftover']}" if context["leftover"] else ""
    plan = context["study"].plan
    passes = Counter(name for key in plan.cells for name in passes_of(plan, key))
    further = ", ".join(f"{count:,} {name}" for name, count in passes.items())
    more = f" Further passes planned: {further}." if further else ""
    return f"{plural(context['measurements'], 'measurement')} of {cells} planned: {ended}.{more}{left}"


def _tables(*pairs: tuple[str, Table | None]) -> NamedTables:
    return tuple((title, table) for title, table in pairs if table)


def _group(title: str, kind: str, sections: Sequence[Section]) -> Section | None:
    if not sections:
        return None
    return Section(title, question=QUESTIONS[kind], method=METHODS.get(kind, ""), more=tuple(sections))


def _lone(kind: str, section: Section | None) -> Section | None:
    if section is None:
        return None
    return Section(
        section.title,
        section.sentence,
        section.table,
        section.plot,
        lines=section.lines,
        question=QUESTIONS[kind],
        method=METHODS[kind],
    )


def _recommendations(context: TemplateContext) -> Section | None:
    known, saved, unknown = context["recommendations"], context["savings"], context["unknown_savings"]
    if not (known or saved or unknown):
        return None
    more: tuple[Section, ...] = ()
    if saved or unknown:
        purpose = context["purpose"]
        told = (
            f"For {purpose} use."
            if purpose
            else "For batch, serving and hybrid use; `purpose` in the study chooses one."
        )
        lines = (Markdown(unknown),) if unknown else ()
        text = Markdown(f"{told} Only savings that this study's prices, records or inputs quantify have a number.")
        more = (Section("What savings would bring", text, saved, lines=lines),)
    return Section(
        "Recommendations",
        question=QUESTIONS["recommendations"],
        method=METHODS["recommendations"],
        table=known,
        lines=tuple(context["recommendation_lines"]),
        more=more,
    )


def _objectives(context: TemplateContext) -> Section | None:
    if not context["objectives"]:
        return None
    return Section(
        "Objectives",
        question=QUESTIONS["objectives"],
        method=METHODS["objectives"],
        tables=_tables(("", context["objectives_summary"]), ("", context["objectives"])),
        lines=tuple(context["objectives_lines"]),
    )


def _correctness(sections: Sequence[Section]) -> Section | None:
    return _group("Correctness", "correctness", sections)


def _cost(context: TemplateContext) -> Section | None:
    more = []
    if context["cost_table"]:
        tables = _tables(("", context["cost_table"]), ("", context["cost_phases"]))
        sentence = Markdown(context["cost_sentence"])
        more.append(Section("Of the study", sentence, tables=tables, method=METHODS["study cost"]))
    if context["unit_costs"]:
        units, bars = context["cost_units"], context["max_bars"]
        plots = tuple(
            Section(
                f"Dollars per million {units[kind]} ({kind})",
                f"The cheapest cells first, {bars} at most; bars over the medians are intervals, or ranges of too "
                "few repeats.",
                plot=plot,
            )
            for kind, plot in context["cost_plots"].items()
        )
        more.append(Section("Of the work", table=context["unit_costs"], more=plots))
    lines = tuple(Markdown(line) for line in context["cost_lines"])
    if context["fronts"]:
        told = Markdown(context["fronts_sentence"])
        more.append(Section("Trade-offs", told, question=QUESTIONS["fronts"], more=tuple(context["fronts"])))
    return Section("Cost", question=QUESTIONS["cost"], lines=lines, more=tuple(more)) if lines or more else None


def _nodes(context: TemplateContext) -> Section | None:
    if not context["nodes"]:
        return None
    groups = {
        "Latency": _comparing(context["node_latency"]),
        "Throughput": _comparing(context["node_throughput"]),
        "Peak memory": _comparing(context["node_memory"]),
    }
    more = tuple(Section(title, tables=tables) for title, tables in groups.items() if tables)
    sentence = Markdown(context["nodes_sentence"]) if more else ""
    return Section("Nodes", sentence, context["nodes"], question=QUESTIONS["nodes"], more=more)


def _comparing(tables: Sequence[NodeTable]) -> NamedTables:
    """Those of several nodes or batches: the figure of one cell alone stands in its experiment."""
    return tuple((item.title, item.table) for item in tables if len(item.table.rows) > 1 or len(item.table.columns) > 2)


def _predictions(context: TemplateContext) -> Section:
    tables = _tables(("", context["prediction_errors"]), ("", context["prediction_cells"]))
    return Section(
        "Prediction against measurement",
        context["prediction_sentence"],
        plot=context["prediction_plot"],
        question=QUESTIONS["prediction"],
        lines=tuple(context["prediction_lines"]),
        tables=tables,
    )


def _resources(context: TemplateContext) -> Section | None:
    resources, loading, noise = context["resources"], context["loading"], context["noise"]
    if not (resources or loading):
        return None
    more = (Section("Loading", table=loading),) if loading else ()
    sentence = Markdown(f"**Noise.** {escaped(noise)}") if noise else ""
    return Section(
        "Memory and CPU",
        sentence,
        resources,
        question=QUESTIONS["resources"],
        method=METHODS["resources"],
        more=more,
    )


def _scheduler(table: Table | None) -> Section | None:
    if not table:
        return None
    return Section("Scheduler", table=table, question=QUESTIONS["scheduler"], method=METHODS["scheduler"])


def rentals_section(context: TemplateContext) -> Section | None:
    """What was rented, what it cost, and what could not be given back."""
    if not context["rentals"]:
        return None
    more = tuple(
        Section(
            "",
            Markdown(each.title),
            each.attempts,
            lines=tuple(Markdown(f"**could not be given back:** {words}") for words in each.left),
        )
        for each in context["rentals"]
    )
    overview = context["rental_overview"]
    return Section("Rented nodes", table=overview, question=QUESTIONS["rentals"], method=METHODS["rentals"], more=more)


def _preflight(sections: Sequence[Any]) -> Section | None:
    if not sections:
        return None
    more = tuple(
        Section(
            "",
            Markdown(each.title),
            tables=_tables(("", each.nodes), ("", each.pairs)),
            lines=tuple(Markdown(line) for line in each.sentences),
        )
        for each in sections
    )
    return Section("Node tests", question=QUESTIONS["preflight"], method=METHODS["preflight"], more=more)


def failures_section(context: TemplateContext) -> Section:
    """Every repeat without a figure, and files that could not be read."""
    failures, unreadable = context["failures"], context["unreadable"]
    told = "Every repeat without a figure, and where to read more (paths are relative to this folder)."
    sentence = told if failures else "None: every planned repeat was measured."
    bad = "Files that cannot be read; they are left out of this report."
    tables = _tables((bad, unreadable))
    return Section("Failures", sentence, failures, question=QUESTIONS["failures"], tables=tables)


def _how(context: TemplateContext) -> Section:
    more = []
    if context["models"]:
        more.append(Section("Models", context["models_sentence"], context["models"]))
    environment, shared = context["environment"], context["environments"]
    if shared:
        tables = _tables(("", context["differences"]), ("What is the same in all:", environment))
        more.append(Section("Environment", shared, tables=tables))
    else:
        none = "" if environment else "No record names its environment."
        more.append(Section("Environment", none, environment))
    told = (
        "Each cell's records and raw samples, from which every figure above is derived. `cells.csv` has one line for "
        "each cell, `records.parquet` one row for each record."
    )
    more.append(Section("Provenance", Markdown(told), context["provenance"]))
    tables = _tables(
        ("Cells that ended without reaching the target:", context["stopped"]),
        ("Cells with measurements in which no steady state was found:", context["unsteady"]),
    )
    lines = tuple(Markdown(line) for line in context["measuring"])
    return Section("How it was measured", question=QUESTIONS["how"], lines=lines, tables=tables, more=tuple(more))
