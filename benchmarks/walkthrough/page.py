"""docs/walkthrough.md from what the steps printed: page(results, day)."""

from datetime import datetime
from itertools import groupby
from textwrap import fill

from benchmarks.walkthrough.steps import Step
from configs.common.base import Frozen

_WIDTH = 200  # of what is printed
_TEXT_WIDTH = 120


class Result(Frozen):
    """What a step printed, and how it ended."""

    text: str
    code: int
    seconds: float


def page(results: list[tuple[Step, Result | None]], day: datetime) -> str:
    """Return the page's text; a step without a result is shown as one that was not run."""
    parts = [
        "# Walk-through\n",
        f"Written by `make walkthrough` on {day:%Y-%m-%d}: the command lines of the project's first documents, in\n"
        "their order, what stands for each today, and what it printed. Long outputs are cut in the middle (`...`).\n"
        "`$ROOT` is the clone, `$VIRTUAL_ENV` its environment, `.` an empty folder with copies of `configs/models`\n"
        "and `configs/studies`. Behind every instance and host stands a namespace of one machine with two cores,\n"
        "which did other work too: speeds say nothing about the machines that are named.\n",
    ]
    for part, found in groupby(results, lambda pair: pair[0].part):
        parts += [f"## {part}\n", *(_section(step, result) for step, result in found)]
    return "\n".join(parts)


def _section(step: Step, result: Result | None) -> str:
    """One command line: as it was written, as it is run, what was there, what it printed."""
    lines = [] if result is None else [line.rstrip()[:_WIDTH].rstrip() for line in result.text.strip("\n").splitlines()]
    half = step.lines // 2
    shown = lines if len(lines) <= step.lines else [*lines[: step.lines - half], "...", *lines[-half:]]
    command = step.run.replace("$PYTHON_ENV", "$VIRTUAL_ENV").replace("; code=$?", "").replace("; exit $code", "")
    against = f"Against {step.against}." if step.against else ""
    ended = "Not run when this page was written." if result is None else ""
    ended = f"Exit code {result.code}." if result is not None and result.code else ended
    said = fill(" ".join(text for text in (against, ended) if text), _TEXT_WIDTH, break_long_words=False)
    fence = "````" if any(line.startswith("```") for line in shown) else "```"
    return "\n".join(
        [
            f"### `{step.written}`\n",
            *([f"{said}\n"] if said else []),
            f"{fence}console",
            *(("$ " if number == 0 else "> ") + line for number, line in enumerate(command.splitlines())),
            *shown,
            f"{fence}\n",
        ]
    )
