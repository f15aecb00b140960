"""Export of a comparison of two runs as JUnit XML for continuous integration and as JSON.

    junit_xml(comparison)                     # a test case for each cell: failed on a regression
    as_json(comparison)                       # everything, in the figures' own units

Pure functions of a `reports.runs.compare.Comparison`.
"""

import re
from typing import Any
from xml.etree import ElementTree as xml

from reports.reading.run_figures import CellFigures, RunFigures
from reports.runs.compare_text import change_ratio_text, change_text, what_would_help
from reports.runs.comparison import CellChange, Change, Comparison, ComparisonVerdict, Difference
from reports.text import UNKNOWN

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 (https://www.w3.org/TR/xml/#charsets) has no place for, control characters above all."""


def junit_xml(comparison: Comparison) -> str:
    """JUnit's XML: a regression fails, what cannot be told or has no partner is skipped, the rest passes."""
    cases = [_case(comparison, cell) for cell in comparison.cells]
    for side, cells in (("first", comparison.only_first), ("second", comparison.only_second)):
        for alone in cells:
            case = xml.Element("testcase", _named(comparison, alone))
            xml.SubElement(case, "skipped", {"message": f"only in the {side} run"})
            cases.append(case)
    counts = {"tests": str(len(cases))}
    for name, element in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        counts[name] = str(sum(case.find(element) is not None for case in cases))
    root = xml.Element("testsuites", counts)
    suite = xml.SubElement(root, "testsuite", {"name": _clean(f"rankwise compare {comparison.second.study}"), **counts})
    properties = xml.SubElement(suite, "properties")
    facts = [
        Difference("run", (comparison.first.name,), (comparison.second.name,)),
        *comparison.differences,
        *comparison.rules,
    ]
    for item in facts:
        value = f"{', '.join(item.first) or UNKNOWN} -> {', '.join(item.second) or UNKNOWN}"
        xml.SubElement(properties, "property", {"name": _clean(item.what), "value": _clean(value)})
    suite.extend(cases)
    xml.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{xml.tostring(root, encoding="unicode")}\n'


def _named(comparison: Comparison, cell: CellFigures) -> dict[str, str]:
    return {"classname": _clean(comparison.second.study), "name": _clean(cell.title)}


def _case(comparison: Comparison, cell: CellChange) -> xml.Element:
    """One test case; what it prints are the cell's ratios."""
    case = xml.Element("testcase", _named(comparison, cell.first))
    said = [change_text(cell, change) for change in cell.changes if change.regression] + (
        [cell.why] if cell.why else []
    )
    main = cell.change("throughput")
    if cell.regression:
        failure = xml.SubElement(case, "failure", {"type": "regression", "message": _clean("; ".join(said))})
        failure.text = _clean("\n".join(said))
    elif cell.verdict is ComparisonVerdict.CANNOT_TELL:
        help_text = what_would_help(main, comparison.paired) if main else cell.why or "no figure in common"
        xml.SubElement(case, "skipped", {"message": _clean(f"cannot tell: {help_text}")})
    lines = [
        f"{change.kind.title}: {change_ratio_text(change)} {change.verdict or ''}".rstrip() for change in cell.changes
    ]
    if lines:
        xml.SubElement(case, "system-out").text = _clean("\n".join([f"key: {cell.key}", *lines]))
    return case


def _clean(text: str) -> str:
    return _NO_XML.sub("", text)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything for another program; ratios are second / first, figures in SI units and throughput in its `unit`."""
    return {
        "first": _run_json(comparison.first),
        "second": _run_json(comparison.second),
        "differences": {item.what: [list(item.first), list(item.second)] for item in comparison.differences},
        "rules": {item.what: [list(item.first), list(item.second)] for item in comparison.rules},
        "threshold": comparison.threshold,
        "comparisons": comparison.comparisons,
        "half_width": comparison.half_width,
        "between_runs": {
            figure: {"margin": found.margin, "runs": found.runs} for figure, found in comparison.between.items()
        },
        "regressions": [cell.key for cell in comparison.regressions],
        "cells": [_cell_json(cell) for cell in comparison.cells],
        "only_first": {cell.key: cell.title for cell in comparison.only_first},
        "only_second": {cell.key: cell.title for cell in comparison.only_second},
        "answers_kept": {cell.key: cell.title for cell in comparison.answers_kept},
        "of_single": {cell.key: cell.title for cell in comparison.of_single},
    }


def _run_json(run: RunFigures) -> dict[str, Any]:
    facts = {"started_at": run.started_at, "commit": run.commit, "environment": run.environment}
    return {"name": run.name, "study": run.study, **facts}


def _cell_json(cell: CellChange) -> dict[str, Any]:
    return {
        "key": cell.key,
        "name": cell.first.title,
        "verdict": str(cell.verdict),
        "regression": cell.regression,
        "status": [cell.first.status, cell.second.status],
        "why": cell.why or None,
        "unit": cell.first.unit,
        "figures": {change.kind.name: _change_json(change) for change in cell.changes},
    }


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "first": change.first.median,
        "second": change.second.median,
        "repeats": [change.first.count, change.second.count],
        "ratio": change.ratio.value,
        "interval": None if change.bounds is None else list(change.bounds),
        "verdict": None if change.verdict is None else str(change.verdict),
        "regression": change.regression,
        "repeats_needed": change.repeats_needed,
    }
