"""Text of a comparison of two runs, for the terminal and as Markdown.

    print(terminal_text(comparison))          # environment differences first, then the verdict and the table
    markdown(comparison)                      # the same, to be posted as a comment

Pure functions of a `reports.runs.compare.Comparison`; `reports.runs.compare_export` has the forms for other programs.
"""

import re
from collections.abc import Sequence

from configs.common.printable import printable, printable_lines
from reports.numbers.drift import drift, noise
from reports.reading.run_figures import FIGURE_KINDS, CellFigures, RunFigures
from reports.runs.compare import OF_SINGLE
from reports.runs.comparison import CellChange, Change, Comparison, ComparisonVerdict
from reports.tables import NOISE_LIMIT
from reports.templating import template_environment
from reports.text import (
    UNKNOWN,
    Table,
    aligned,
    code,
    escaped,
    fact_text,
    joined,
    number,
    percent,
    plural,
    ratio_digits,
    repeats,
)

LISTED = 20
"""Unmatched cells that are named before the rest is counted."""


def comparison_headline(comparison: Comparison) -> str:
    """The verdict in one sentence."""
    lost, total = comparison.regressions, plural(len(comparison.cells), "cell")
    failing = sum(not cell.second.completed for cell in lost)
    slower = len(lost) - failing
    said = [f"{slower} of {total} {'is' if slower == 1 else 'are'} worse by more than {threshold_text(comparison)}"]
    said = said if slower else []
    said += [f"{failing} of {total} newly {'fails' if failing == 1 else 'fail'}"] if failing else []
    if said:
        return f"Regression: {joined(said)}."
    said = [f"{count} {_OF_MANY[verdict]}" for verdict in ComparisonVerdict if (count := comparison.count(verdict))]
    return f"No regression of more than {threshold_text(comparison)} is shown. Of {total}, {joined(said)}."


_OF_MANY = {
    ComparisonVerdict.WORSE: "worse by less",
    ComparisonVerdict.BETTER: "better",
    ComparisonVerdict.SAME: "the same",
    ComparisonVerdict.CANNOT_TELL: "cannot be told",
}


def threshold_text(comparison: Comparison) -> str:
    """`5 %`, as it was given."""
    return f"{comparison.threshold * 100:g} %"


def run_line(run: RunFigures) -> str:
    """`runs/a/llama: study llama, 2026-11-21 09:49 UTC, commit 60348af`."""
    parts = [f"study {run.study}"]
    parts += [run.started_at[:16].replace("T", " ") + " UTC"] if run.started_at else []
    parts += [f"commit {short_commit(run.commit)}"] if run.commit else []
    return printable(f"{run.name}: {', '.join(parts)}")


def short_commit(commit: str) -> str:
    """The first ten digits, and `+` where the code was changed since."""
    return commit[:10] + ("+" if commit.endswith("+") and len(commit) > 10 else "")


def change_table(comparison: Comparison) -> Table:
    """One row for each matched cell: throughput in both, then each figure's ratio with its interval and verdict."""
    units = {cell.first.unit for cell in comparison.cells}
    unit = units.pop() if len(units) == 1 else ""
    rows = []
    for cell in comparison.cells:
        rows.append(
            (
                escaped(cell.first.title),
                f"**{cell.verdict}**" if cell.regression else str(cell.verdict),
                _value(cell.first, unit),
                _value(cell.second, unit),
                _ratio_and_verdict(cell.change("throughput"), cell),
                *(_ratio_and_verdict(cell.change(kind.name), cell) for kind in FIGURE_KINDS[1:]),
            )
        )
    throughput = unit or "throughput"
    columns = ("cell", "verdict", f"{throughput}, first", "second", "ratio (95 % interval)", *SHORT_TITLES)
    return Table(columns, tuple(rows), text_columns=2).without_empty_columns()


SHORT_TITLES = ("first token", "per token", "step", "peak memory")
"""Columns of the figures after throughput, in the order of FIGURE_KINDS."""


def _value(cell: CellFigures, shared_unit: str) -> str:
    value = cell.estimate("throughput")
    return UNKNOWN if value is None else number(value.median) + ("" if shared_unit else f" {cell.unit}")


def change_ratio_text(change: Change) -> str:
    """`0.905 (0.898 to 0.913)`; without an interval the ratio alone."""
    if change.bounds is None:
        return number(change.ratio.value)
    digits = ratio_digits(change.bounds)
    low, high = (number(bound, digits) for bound in change.bounds)
    return f"{number(change.ratio.value, digits)} ({low} to {high})"


