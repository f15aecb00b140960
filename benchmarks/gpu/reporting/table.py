"""The table of results: every bar beside its figure. Imports the standard library only.

print(table(results))
print(summary(results))
"""

from collections.abc import Sequence

from benchmarks.gpu.reporting.results import CheckResult, Figure

_COLUMNS = ("check", "figure", "value", "95 % interval", "bar", "state")
_SENSES = {"at least": "≥", "at most": "≤", "is": "="}


def rows(results: Sequence[CheckResult]) -> list[tuple[str, ...]]:
    """Return a row for each figure, and one for each check that did not come to its end."""
    found: list[tuple[str, ...]] = []
    for result in results:
        for figure in result.figures:
            found.append((result.check, figure.name, *_value(figure), figure.state(result.rehearsal)))
        if result.state != "finished":
            found.append((result.check, f"({result.state}) {result.cause}", "–", "", "", "not reached"))
    return found


def _value(figure: Figure) -> tuple[str, str, str]:
    interval = "" if figure.low is None or figure.high is None else f"{_text(figure.low)} to {_text(figure.high)}"
    bar = "" if figure.bar is None else f"{_SENSES[figure.sense]} {_text(figure.bar)}"
    if figure.value is None:
        return f"– ({figure.note})", "", bar
    return f"{_text(figure.value)} {figure.unit}".rstrip(), interval, bar


def _text(value: float | str) -> str:
    """Return three significant digits, more where a number has more before its point."""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(results: Sequence[CheckResult]) -> str:
    """Return the table in GitHub's Markdown."""
    lines = [_COLUMNS, tuple("---:" if name in ("value", "bar") else "---" for name in _COLUMNS), *rows(results)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def table(results: Sequence[CheckResult]) -> str:
    """Return the table for a terminal."""
    lines = [_COLUMNS, *rows(results)]
    widths = [min(72, max(len(line[place]) for line in lines)) for place in range(len(_COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def summary(results: Sequence[CheckResult]) -> str:
    """Return one line: how many bars are met, missed, not reached."""
    states = [row[-1] for row in rows(results)]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("met", "missed", "not reached", "rehearsed"))
    unfinished = [result.check for result in results if result.state != "finished"]
    return f"bars: {counts}" + (f"; not finished: {', '.join(unfinished)}" if unfinished else "")
