"""Which server a load experiment decides for: the layout, engine or place that carries most for what it costs.

    found = choose_server(load_experiment(study, experiment))
    found.chosen.label, found.value, found.ratio

A candidate is everything that tells points apart but the load. What it carries is, in this order of what was asked:
the rate that a search found; with objectives the goodput, of the loads at which enough requests meet them, where it is
largest; else the tokens of a second, all at the highest load that every one was measured at. At a rate that all of them
keep up with, tokens say nothing: the sooner answer decides (`reports.decisions.choice` has the rule). Where latency was
not steady, as while a queue grows, a server neither meets objectives nor keeps up: it is the run's end that bounds it.
One whose answers are wrong, or of other lengths than asked for, is none. Of points that are asked something else, such
as longer answers, none is a better server: there is no choice then.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from configs.plans.plan import PlannedExperiment
from reports.decisions.choice import Candidate, Choice, choose_candidate
from reports.experiments.load.experiment import LoadExperiment, LoadPoint, load_experiment
from reports.numbers.statistics import Estimate, Ratio, estimate, min_repeats, paired_ratio
from reports.reading.load import StudyResult
from reports.text import number

ServerFigure = Literal["limit", "goodput", "tokens"]
FIGURES: dict[ServerFigure, str] = {
    "limit": "requests/s",
    "goodput": "requests/s that meet the objectives",
    "tokens": "tokens/s",
}
"""What is compared, by the name of a point's figure, with its unit."""


@dataclass(frozen=True)
class MeasuredServer:
    """One way to serve, at the point that speaks for it. at: the load there; None where the experiment has one alone.

    values: what it carries, by repeat.
    """

    label: str
    point: LoadPoint
    at: float | None
    values: Mapping[int, float]

    @property
    def seconds(self) -> dict[int, float]:
        """Time of a whole answer at P50, by repeat."""
        return figure_values(self.point, "e2e_p50")

    @property
    def value(self) -> Estimate:
        found = estimate(self.values.values(), self.point.result.confidence)
        assert found is not None
        return found


@dataclass(frozen=True)
class ServerChoice:
    """What to run of `servers`; `choice` None: there is only one, and what it carries is the finding.

    figure: a key of FIGURES. left_out: candidates that are none, with the reason. others_win: loads at which another
    one carries more. by_latency: all keep up with what is asked, and the sooner answer decides.
    """

    figure: ServerFigure
    servers: tuple[MeasuredServer, ...]
    choice: Choice | None
    left_out: Mapping[str, str]
    others_win: Mapping[float, str]
    by_latency: bool = False

    @property
    def chosen(self) -> MeasuredServer:
        return self.servers[0 if self.choice is None else self.choice.chosen]

    @property
    def next_best(self) -> MeasuredServer | None:
        """The other one that carries most, or answers soonest."""
        others = [one for one in self.servers if one is not self.chosen]
        if self.by_latency:
            return min(
                (one for one in others if one.seconds), key=lambda one: median(one.seconds.values()), default=None
            )
        return max(others, key=lambda one: one.value.median, default=None)

    @property
    def ratio(self) -> Ratio | None:
        """What the chosen one carries over what the next best does, or how many times as fast it answers; corrected for
        as many comparisons as there are others."""
        other = self.next_best
        if other is None:
            return None
        better, worse = (other.seconds, self.chosen.seconds) if self.by_latency else (self.chosen.values, other.values)
        return paired_ratio(better, worse, max(1, len(self.servers) - 1), self.chosen.point.result.confidence)

    @property
    def repeats_needed(self) -> int | None:
        """Repeats that would settle the choice against the next best: for an interval, or for half of one that leaves
        it open, which takes four times as many. None where it is settled."""
        other = self.next_best
        if self.choice is None or other is None:
            return None
        by_size = self.choice.larger is not None and not self.by_latency
        larger = by_size and self.servers[self.choice.larger or 0] is other
        ratio = self.choice.per_size if larger else self.ratio
        if ratio is None or (larger and ratio.bounds[1] <= 1):
            return None
        if ratio.interval is None:
            return min_repeats(ratio.comparisons, self.chosen.point.result.confidence)
        return None if ratio.differs else 4 * ratio.count


def server_choices(study: StudyResult) -> list[tuple[PlannedExperiment, LoadExperiment, ServerChoice | None]]:
    """Every load experiment of a study, with what it decides."""
    loads = [one for one in study.plan.experiments if one.kind == "load" and one.points]
    read = [(one, load_experiment(study, one)) for one in loads]
    return [(one, found, choose_server(found)) for one, found in read]


def choose_server(found: LoadExperiment) -> ServerChoice | None:
    """Choose; None where no candidate has a result, or they are not asked the same."""
    figure = _figure_of(found)
    if figure is None or found.asked:
        return None
    series, engines = _candidates(found), {point.result.cell.engine for point in found.points}
    left_out, usable = dict[str, str](), dict[str, dict[float | None, LoadPoint]]()
    for label, points in series.items():
        known = {at: point for at, point in points.items() if figure_values(point, figure)}
        why = _why_not(known, several_engines=len(engines) > 1) if known else _why_none(points.values(), figure)
        if why is None:
            usable[label] = known
        else:
            left_out[label] = why
    if figure == "goodput":
        usable, missed = _holding(usable)
        left_out |= missed
    servers = _speakers(usable, figure)
    if not servers:
        return None
    if len(servers) == 1:
        return ServerChoice(figure, tuple(servers), None, left_out, {})
    sizes = _sizes(servers)
    candidates = [Candidate(one.label, sizes[one.label], one.values, one.seconds) for one in servers]
    by_latency = _kept_up(servers, figure)
    choice = choose_candidate(candidates, by_latency, servers[0].point.result.confidence)
    chosen = servers[choice.chosen].label
    same = {label: points for label, points in usable.items() if sizes.get(label) == sizes[chosen]}
    return ServerChoice(figure, tuple(servers), choice, left_out, _others_win(same, figure, chosen), by_latency)