def _ratio_and_verdict(change: Change | None, cell: CellChange) -> str:
    """With the figure's own verdict where that is not the cell's."""
    if change is None:
        return UNKNOWN
    return change_ratio_text(change) + (f" {change.verdict}" if change.verdict not in (None, cell.verdict) else "")


def difference_table(comparison: Comparison) -> Table | None:
    """What differs between the environments and the rules of measuring; None where nothing does."""
    rows = [
        (code(item.what), fact_text(*item.first), fact_text(*item.second))
        for item in (*comparison.differences, *comparison.rules)
    ]
    return Table(("what", "first", "second"), tuple(rows), text_columns=3) if rows else None


def difference_sentence(comparison: Comparison) -> str:
    """Whether the runs were measured in the same environment, by the same rules, with code that is known."""
    known = [
        any(flat is not None for flat in run.environments.values()) for run in (comparison.first, comparison.second)
    ]
    measured = [
        any(cell.completed for cell in comparison.matched(run)) for run in (comparison.first, comparison.second)
    ]
    if not all(measured):
        text = "No cell of at least one side has a figure, so the environments are not compared."
    elif not all(known):
        text = "Of at least one run no environment is known, so nobody can say in what they differ."
    elif comparison.differences:
        text = f"The environments differ in {joined(item.what for item in comparison.differences)}"
        foreign = [item.what for item in comparison.differences if item.what not in ("commit", "dirty")]
        # Within one run a variant may be what differs.
        text += (
            ": what follows may come from that as well as from the code." if foreign and not comparison.paired else "."
        )
    else:
        text = "Both were measured in the same environment."
    if comparison.rules:
        text += f" They were measured by different rules: {joined(item.what for item in comparison.rules)}."
    changed = [run for run in (comparison.first, comparison.second) if run.commit and run.commit.endswith("+")]
    if changed:
        surely = all("True" in run.facts(("dirty",))["dirty"] for run in changed)
        names, verb = joined(run.name for run in changed), "was" if surely else "may have been"
        text += f" The code of {names} {verb} changed since its commit: which code that was is not known."
    return text


def details(comparison: Comparison) -> list[str]:
    """A sentence for each regression, each mended cell and each cell of which nothing can be told.

    Peak memory that changed by more than the threshold is said too.
    """
    lines = []
    for cell in comparison.cells:
        said = [change_text(cell, change) for change in cell.changes if change.regression]
        said += [
            f"{change_text(cell, change)}, from one pass of each, so without a verdict"
            for change in cell.changes
            if change.verdict is None and abs(change.ratio.value - 1) > comparison.threshold
        ]
        if said or cell.why:
            lines.append(f"{cell.first.title}: {'; '.join([*said, *([cell.why] if cell.why else [])])}.")
        main = cell.change("throughput")
        if main is not None and cell.verdict is ComparisonVerdict.CANNOT_TELL:
            lines.append(f"{cell.first.title}: cannot tell; {what_would_help(main, comparison.paired)}.")
    return lines


def change_text(cell: CellChange, change: Change) -> str:
    """`throughput 9.5 % lower (8.7 to 10.2 %), 424 to 384 tokens/s`."""
    share = change.ratio.value - 1
    text = f"{change.kind.title} {percent(abs(share))} {'higher' if share > 0 else 'lower'}"
    if change.bounds is not None:
        low, high = sorted(abs(bound - 1) for bound in change.bounds)
        text += f" ({number(low * 100)} to {percent(high)})"
    before, after = (number(value.median * change.kind.scale) for value in (change.first, change.second))
    return f"{text}, {before} to {after} {cell.first.unit_of(change.kind)}"


def what_would_help(change: Change, paired: bool = False) -> str:
    """`about 12 repeats in each run would settle it, there are 8`. paired: both are of one run."""
    if change.repeats_needed is not None:
        verb, place = "is" if change.ratio.count == 1 else "are", "" if paired else " in each run"
        there = f"there {verb} {change.ratio.count}"
        if change.ratio.interval is None:
            return f"{repeats(change.repeats_needed)}{place} would give an interval, {there}"
        return f"about {repeats(change.repeats_needed)}{place} would settle it, {there}"
    if change.ratio.interval != change.bounds:
        return "the noise between runs is too wide; measure both again, in turn, on a quieter machine"
    return "the difference lies at the edge of what counts, where more repeats do not help"


