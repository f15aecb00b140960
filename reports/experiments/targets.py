"""Comparison of targets: the same experiment on several targets, such as links of several speeds.

    for found in side_by_side(study):            # one for each experiment and model that several targets measured
        targets_sentence(found), targets_table(found)

Within a target points are compared in pairs of the same block, with the experiment's own baseline and with the next
best. A target's link is what a communication experiment of the study measured over it between nodes, else what the
test of its nodes did.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from configs.plans.paths import RunPaths
from configs.plans.plan import CellPoint, PlannedExperiment
from reports.experiments.communication import bus_factor, communication
from reports.numbers.statistics import ROUNDING, Estimate, Ratio, paired_ratio
from reports.preflight import read_preflight
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import (
    UNKNOWN,
    Table,
    escaped,
    estimate_cell,
    estimate_text,
    first_of,
    joined,
    number,
    ratio_cell,
    ratio_text,
)

COMPARED_KINDS = ("strong", "sweep", "optimization", "layouts")
"""Weak scaling is left out: its points do different work."""
_MOST_NAMED = 8
"""Points in a sentence; the table has more."""


@dataclass(frozen=True)
class TargetLink:
    """Between two nodes of a target."""

    bytes_per_second: float
    latency_seconds: float

    def __str__(self) -> str:
        return f"{number(self.bytes_per_second / 1e6)} MB/s, {number(self.latency_seconds * 1e6)} us"


@dataclass(frozen=True)
class TargetPoint:
    """One point on one target. ratio: throughput over that of the target's baseline; None for the baseline itself."""

    label: str
    result: CellResult
    baseline: bool
    ratio: Ratio | None

    @property
    def throughput(self) -> Estimate | None:
        return self.result.estimate("throughput")

    @property
    def faster(self) -> bool | None:
        """Than the baseline; None where they are not told apart, or one has no figure."""
        if self.ratio is None:
            return None
        return True if self.ratio.is_above(1) else (False if self.ratio.bounds[1] < 1 - ROUNDING else None)


@dataclass(frozen=True)
class Side:
    """One target with its points, in the plan's order."""

    target: str
    link: TargetLink | None
    points: tuple[TargetPoint, ...]

    @property
    def ranked(self) -> list[TargetPoint]:
        """Those with a figure, the fastest first."""
        known = [(value.median, point) for point in self.points if (value := point.throughput) is not None]
        return [point for _, point in sorted(known, key=lambda pair: -pair[0])]

    @property
    def name(self) -> str:
        """With the link where it is known: `1 Gbit/s (117 MB/s, 60 us)`."""
        return self.target if self.link is None else f"{self.target} ({self.link})"


@dataclass(frozen=True)
class SideBySide:
    """One experiment of one model on several targets; with all links known the slowest first."""

    title: str
    unit: str
    sides: tuple[Side, ...]

    @property
    def labels(self) -> list[str]:
        """Of all points, in the plan's order."""
        return list(dict.fromkeys(point.label for side in self.sides for point in side.points))

    @property
    def by_link(self) -> bool:
        """Whether the sides are in the order of their links."""
        return all(side.link is not None for side in self.sides)


def side_by_side(study: StudyResult) -> list[SideBySide]:
    """Every experiment and model that was planned on more than one target."""
    groups: dict[tuple[str, str | None, str | None], list[PlannedExperiment]] = {}
    for experiment in study.plan.experiments if len(study.plan.targets) > 1 else ():
        if experiment.kind in COMPARED_KINDS and experiment.points:
            first = study.points(experiment)[0]
            name = experiment.name.removesuffix(f" on {first.cell.target}")
            groups.setdefault((name, experiment.model, first.device), []).append(experiment)
    links = _links(study) if groups else {}
    found = []
    for (name, model, _), members in groups.items():
        if len(members) > 1:
            sides = [_side(study, experiment, links) for experiment in members]
            if all(side.link is not None for side in sides):
                sides.sort(key=lambda side: side.link.bytes_per_second if side.link else 0.0)
            title = study.title(members[0].model_copy(update={"name": name, "model": model}))
            found.append(SideBySide(title, study.points(members[0])[0].unit, tuple(sides)))
    return found


