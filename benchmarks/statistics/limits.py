"""Where the statistics do not hold what they promise, and what else was weighed; no bars.

Tables of `benchmarks.statistics.bench`.
"""

import numpy as np

from benchmarks.statistics.parts import (
    COUNTS,
    DEFAULT_REPEATS,
    ECHO,
    EVEN_MODES,
    KINDS,
    MOST_REPEATS,
    NOISE,
    Section,
    found_share,
    held,
    share,
    shipped,
    signed_rank_interval,
    simulated,
    stopped_at,
    target_for,
    with_error,
)
from reports.numbers.statistics import CONFIDENCE, median_interval


def limits(rng: np.random.Generator, studies: int) -> Section:
    """Where the promises end; no bars."""
    section = Section("Where it does not hold", ("what", "with", "per cent"))
    some = min(studies, 2_000)

    def add(what: str, under: str, rate: float) -> None:
        section.rows.append((what, under, with_error(rate, some)))
        section.figures.append({"what": what, "with": under, "share": rate})

    for kind in (EVEN_MODES, ECHO):
        for count in COUNTS:
            drawn = simulated(kind, rng, some, count)
            rate = float(held(drawn, np.full(some, count), CONFIDENCE).mean())
            add(f"coverage, {kind.name}", f"{count} repeats", rate)
        drawn = simulated(kind, rng, some, MOST_REPEATS)
        target = target_for(kind, rng, 30)
        rule = shipped(DEFAULT_REPEATS, target)
        counts = stopped_at(drawn.figures, rule.looks, rule.confidence, target)
        add(f"coverage, {kind.name}", "stopped, met after 30", float(held(drawn, counts, rule.confidence).mean()))
    for quiet, loud in ((10, 10), (20, 6), (6, 20)):
        one = simulated(KINDS[0], rng, some, quiet).figures
        other = simulated(KINDS[0], rng, some, loud).figures ** 3
        events, _ = found_share(zip(one, other, strict=True), paired=False)
        add("false alarms, two runs, one three times as noisy", f"{quiet} quiet, {loud} noisy repeats", events / some)
    wandering = [simulated(KINDS[-1], rng, some, DEFAULT_REPEATS).figures for _ in range(2)]
    add(
        "false alarms, two runs, whose machine wanders apart",
        "10 repeats",
        found_share(zip(*wandering, strict=True), paired=False)[0] / some,
    )
    return section


def skewed_apart(rng: np.random.Generator, studies: int) -> Section:
    """Why `paired_ratio` is no signed-rank interval: cells whose skewed noise differs."""
    section = Section(
        "Paired: coverage of the median ratio where one cell has three times the other's noise, %",
        ("noise", "repeats", "ours", "signed rank", "ours' width over signed rank's"),
    )
    some = min(studies, 2_000)
    for kind in KINDS[:5]:
        ratios = kind.draw(rng, (1, 2_000_000)) - 3 * kind.draw(rng, (1, 2_000_000))
        truth = NOISE * float(np.median(ratios))
        for count in (10, 20, 60):
            logs = NOISE * (kind.draw(rng, (some, count)) - 3 * kind.draw(rng, (some, count)))
            rates, widths = [], []
            for method in (median_interval, signed_rank_interval):
                ends = np.array([method(values, CONFIDENCE) for values in logs])
                rates.append(float(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean()))
                widths.append(float(np.median(ends[:, 1] - ends[:, 0])))
            section.rows.append((kind.name, str(count), *map(share, rates), f"{widths[0] / widths[1]:.2f}"))
            section.figures.append({"noise": kind.name, "repeats": count, "ours": rates[0], "signed rank": rates[1]})
    return section
