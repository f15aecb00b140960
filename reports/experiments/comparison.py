"""Sweeps and optimizations: comparison of cells that differ in named fields.

    swept = sweep(study, experiment)            # throughput, latency and memory over the swept fields
    gains = optimization(study, experiment)     # each variant against the baseline of the same block

A launch measures its cells once in random order, so repeat i of a variant and repeat i of the baseline
were measured close in time: the gain is the ratio over such pairs. Intervals of one table hold together,
they are corrected for the number of variants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.plans.plan import PlannedExperiment
from reports.numbers.statistics import Ratio, estimate, pair_ratios, paired_ratio, ties
from reports.reading.load import CellResult, StudyResult, shown_times
from reports.tables import MOST_ROWS, first_rows
from reports.text import (
    UNKNOWN,
    Table,
    change,
    change_cell,
    escaped,
    estimate_cell,
    first_of,
    joined,
    mebibytes,
    not_apart,
    number,
    ratio_cell,
    ratio_text,
)


@dataclass(frozen=True)
class SweepPoint:
    """One combination of swept values."""

    label: str
    values: Mapping[str, Any]
    result: CellResult


@dataclass(frozen=True)
class Gain:
    """One variant against the baseline. Ratios: above 1 is more tokens, more seconds, more bytes."""

    variant: str
    result: CellResult
    throughput: Ratio | None
    throughput_by_repeat: dict[int, float]
    seconds: Ratio | None
    memory: float | None


def sweep(study: StudyResult, experiment: PlannedExperiment) -> list[SweepPoint]:
    """The points in the order of the study file."""
    return [SweepPoint(point.label, point.values, study.cells[point.cell]) for point in experiment.points]


def sweep_table(points: list[SweepPoint]) -> Table:
    """One row for each combination."""
    rows, times = [], shown_times(point.result for point in points)
    for point in points[:MOST_ROWS]:
        result = point.result
        rows.append(
            (
                escaped(point.label),
                f"{len(result.completed)} of {result.planned}",
                estimate_cell(result.estimate("throughput")),
                *(estimate_cell(result.time(shown), 1000) for shown in times),
                mebibytes(result.peak_bytes),
                result.status.replace("_", " "),
            )
        )
    columns = (
        "point",
        "repeats",
        f"{points[0].result.unit}, median (interval)",
        *(f"{shown.unit}, median (interval)" for shown in times),
        "peak memory, MiB, all ranks",
        "state",
    )
    return first_rows(Table(columns, tuple(rows)).without_empty_columns(), len(points))


def sweep_sentence(points: list[SweepPoint]) -> str:
    """Where throughput is highest, and what was not measured."""
    values = [(value.median, point) for point in points if (value := point.result.estimate("throughput"))]
    lost = [point for point in points if point.result.estimate("throughput") is None]
    if not values:
        return "No point of this sweep has a figure."
    best_value, best = max(values, key=lambda pair: pair[0])
    worst_value, worst = min(values, key=lambda pair: pair[0])
    rest = [point for _, point in values if point is not best]
    others = [one.result.values("throughput") for one in rest]
    tied = ties(best.result.values("throughput"), others, best.result.confidence)
    text = f"Throughput is highest at {best.label}: {number(best_value)} {best.result.unit}"
    text += not_apart([rest[index].label for index in tied])
    ours, least = best.result, worst.result
    pairs = max(1, len(values) * (len(values) - 1) // 2)  # the one with the largest ratio is shown
    ratio = paired_ratio(ours.values("throughput"), least.values("throughput"), pairs, ours.confidence)
    if best is worst:
        text += "."
    elif ratio is None and worst_value <= 0:
        text += f"; at {worst.label} it is {number(worst_value)}."
    elif ratio is not None and ratio.value <= 1:  # medians over other blocks than the shared ones
        text += f"; in the blocks that both have it is {ratio_text(ratio, 'pair')} that of {worst.label}."
    else:
        times = ratio_text(ratio, "pair") if ratio else f"{number(best_value / worst_value)} times"
        text += f"{'; it is' if tied else ','} {times} that of {worst.label}."
    peaks = [(peak, point) for point in points if (peak := point.result.peak_bytes) is not None]
    if len(peaks) > 1:
        low, high = min(peaks, key=lambda pair: pair[0]), max(peaks, key=lambda pair: pair[0])
        least_mib, most_mib = mebibytes(low[0]), mebibytes(high[0])
        if least_mib == most_mib:
            text += f" Peak memory is {most_mib} MiB everywhere."
        else:
            text += f" Peak memory goes from {least_mib} MiB ({low[1].label}) to {most_mib} MiB ({high[1].label})."
    if lost:
        told = [f"{point.label} ({point.result.status.replace('_', ' ')})" for point in lost]
        listed = "; ".join(_first(told))
        text += f" Without a figure, drawn as a cross: {listed}."
    return text


def optimization(study: StudyResult, experiment: PlannedExperiment) -> tuple[CellResult | None, list[Gain]]:
    """The baseline, and the gain of each variant against it; None and no gains where it was not measured on the device
    of these points."""
    assert experiment.points, f"experiment {experiment.name} has no points"
    named = next((point for point in experiment.points if point.baseline), None)
    if named is None:
        return None, [Gain(one.label, study.cells[one.cell], None, {}, None, None) for one in experiment.points]
    base = study.cells[named.cell]
    variants = len(experiment.points) - 1
    gains = []
    for point in experiment.points:
        if point is named:
            continue
        result = study.cells[point.cell]
        ours, theirs = result.values("throughput"), base.values("throughput")
        gains.append(
            Gain(
                variant=point.label,
                result=result,
                throughput=paired_ratio(ours, theirs, variants, base.confidence),
                throughput_by_repeat=pair_ratios(ours, theirs),
                seconds=paired_ratio(result.latency_values, base.latency_values, variants, base.confidence),
                memory=_memory_ratio(result, base),
            )
        )
    return base, gains


def _memory_ratio(result: CellResult, base: CellResult) -> float | None:
    return result.peak_bytes / base.peak_bytes if result.peak_bytes is not None and base.peak_bytes else None


def optimization_table(base: CellResult | None, gains: list[Gain]) -> Table:
    """The baseline's row, where there is one, then one for each variant."""
    first = gains[0].result if base is None else base
    latency = "ms" if first.latency is None else first.latency.unit
    columns = (
        "variant",
        "pairs",
        f"{first.unit}, median (interval)",
        "gain (interval)",
        f"{latency}, median (interval)",
        "change of it (interval)",
        "peak memory, MiB, all ranks",
        "change of peak",
        "state",
    )
    rows: list[tuple[str, ...]] = []
    if base is not None:
        own = "1" if base.completed else UNKNOWN
        rows.append(("baseline", UNKNOWN, *_absolute(base, own, UNKNOWN, UNKNOWN)))
    for gain in gains:
        memory = change(gain.memory - 1) if gain.memory is not None else UNKNOWN
        absolute = _absolute(gain.result, ratio_cell(gain.throughput), change_cell(gain.seconds), memory)
        rows.append((escaped(gain.variant), f"{len(gain.throughput_by_repeat)}", *absolute))
    return Table(columns, tuple(rows)).without_empty_columns()