def notes(comparison: Comparison) -> list[str]:
    """What the reader must know of the figures: correction, noise within and between runs, what was left out."""
    count = comparison.comparisons
    lines = []
    if count:
        lines.append(
            f"A ratio is second / first. The intervals hold for {plural(count, 'ratio')} at "
            "once. A figure's own verdict stands beside it where it is not the cell's."
        )
    lines += _noise_lines(comparison)
    between = comparison.between.get("throughput")
    if comparison.paired:
        lines.append("Both were measured in the same blocks, so a shift of the machine cancels in their ratio.")
    elif between is None:
        lines.append(
            "Repeats of one run share whatever shifts the whole run (neighbours, temperature, the day), and their "
            "interval does not hold that. With three runs of one commit in the history it is measured and counted in."
        )
    else:
        lines.append(
            f"Two runs of the same code differ by up to {percent(between.margin - 1)} in throughput here "
            f"({between.runs} runs in the history); no interval is narrower than that."
        )
    for run in (comparison.first, comparison.second):
        busy = {title: share for title, share in comparison.busy(run).items() if share > NOISE_LIMIT}
        if busy:
            worst = max(busy, key=lambda title: busy[title])
            lines.append(
                f"In {run.name} other processes took over {percent(NOISE_LIMIT, 2)} of the machine's CPU during "
                f"{plural(len(busy), 'cell')}, most during {worst} ({percent(busy[worst], 2)})."
            )
    for what, cells in (
        ("Only in the first", comparison.only_first),
        ("Only in the second", comparison.only_second),
        ("Not compared, because keeping answers takes time", comparison.answers_kept),
        (f"Not compared, because their figures are {OF_SINGLE}", comparison.of_single),
    ):
        if cells:
            lines.append(f"{what}: {_listed(cells)}.")
    return lines


def _noise_lines(comparison: Comparison) -> list[str]:
    """Noise from repeat to repeat and width of the ratios where they exceed the threshold, and drift within a run."""
    lines = []
    threshold = threshold_text(comparison)
    for run in (comparison.first, comparison.second):
        series = [cell.figures.get("throughput", {}) for cell in comparison.matched(run)]
        noisy, drifting = noise(series), drift(series)
        if noisy is not None and noisy.typical > comparison.threshold:
            lines.append(
                f"The noise of the machine is larger than the threshold of {threshold}: in {run.name} two repeats of "
                f"the same cell differ by {percent(noisy.typical, 2)}."
            )
        if drifting is not None and drifting.drifts:
            lines.append(
                f"In {run.name} throughput drifted by {percent(drifting.change, 2)} from the first repeat to the last: "
                "another run may lie as far away for that alone."
            )
    if comparison.half_width is not None and comparison.half_width > comparison.threshold:
        width = percent(comparison.half_width, 2)
        lines.append(f"Ratios of throughput are known to ±{width}: a difference of {threshold} can hide in that.")
    return lines


def _listed(cells: Sequence[CellFigures]) -> str:
    named = "; ".join(f"{cell.title} ({cell.key})" for cell in cells[:LISTED])
    return named + (f"; and {len(cells) - LISTED:,} more" if len(cells) > LISTED else "")


def terminal_text(comparison: Comparison) -> str:
    """For a terminal: plain lines and columns that stand in line."""
    differing = difference_table(comparison)
    blocks = [
        f"first   {run_line(comparison.first)}\nsecond  {run_line(comparison.second)}",
        difference_sentence(comparison) + (f"\n{aligned(differing)}" if differing else ""),
        comparison_headline(comparison),
        aligned(change_table(comparison)),
        "\n".join(details(comparison)),
        "\n".join(notes(comparison)),
    ]
    return printable_lines("\n\n".join(block for block in blocks if block)) + "\n"


def markdown(comparison: Comparison) -> str:
    """For a comment: environment, verdict, table, sentences, notes."""
    differing = difference_table(comparison)
    text = (
        template_environment()
        .get_template("compare.md.j2")
        .render(
            first=run_line(comparison.first),
            second=run_line(comparison.second),
            study=comparison.second.study,
            environment=difference_sentence(comparison),
            differing=differing,
            headline=comparison_headline(comparison),
            table=change_table(comparison),
            details=details(comparison),
            notes=notes(comparison),
        )
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