def _sizes(servers: list[MeasuredServer]) -> dict[str, float]:
    """Dollars an hour where all have a price, else ranks."""
    prices = {one.label: one.point.usd_per_hour for one in servers}
    known = {label: price for label, price in prices.items() if price is not None}
    return known if len(known) == len(prices) else {one.label: one.point.result.cell.layout.ranks for one in servers}


def figure_values(point: LoadPoint, figure: str) -> dict[int, float]:
    """A figure by repeat, of the repeats that are results; of a point that carried nothing in one of them, none."""
    values = point.by_repeat(figure)
    return values if all(values.values()) else {}


def _figure_of(found: LoadExperiment) -> ServerFigure | None:
    if not found.points:
        return None
    if all(point.work.find for point in found.points):
        return "limit"
    return "goodput" if all(point.work.objectives for point in found.points) else "tokens"


def _candidates(found: LoadExperiment) -> dict[str, dict[float | None, LoadPoint]]:
    """Points by what tells them apart but the load, and by the load."""
    if found.axis is None:
        return {point.label: {None: point} for point in found.points}
    return {title: dict(points) for title, points in found.series().items()}


def _why_none(points: Iterable[LoadPoint], figure: ServerFigure) -> str:
    """Why a candidate has no figure at any load."""
    results = [one for point in points for one in point.valid]
    if not results:
        return "no result"
    if figure != "limit":
        return "no request meets the objectives" if figure == "goodput" else "no tokens arrived"
    searches = [one.search for one in results if one.search is not None]
    lows = [one.low for one in searches if one.low is not None]
    reason = searches[0].reason if searches else "no search"
    return f"at least {number(min(lows))} requests/s, {reason}" if lows else reason


def _why_not(known: Mapping[float | None, LoadPoint], several_engines: bool) -> str | None:
    if not all(point.correct for point in known.values()):
        return "wrong answers under load"
    # One engine ends its answers alike in every layout.
    uneven = several_engines and not all(point.comparable for point in known.values())
    return "answers of other lengths than asked for" if uneven else None


def _holding(
    usable: Mapping[str, Mapping[float | None, LoadPoint]],
) -> tuple[dict[str, dict[float | None, LoadPoint]], dict[str, str]]:
    """The loads at which as many requests as asked meet the objectives, and candidates without one; all loads where no
    candidate has one, since the largest goodput then says how far it is."""
    held = {label: {at: one for at, one in points.items() if _holds(one)} for label, points in usable.items()}
    if not any(held.values()):
        return {label: dict(points) for label, points in usable.items()}, {}
    missed = {label: _why_missed(usable[label].values()) for label, points in held.items() if not points}
    return {label: points for label, points in held.items() if points}, missed


def _why_missed(points: Iterable[LoadPoint]) -> str:
    unsteady = any(_meets(point) for point in points)
    return "not steady where it meets the objectives" if unsteady else "misses the objectives at every load"


def _holds(point: LoadPoint) -> bool:
    return _meets(point) and point.lasting


def _meets(point: LoadPoint) -> bool:
    share, objectives = point.value("goodput_share"), point.work.objectives
    return share is not None and objectives is not None and share.median >= objectives.share


def _speakers(usable: Mapping[str, Mapping[float | None, LoadPoint]], figure: str) -> list[MeasuredServer]:
    """The point that speaks for each candidate."""
    shared = set.intersection(*(set(points) for points in usable.values())) if usable else set()
    servers = []
    for label, points in usable.items():
        if figure == "goodput":
            at = max(points, key=lambda one: _median(points[one], figure))
        elif shared:
            at = max(shared, key=lambda one: one or 0.0)
        else:
            continue
        servers.append(MeasuredServer(label, points[at], at, figure_values(points[at], figure)))
    return servers


def _kept_up(servers: list[MeasuredServer], figure: str) -> bool:
    """Whether all of them do what an open loop asks, so that only the latency tells them apart.

    A trace asks at the rate of its requests.
    """
    asked = [one.point.value("offered" if one.point.work.trace else "asked") for one in servers]
    achieved = [one.point.value("achieved") for one in servers]
    return figure == "tokens" and all(
        rate is not None and done is not None and done.median >= 0.9 * rate.median and one.point.lasting
        for one, rate, done in zip(servers, asked, achieved, strict=True)
    )


def _others_win(
    same_size: Mapping[str, Mapping[float | None, LoadPoint]], figure: str, chosen: str
) -> dict[float, str]:
    """Loads at which another one of the same size surely carries more, with its label."""
    if figure != "tokens":
        return {}
    found = {}
    for at, point in same_size[chosen].items():
        mine = figure_values(point, figure)
        for label, points in same_size.items():
            other = points.get(at)
            if at is None or label == chosen or other is None:
                continue
            values = figure_values(other, figure)
            ratio = paired_ratio(values, mine, max(1, len(same_size) - 1), point.result.confidence)
            if ratio is not None and ratio.is_above(1):
                found[at] = label
    return found


def _median(point: LoadPoint, figure: str) -> float:
    value = estimate(figure_values(point, figure).values())
    return 0.0 if value is None else value.median
