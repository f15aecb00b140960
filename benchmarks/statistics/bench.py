"""Do the statistics hold what they promise? Simulated studies whose truth is known, printed as Markdown.

    python -m benchmarks.statistics.bench                       # or make bench-statistics: all tables, one or two
    minutes python -m benchmarks.statistics.bench --studies 2000 --json figures.json

Bars: 95 % intervals hold the true median in 93 to 97 % of studies; the 95 % upper bound of the rate of
false alarms is at most 6.5 %; a slow-down of 5 % under 2 % noise is found in at least 95 % of comparisons.
A missed bar is named at the end, and the exit status is 1. The first table has 2,000 studies a figure, as the
bars were set; those by kind of noise have more, because 2,000 leave each coverage uncertain by 1 point, and of
two hundred figures some would miss by chance.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.statistics.limits import limits, skewed_apart
from benchmarks.statistics.parts import (
    COUNTS,
    DEFAULT_REPEATS,
    KINDS,
    MOST_REPEATS,
    NOISE,
    Kind,
    Section,
    bootstrap_intervals,
    found_share,
    held,
    naive,
    share,
    shipped,
    simulated,
    stopped_at,
    target_for,
    two_cells,
    upper_bound,
    with_error,
)
from reports.numbers.drift import RepeatNoise, drift
from reports.numbers.statistics import CONFIDENCE, median_interval

COVERAGE_BAR = (0.93, 0.97)
ALARM_BAR = 0.065
POWER_BAR = 0.95

STUDIES = 10_000
ASKED = 2_000
"""Studies of the table that is as the bars were set."""
BOOTSTRAPPED = 2_000
"""Studies for the bootstrap, which is slow and no part of a bar."""
TARGETS = {"at once": 0, "after 10": 10, "after 18": 18, "after 30": 30, "after 50": 50, "never": None}
"""Targets of sequential stopping: half the usual width of an interval of so many repeats."""
SLOWER = 1.05


def as_asked(rng: np.random.Generator, _: int) -> Section:
    """Each bar over 2,000 studies in all, the kinds of noise (and of targets) by turns."""
    section = Section(
        f"The bars, {ASKED:,} studies each with all kinds of noise by turns, %",
        ("what", *(f"{count} repeats" for count in COUNTS)),
    )
    counts = [len(part) for part in np.array_split(np.arange(ASKED), len(KINDS))]
    rows: dict[str, list[str]] = {"coverage": [], "coverage, stopped by a target": [], "false alarms (upper bound)": []}
    for count in COUNTS:
        kept, stopped, alarms, trials = [], [], 0, 0
        for kind, studies in zip(KINDS, counts, strict=True):
            drawn = simulated(kind, rng, studies, count)
            kept.append(held(drawn, np.full(studies, count), CONFIDENCE))
            for part, aim in zip(np.array_split(np.arange(studies), len(TARGETS)), TARGETS.values(), strict=True):
                stopped.append(_stopped_and_held(kind, rng, len(part), count, target_for(kind, rng, aim)))
            found, made = found_share(zip(*two_cells(kind, rng, studies, count), strict=True), paired=True)
            alarms, trials = alarms + found, trials + made
        for name, parts_held in (("coverage", kept), ("coverage, stopped by a target", stopped)):
            rate = float(np.concatenate(parts_held).mean())
            inside = COVERAGE_BAR[0] <= rate <= COVERAGE_BAR[1]
            rows[name].append(with_error(rate, ASKED) + section.judge(inside, f"{name}, {count}: {share(rate)} %"))
            section.figures.append({"what": name, "repeats": count, "coverage": rate})
        bound = upper_bound(alarms, trials)
        mark = section.judge(bound <= ALARM_BAR, f"false alarms, {count}: bound {share(bound)} %")
        rows["false alarms (upper bound)"].append(f"{share(alarms / trials)} ({share(bound)}){mark}")
        section.figures.append({"what": "false alarms", "repeats": count, "alarms": alarms / trials, "bound": bound})
    section.rows.extend((name, *cells) for name, cells in rows.items())
    return section


def _stopped_and_held(
    kind: Kind, rng: np.random.Generator, studies: int, least: int, target: float
) -> NDArray[np.bool_]:
    drawn, rule = simulated(kind, rng, studies, MOST_REPEATS), shipped(least, target)
    return held(drawn, stopped_at(drawn.figures, rule.looks, rule.confidence, target), rule.confidence)


def coverage(rng: np.random.Generator, studies: int) -> Section:
    """Intervals of the median of a fixed number of repeats, with the percentile bootstrap beside them."""
    section = Section(
        "Coverage of 95 % intervals, number of repeats fixed",
        ("noise", *(f"{count} repeats, %" for count in COUNTS), *(f"bootstrap at {count}, %" for count in COUNTS)),
    )
    for kind in KINDS:
        ours, contrast = [], []
        for count in COUNTS:
            drawn = simulated(kind, rng, studies, count)
            rate = float(held(drawn, np.full(studies, count), CONFIDENCE).mean())
            mark = section.judge(COVERAGE_BAR[0] <= rate <= COVERAGE_BAR[1], f"{kind.name}, {count}: {share(rate)} %")
            ours.append(with_error(rate, studies) + mark)
            some = min(studies, BOOTSTRAPPED)
            low, high = bootstrap_intervals(drawn.figures[:some], rng, CONFIDENCE)
            truth = drawn.medians(count)[:some]
            naive = float(((low <= truth) & (truth <= high)).mean())
            contrast.append(share(naive))
            section.figures.append({"noise": kind.name, "repeats": count, "coverage": rate, "bootstrap": naive})
        section.rows.append((kind.name, *ours, *contrast))
    return section


def few_repeats(rng: np.random.Generator, studies: int) -> Section:
    """What the bootstrap would say where we say nothing."""
    section = Section("Below 6 repeats we give no interval; the bootstrap's coverage", ("noise", "3, %", "5, %"))
    some = min(studies, BOOTSTRAPPED)
    for kind in KINDS[:2]:
        rates = []
        for count in (3, 5):
            drawn = simulated(kind, rng, some, count)
            assert median_interval(drawn.figures[0]) is None
            low, high = bootstrap_intervals(drawn.figures, rng, CONFIDENCE)
            rates.append(float(((low <= 1) & (high >= 1)).mean()))
            section.figures.append({"noise": kind.name, "repeats": count, "bootstrap": rates[-1]})
        section.rows.append((kind.name, *map(share, rates)))
    return section


def stopping(rng: np.random.Generator, studies: int) -> tuple[Section, Section]:
    """Coverage of intervals that decided when to stop, and the repeats it took: our rule, and the naive one."""
    columns = ("noise", "least", *TARGETS)
    ours = Section("Coverage with sequential stopping, % (mean repeats)", (*columns, "repeats over naive's"))
    contrast = Section("The same if one looks after every repeat, % (mean repeats)", columns)
    for kind in KINDS:
        targets = {name: target_for(kind, rng, count) for name, count in TARGETS.items()}
        drawn = simulated(kind, rng, studies, MOST_REPEATS)
        for least in COUNTS:
            cost = []
            cells: dict[str, list[str]] = {"ours": [], "naive": []}
            for name, target in targets.items():
                spent = {}
                for section, way, make in ((ours, "ours", shipped), (contrast, "naive", naive)):
                    rule = make(least, target)
                    counts = stopped_at(drawn.figures, rule.looks, rule.confidence, target)
                    rate = float(held(drawn, counts, rule.confidence).mean())
                    spent[way] = float(counts.mean())
                    what = f"{kind.name}, least {least}, target met {name}: {share(rate)} %"
                    inside = COVERAGE_BAR[0] <= rate <= COVERAGE_BAR[1]
                    mark = section.judge(inside, what) if way == "ours" else ""
                    cells[way].append(f"{share(rate)} ({spent[way]:.0f}){mark}")
                    row: dict[str, str | float] = {
                        "noise": kind.name,
                        "least": least,
                        "target": name,
                        "coverage": rate,
                        "repeats": spent[way],
                    }
                    section.figures.append(row)
                cost.append(spent["ours"] / spent["naive"])
            ours.rows.append((kind.name, str(least), *cells["ours"], f"{np.mean(cost):.2f}"))
            contrast.rows.append((kind.name, str(least), *cells["naive"]))
    return ours, contrast


def alarms(rng: np.random.Generator, studies: int) -> Section:
    """A against A: how often a difference is said where there is none."""
    section = Section(
        "False alarms over A/A comparisons, % (95 % upper bound)",
        ("noise", "comparison", *(f"{count} repeats" for count in COUNTS), "stopped by a target"),
    )
    for kind in KINDS:
        target = target_for(kind, rng, 18)
        rule = shipped(DEFAULT_REPEATS, target)
        drawn = {count: two_cells(kind, rng, studies, count) for count in COUNTS}
        long = two_cells(kind, rng, studies, MOST_REPEATS)
        ends = [stopped_at(figures, rule.looks, rule.confidence, target) for figures in long]
        stopped = [(a[:m], b[:n]) for a, b, m, n in zip(*long, *ends, strict=True)]
        for way in ("paired",) if kind.path else ("paired", "two runs"):
            paired = way == "paired"
            cells = []
            tries = [(f"{count}", found_share(zip(*drawn[count], strict=True), paired)) for count in COUNTS]
            tries.append(("stopped", found_share(stopped, paired, level=rule.confidence)))
            for name, (events, trials) in tries:
                bound = upper_bound(events, trials)
                mark = section.judge(bound <= ALARM_BAR, f"{kind.name}, {way}, {name}: bound {share(bound)} %")
                cells.append(f"{share(events / trials)} ({share(bound)}){mark}")
                section.figures.append({"noise": kind.name, "way": way, "repeats": name, "alarms": events / trials})
            section.rows.append((kind.name, way, *cells))
    return section


def power(rng: np.random.Generator, studies: int) -> Section:
    """How often a slow-down of 5 % is found, alone and as one of ten comparisons in a table."""
    counts = (6, 8, 10, 12, 14, 20)
    section = Section(
        "A slow-down of 5 % under 2 % noise is found, % of comparisons",
        ("noise", "comparison", "in one table", *(f"{count} repeats" for count in counts)),
    )
    some = min(studies, 2_000)
    for kind in (kind for kind in KINDS if kind.path is None):
        drawn = {count: two_cells(kind, rng, some, count, SLOWER) for count in counts}
        for paired in (True, False):
            for comparisons in (1, 10):
                cells = []
                for count in counts:
                    events, trials = found_share(zip(*drawn[count], strict=True), paired, comparisons)
                    barred = kind.name == "normal" and comparisons == 1 and count == DEFAULT_REPEATS
                    passes = not barred or events / trials >= POWER_BAR
                    cells.append(share(events / trials) + section.judge(passes, f"{share(events / trials)} %"))
                    section.figures.append(
                        {"noise": kind.name, "paired": paired, "table": comparisons, "repeats": count}
                        | {"found": events / trials}
                    )
                section.rows.append((kind.name, "paired" if paired else "two runs", str(comparisons), *cells))
    return section


def drifts(rng: np.random.Generator, studies: int) -> Section:
    """How often a drift over the study is said: none there, and one of a share of the noise."""
    counts = (6, 10, 20)
    section = Section(
        "A drift is said, % of studies (5 cells, drift over the study as a share of the noise)",
        ("noise", "drift", *(f"{count} blocks" for count in counts)),
    )
    some, cells = min(studies, 2_000), 5
    for kind in (KINDS[0], KINDS[1], KINDS[3]):
        for size in (0.0, 1.0, 2.0):
            rates = []
            for count in counts:
                noise = kind.draw(rng, (some * cells, count)) + size * np.linspace(-0.5, 0.5, count)
                figures = np.exp(NOISE * noise).reshape(some, cells, count)
                said = [drift([dict(enumerate(cell)) for cell in study]) for study in figures]
                events = sum(found is not None and found.drifts is True for found in said)
                bound = upper_bound(events, some)
                mark = section.judge(size > 0 or bound <= ALARM_BAR, f"{kind.name}, {count}: bound {share(bound)} %")
                rates.append(share(events / some) + mark)
                section.figures.append({"noise": kind.name, "drift": size, "blocks": count, "said": events / some})
            section.rows.append((kind.name, f"{size:.0f}", *rates))
    return section


def smallest(rng: np.random.Generator, studies: int) -> Section:
    """Is the smallest change that the A/A noise promises to show indeed found in 95 %?"""
    section = Section(
        "The smallest change that is promised to show in 95 % of comparisons, under 2 % normal noise",
        ("repeats", "in one table", "change, %", "found, %"),
    )
    some = min(studies, 2_000)
    known = RepeatNoise(0.0, NOISE * float(np.sqrt(2)), 1)
    for count in (6, 10, 14, 20):
        for comparisons in (1, 10):
            change = known.smallest_change(count, comparisons)
            if change is None:
                continue
            events, _ = found_share(
                zip(*two_cells(KINDS[0], rng, some, count, 1 + change), strict=True), True, comparisons
            )
            section.rows.append((str(count), str(comparisons), share(change), share(events / some)))
            section.figures.append({"repeats": count, "table": comparisons, "change": change, "found": events / some})
    return section


def run(studies: int, seed: int) -> list[Section]:
    """All tables. Each has a random stream of its own, so that one may change without the others."""
    streams = [np.random.default_rng([seed, table]) for table in range(9)]
    return [
        as_asked(np.random.default_rng([seed, 9]), studies),
        coverage(streams[0], studies),
        few_repeats(streams[1], studies),
        *stopping(streams[2], studies),
        alarms(streams[3], studies),
        power(streams[4], studies),
        drifts(streams[5], studies),
        smallest(streams[6], studies),
        skewed_apart(streams[7], studies),
        limits(streams[8], studies),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulated proof of the statistics, as Markdown.")
    parser.add_argument(
        "--studies", type=int, default=STUDIES, help="simulated studies for each coverage and alarm rate"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    sections = run(options.studies, options.seed)
    print("\n\n".join(section.text() for section in sections))
    missed = [line for section in sections for line in section.missed]
    print(f"\n{options.studies:,} studies, seed {options.seed}, {time.monotonic() - began:.0f} s.")
    print("All bars are met." if not missed else "\n".join(["Bars missed (!):", *(f"- {line}" for line in missed)]))
    if options.json:
        options.json.write_text(json.dumps({section.title: section.figures for section in sections}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