def _absolute(result: CellResult, gain: str, change: str, memory: str) -> tuple[str, ...]:
    return (
        estimate_cell(result.estimate("throughput")),
        gain,
        estimate_cell(estimate(result.latency_values.values(), result.confidence), 1000),
        change,
        mebibytes(result.peak_bytes),
        memory,
        result.status.replace("_", " "),
    )


def _why_no_gain(gain: Gain) -> str:
    if gain.result.completed:
        return f"No block has a throughput above 0 of both {gain.variant} and the baseline."
    return f"{gain.variant} has no figure ({gain.result.status.replace('_', ' ')})."


_LOST_TOLD = 5
"""Points without a figure that a sentence names; the tables have all."""


def _first(told: list[str]) -> list[str]:
    """The first of many, and how many more there are."""
    return told if len(told) <= _LOST_TOLD + 1 else [*told[:_LOST_TOLD], f"{len(told) - _LOST_TOLD:,} more"]


def _tied(gains: Sequence[tuple[Gain, Ratio]]) -> list[str]:
    """The variants that the first, the best, is not told apart from."""
    best, *others = (gain.result for gain, _ in gains)
    found = ties(best.values("throughput"), [one.values("throughput") for one in others], best.confidence)
    return [gains[index + 1][0].variant for index in found]


_VARIANTS_TOLD, _MOST_NAMED = 3, 8
"""Of more variants the sentence tells the best and the worst, and names so many in doubt; the table has all."""


def optimization_sentence(base: CellResult | None, gains: list[Gain]) -> str:
    """The gain of each variant, and whether it can be told from noise."""
    if base is None:
        return "The baseline was not measured on this device, so no gain is given."
    if not base.completed:
        return f"The baseline has no figure ({base.status.replace('_', ' ')}), so no gain is given."
    known = [(gain, gain.throughput) for gain in gains if gain.throughput is not None]
    lost = [_why_no_gain(gain) for gain in gains if gain.throughput is None]
    if len(lost) > _LOST_TOLD + 1:
        lost = [*lost[:_LOST_TOLD], f"{len(lost) - _LOST_TOLD:,} more variants have no gain."]
    if not known:
        return " ".join(lost) or "No variant was planned."
    known.sort(key=lambda pair: -pair[1].value)
    (best, most), (worst, least) = known[0], known[-1]
    text = f"{best.variant} gives {ratio_text(most, 'pair')} the baseline's throughput"
    if len(known) > 1:
        between = f", the most{not_apart(_tied(known))}" if len(known) > _VARIANTS_TOLD else ""
        others = known[1:] if len(known) <= _VARIANTS_TOLD else [(worst, least)]
        told = [f"{gain.variant} {ratio_text(ratio, 'pair')}" for gain, ratio in others]
        last = ", the least" if between else ""
        text += f"{between}; {joined(told)}{last}"
    noise = [gain.variant for gain, ratio in known if ratio.differs is False]
    split = [gain.variant for gain, ratio in known if ratio.interval is None and ratio.low < 1 < ratio.high]
    found = [f"{text}."]
    if noise:
        found.append("That may be noise." if len(known) == 1 else f"May be noise: {first_of(noise, _MOST_NAMED)}.")
    if split:
        found.append(
            "Its pairs disagree on which is faster."
            if len(known) == 1
            else f"Pairs with the baseline disagree on which is faster: {first_of(split, _MOST_NAMED)}."
        )
    return " ".join([*found, *lost])