def _side(study: StudyResult, experiment: PlannedExperiment, links: dict[str, TargetLink]) -> Side:
    results = study.points(experiment)
    named = next((index for index, point in enumerate(experiment.points) if point.baseline), 0)
    base, compared = results[named], max(1, len(results) - 1)
    names = _names(experiment.points, results)
    points = []
    for index, (label, result) in enumerate(zip(names, results, strict=True)):
        values = (result.values("throughput"), base.values("throughput"))
        ratio = paired_ratio(*values, comparisons=compared, confidence=base.confidence) if index != named else None
        points.append(TargetPoint(label, result, index == named, ratio))
    return Side(base.cell.target, links.get(base.cell.target), tuple(points))


def _names(points: Sequence[CellPoint], results: Sequence[CellResult]) -> list[str]:
    """The layout on its nodes where that tells the points apart, else as the experiment calls it."""
    places = [result.cell.place for result in results]
    if len(set(places)) == len(results):
        return places
    return [
        f"{point.label} ({place})" if point.label == "baseline" else point.label
        for point, place in zip(points, places, strict=True)
    ]


def _links(study: StudyResult) -> dict[str, TargetLink]:
    """By target: of the communication experiments that cross nodes, else of the nodes' test."""
    links: dict[str, TargetLink] = {}
    preflight = read_preflight(RunPaths(study.folder))
    for tested in preflight.targets if preflight is not None else ():
        if tested.pairs:
            rate = median(pair.bytes_per_second for pair in tested.pairs)
            links[tested.target] = TargetLink(rate, median(pair.latency_seconds for pair in tested.pairs))
    for experiment in study.plan.experiments:
        if experiment.kind != "communication" or not experiment.points:
            continue
        for measured in communication(study, experiment) or []:
            fitted = {link.operation: link for link in measured.links}
            # A sum ends when all is there; a message is sent when it lies in the buffers of sockets and switches.
            link = fitted.get("all_reduce") or fitted.get("point_to_point")
            if link is not None and measured.result.cell.nodes > 1:
                rate = link.bytes_per_second.median * bus_factor(link.operation, measured.ranks)
                links[measured.result.cell.target] = TargetLink(rate, link.latency_seconds.median)
    return links


def targets_table(found: SideBySide) -> Table:
    """One row for each target and point."""
    latency = found.sides[0].points[0].result.kind.latency
    columns = (
        "target",
        "link between nodes",
        "point",
        f"{found.unit}, median (interval)",
        "times the baseline (interval)",
        f"{latency.unit if latency else 'ms'}, median (interval)",
        "state",
    )
    rows = []
    for side in found.sides:
        for point in side.points:
            rows.append(
                (
                    escaped(side.target),
                    str(side.link) if side.link is not None else UNKNOWN,
                    escaped(point.label),
                    estimate_cell(point.throughput),
                    "1" if point.baseline and point.throughput is not None else ratio_cell(point.ratio),
                    estimate_cell(point.result.estimate(latency.figure) if latency else None, 1000),
                    point.result.status.replace("_", " "),
                )
            )
    return first_rows(Table(columns, tuple(rows), text_columns=3).without_empty_columns())


@dataclass(frozen=True)
class Winner:
    """The fastest point of a target against the next. ratio: None without a next one, or without a common block."""

    side: Side
    best: TargetPoint
    second: TargetPoint | None
    ratio: Ratio | None

    @property
    def clear(self) -> bool:
        """Whether it is told apart from the next. The best median may lose in the blocks that both have."""
        return self.ratio is not None and self.ratio.is_above(1)


def _winner(side: Side) -> Winner | None:
    """None where nothing on the target has a figure."""
    ranked = side.ranked
    if len(ranked) < 2:
        return Winner(side, ranked[0], None, None) if ranked else None
    values = (ranked[0].result.values("throughput"), ranked[1].result.values("throughput"))
    ratio = paired_ratio(*values, comparisons=len(ranked) - 1, confidence=ranked[0].result.confidence)
    return Winner(side, ranked[0], ranked[1], ratio)


def targets_opening(found: SideBySide) -> str:
    """The winner on each target in one sentence for the report's first screen; those of one winner together.

    Of a single point nothing wins: then it is the targets that are told side by side.
    """
    if len(found.labels) == 1 and all(len(side.points) == 1 for side in found.sides):
        values = ((side, side.points[0].throughput) for side in found.sides)
        told = [
            f"{'nothing has a figure' if value is None else estimate_text(value, found.unit)} on {side.target}"
            for side, value in values
        ]
        return f"{found.sides[0].points[0].label}: {joined(told)}."
    clear: dict[str, list[str]] = {}
    rest = []
    for side in found.sides:
        winner = _winner(side)
        if winner is None:
            rest.append(f"nothing has a figure on {side.target}")
        elif winner.second is None and len(side.points) > 1:
            rest.append(f"only {winner.best.label} has a figure on {side.target}")
        elif winner.ratio is None and winner.second is not None:
            rest.append(f"no block has both {winner.best.label} and {winner.second.label} on {side.target}")
        elif not winner.clear and winner.second is not None:
            rest.append(f"{winner.best.label} and {winner.second.label} are not told apart on {side.target}")
        else:
            lead = ""
            if winner.ratio is not None and winner.second is not None:
                lead = f" with {ratio_text(winner.ratio, 'pair')} the throughput of {winner.second.label}"
            clear.setdefault(winner.best.label, []).append(f"on {side.target}{lead}")
    told = [f"{label} is fastest {joined(sides)}" for label, sides in clear.items()] + rest
    return "; ".join(told) + "."


def targets_sentence(found: SideBySide) -> str:
    """The winner on each target with its figures."""
    return " ".join(_winner_text(side, found.unit) for side in found.sides)


def _winner_text(side: Side, unit: str) -> str:
    winner = _winner(side)
    if winner is None:
        return f"On {side.name} nothing has a figure."
    value, second = winner.best.throughput, winner.second
    assert value is not None, "ranked are those with a figure"
    if len(side.points) == 1:
        return f"On {side.name} {winner.best.label} has {estimate_text(value, unit)}."
    if second is None:
        return f"On {side.name} only {winner.best.label} has a figure: {estimate_text(value, unit)}."
    text = f"On {side.name} {winner.best.label} is fastest: {estimate_text(value, unit)}"
    if winner.ratio is None:
        return f"{text}; no block has both it and {second.label}."
    second_value = second.throughput
    if not winner.clear and second_value is not None:
        return (
            f"On {side.name} {winner.best.label} ({estimate_text(value, unit)}) and {second.label} "
            f"({estimate_text(second_value, unit)}) are not told apart."
        )
    return f"{text}, {ratio_text(winner.ratio, 'pair')} that of {second.label}."


def targets_lines(found: SideBySide) -> list[str]:
    """On which targets points other than the baseline pay; those of which the same is true share a line.

    None where targets have different baselines, as each has its own best predicted layout.
    """
    bases = {point.label for side in found.sides for point in side.points if point.baseline}
    if len(bases) != 1:
        return []
    (base,) = bases
    same: dict[tuple[_Verb, str], list[str]] = {}
    of_sides = [{point.label: point for point in side.points} for side in found.sides]
    for label in found.labels:
        if label != base:
            points = [of_side.get(label) for of_side in of_sides]
            same.setdefault(_pays(base, points, found), []).append(label)
    return [
        f"{first_of(labels, _MOST_NAMED)} {verb[min(len(labels), 2) - 1]} {rest}"
        for (verb, rest), labels in same.items()
    ]


_Verb = tuple[str, str]
_BE, _NEED = ("is", "are"), ("needs", "need")
"""Of one point, and of several."""


def _pays(base: str, points: Sequence[TargetPoint | None], found: SideBySide) -> tuple[_Verb, str]:
    """`tp=2 on 2 nodes needs at least 1 Gbit/s to beat 1 rank: slower on 100 Mbit/s.`, without its subject."""
    sides = found.sides

    def where(said: Callable[[TargetPoint], bool]) -> str:
        return joined(
            side.target for side, point in zip(sides, points, strict=True) if point is not None and said(point)
        )

    faster = [point is not None and point.faster is True for point in points]
    rest = {
        "slower on": where(lambda point: point.faster is False),
        "not told apart on": where(lambda point: point.ratio is not None and point.faster is None),
        "without a common block on": where(lambda point: point.ratio is None and point.throughput is not None),
        "without a figure on": where(lambda point: point.ratio is None and point.throughput is None),
        "not planned on": joined(side.target for side, point in zip(sides, points, strict=True) if point is None),
    }
    others = "; ".join(f"{words} {names}" for words, names in rest.items() if names)
    first = faster.index(True) if True in faster else len(faster)
    if all(faster):
        return _BE, f"faster than {base} on every target."
    if first == len(faster):
        return _BE, f"faster than {base} on none of the targets: {others}."
    compared = [point is not None and point.ratio is not None for point in points]
    if found.by_link and all(faster[first:]) and all(compared[:first]):
        return _NEED, f"at least the link of {sides[first].name} to beat {base}: {others}."
    return _BE, f"faster than {base} on {where(lambda point: point.faster is True)}; {others}."
