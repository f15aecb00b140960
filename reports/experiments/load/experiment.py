"""Load experiments: each point's runs, judged and reduced to figures over the repeats.

    found = load_experiment(study, experiment)
    found.points[0].value("ttft_p99"), found.knee, found.best

A run in which the load generator was the bottleneck is void and no result. One that was not steady says nothing of
longer ones: its latencies depend on its length. Answers under load are compared with those of the same
requests alone: a first difference at a near-tie is the noise of reduction orders, any other is a defect.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose

import numpy as np

from configs.common.execution import Dtype
from configs.common.printable import value_text
from configs.plans.plan import PlannedExperiment
from configs.records.samples import DamagedSamplesError
from configs.targets.target import EndpointTarget
from configs.workloads.serve import PROBE_COLUMNS, SERVER_FIELDS, STATE_COLUMNS, ServeWorkload
from reports.decisions.cost import inverse, price_of
from reports.load.metrics import LoadFigures, serving_metrics
from reports.load.next_rate import goal_of, search_after
from reports.load.records import runs_of
from reports.load.samples import LoadRun
from reports.load.search import FoundRate
from reports.load.verdict import LoadVerdict, Verdict, judged
from reports.numbers.statistics import Estimate, estimate, ties
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading

HOUR_SECONDS = 3600.0
TIE_NATS: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.125, "float16": 0.016}
"""Gap between two tokens' log-probabilities below which their order is noise. Logits of up to 16 in 16 bits are rounded
to 2^-4 (bfloat16) and 2^-7 (float16), and two of them are compared; in float32 sums differ by far less."""


@dataclass(frozen=True)
class LoadAnswers:
    """Answers under load against the same requests alone.

    ties: first differ at a near-tie of two tokens. untold: differ where the server gave no log-probabilities, so that
    noise and a defect cannot be told apart.
    """

    compared: int
    equal: int
    ties: int
    untold: int = 0

    @property
    def different(self) -> int:
        """Those that no near-tie explains."""
        return self.compared - self.equal - self.ties - self.untold


@dataclass(frozen=True)
class LoadRepeat:
    """One repeat: its run (of a search the last one), or what the search found. tokens: of one second."""

    figures: LoadFigures
    judgement: LoadVerdict
    search: FoundRate | None
    waiting: float | None
    memory_bytes: float | None

    def figure(self, name: str) -> float | None:
        """`offered`, `achieved`, `tokens`, `limit`, `ttft_p99`, `e2e_mean`...; None where it is not known."""
        figures = self.figures
        plain: dict[str, float | None] = {
            "asked": figures.requested_rate,
            "offered": figures.offered_rate,
            "achieved": figures.achieved_rate,
            "tokens": figures.tokens_per_second,
            "goodput": None if figures.goodput is None else figures.goodput.requests_per_second,
            "goodput_share": None if figures.goodput is None else figures.goodput.share,
            "waiting": self.waiting,
            "memory": self.memory_bytes,
            "limit": None if self.search is None else self.search.estimate,
        }
        if name in plain:
            return plain[name]
        kind, _, which = name.rpartition("_")
        latency = figures.latencies.get(kind)
        if latency is None:
            return None
        return latency.mean if which == "mean" else float(getattr(latency, which).value)


@dataclass(frozen=True)
class LoadPoint:
    """One cell of the experiment. answers: over all repeats; None where nothing was compared."""

    label: str
    result: CellResult
    repeats: dict[int, LoadRepeat]
    answers: LoadAnswers | None
    usd_per_hour: float | None
    damaged: tuple[str, ...] = ()

    @property
    def work(self) -> ServeWorkload:
        """The cell's workload."""
        work = self.result.cell.workload
        assert isinstance(work, ServeWorkload)
        return work

    @property
    def valid(self) -> list[LoadRepeat]:
        """Repeats whose figures are results."""
        return [one for one in self.repeats.values() if one.judgement.is_result]

    @property
    def steady(self) -> bool:
        """Whether every result comes from a steady state, as far as that is known."""
        return all(one.judgement.verdict is not Verdict.NOT_STEADY for one in self.valid)

    @cached_property
    def _estimates(self) -> dict[str, Estimate | None]:
        return {}

    @property
    def lasting(self) -> bool:
        """Whether a longer run would show the same latencies: at most half of the results were not steady."""
        return 2 * sum(one.judgement.verdict is Verdict.NOT_STEADY for one in self.valid) <= len(self.valid)

    def value(self, name: str) -> Estimate | None:
        """Median and interval over the repeats of a figure: `ttft_p99`, `achieved`, `tokens`, `goodput`, `limit`..."""
        if name not in self._estimates:
            self._estimates[name] = estimate([one.figure(name) for one in self.valid], self.result.confidence)
        return self._estimates[name]

    def by_repeat(self, name: str) -> dict[int, float]:
        """A figure of each result, by repeat; without those where it is not known."""
        values = {repeat: one.figure(name) for repeat, one in self.repeats.items() if one.judgement.is_result}
        return {repeat: value for repeat, value in values.items() if value is not None}

    @property
    def comparable(self) -> bool:
        """Whether its answers had the lengths that were asked for, as they must beside other engines'."""
        held = [one.figures.lengths_held for one in self.valid]
        return bool(held) and all(share is None or share >= 1 for share in held)

    @property
    def correct(self) -> bool:
        """Whether no answer under load differs from the same request's alone, but for noise."""
        return self.answers is None or self.answers.different == 0

    @property
    def usd_per_million_tokens(self) -> Estimate | None:
        """At this load: the price of an hour over the tokens that arrived in one."""
        if self.usd_per_hour is None:
            return None
        return inverse(self.value("tokens"), self.usd_per_hour / HOUR_SECONDS * 1e6)

    def figure(self, name: str) -> str | None:
        """A text of the first repeat's record."""
        for reading in self.result.completed.values():
            text = reading.record.figures.get(name)
            if isinstance(text, str) and text:
                return text
        return None


@dataclass(frozen=True)
class Knee:
    """A load, its neighbours on the axis, None at an end of it, and the loads that it is not told apart from."""

    at: float
    below: float | None
    above: float | None
    tied: tuple[float, ...]


@dataclass(frozen=True)
class LoadExperiment:
    """The points in the study's order, and what they say together."""

    experiment: PlannedExperiment
    points: tuple[LoadPoint, ...]

    @property
    def axis(self) -> str | None:
        """The field of numbers that a curve goes over: rate or users; None where there is none."""
        names = [name for name in ("rate", "users") if any(name in one for one in self._values)]
        return names[0] if names else None

    @property
    def asked(self) -> list[str]:
        """The fields beside the axis in which points differ that say what is asked: prompts, lengths, objectives."""
        found: dict[str, set[str]] = {}
        for point in self.experiment.points:
            for name, value in point.values.items():
                found.setdefault(_short(name), set()).add(repr(value))
        asked = ServeWorkload.model_fields.keys() - SERVER_FIELDS - {self.axis}
        return [name for name, values in found.items() if len(values) > 1 and name.partition(".")[0] in asked]

    @property
    def _values(self) -> Iterator[set[str]]:
        for point in self.experiment.points:
            yield {name.removeprefix("workload.") for name in point.values}

    def series(self) -> dict[str, list[tuple[float, LoadPoint]]]:
        """Points by what else tells them apart (engine, layout), each ascending along the axis."""
        found: dict[str, list[tuple[float, LoadPoint]]] = {}
        for planned, point in zip(self.experiment.points, self.points, strict=True):
            rest = {name: value for name, value in planned.values.items() if _short(name) != self.axis}
            at = next((value for name, value in planned.values.items() if _short(name) == self.axis), None)
            # A load too that is written as YAML takes for text: 5e-1.
            if isinstance(at, int | float | str):
                title = ", ".join(f"{_short(name)} {value_text(value)}" for name, value in rest.items())
                found.setdefault(title, []).append((float(at), point))
        return {title: sorted(points, key=lambda one: one[0]) for title, points in found.items()}

    def knees(self) -> dict[str, Knee]:
        """By series: where throughput over latency is largest.

        L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer communications",
        ICC 1979. The knee lies between the neighbours.
        """
        found = {}
        for title, points in self.series().items():
            known = [(power, at, point) for at, point in points if (power := _power(point)) is not None]
            if len(known) < 3:
                continue
            _, at, best = max(known, key=lambda one: one[:2])
            rest = [(one, point) for _, one, point in known if one != at]
            tied = ties(_powers(best), [_powers(point) for _, point in rest], best.result.confidence)
            below, above = [one for one, _ in rest if one < at], [one for one, _ in rest if one > at]
            found[title] = Knee(
                at, max(below, default=None), min(above, default=None), tuple(rest[one][0] for one in tied)
            )
        return found


def _short(name: str) -> str:
    return name.removeprefix("workload.")


def _power(point: LoadPoint) -> float | None:
    throughput, latency = point.value("achieved"), point.value("e2e_mean")
    if throughput is None or latency is None or latency.median <= 0:
        return None
    return throughput.median / latency.median


def _powers(point: LoadPoint) -> dict[int, float]:
    """Throughput over latency by repeat."""
    throughput, latency = point.by_repeat("achieved"), point.by_repeat("e2e_mean")
    return {repeat: value / latency[repeat] for repeat, value in throughput.items() if latency.get(repeat, 0) > 0}


def load_experiment(study: StudyResult, experiment: PlannedExperiment) -> LoadExperiment:
    """Read and judge the points of an experiment."""
    points = [replace(load_point(study, study.cells[one.cell]), label=one.label) for one in experiment.points]
    return LoadExperiment(experiment, tuple(points))


def load_point(study: StudyResult, result: CellResult) -> LoadPoint:
    """Read and judge the runs of one served cell; once, whoever asks for it. Its label is the cell's name."""
    known: dict[str, LoadPoint] = study.derived.setdefault("load points", {})
    key = result.cell.key
    if key not in known:
        known[key] = _point(study, result, result.name)
    return known[key]


def _point(study: StudyResult, result: CellResult, label: str) -> LoadPoint:
    repeats: dict[int, LoadRepeat] = {}
    damaged: list[str] = []
    probes: list[np.ndarray] = []
    price = price_of(study, result)
    for repeat, reading in result.completed.items():
        try:
            repeats[repeat], compared = _repeat(study, result, reading)
        except DamagedSamplesError as error:
            damaged.append(str(error))
            continue
        probes.append(compared)
    rows = np.concatenate(probes) if probes else np.empty((0, 3))
    usd = None if price is None else price.usd_per_hour * result.cell.nodes
    return LoadPoint(label, result, repeats, answers_of(rows, result.cell.dtype), usd, tuple(damaged))


def answers_of(rows: np.ndarray, dtype: Dtype) -> LoadAnswers | None:
    """Judge comparisons, rows of `PROBE_COLUMNS`. None of none."""
    if not len(rows):
        return None
    equal = rows[:, 0] == rows[:, 1]
    unknown = np.isnan(rows[:, 2])
    near = rows[:, 2] <= TIE_NATS[dtype]  # False where the gap is unknown
    return LoadAnswers(len(rows), int(equal.sum()), int((~equal & near).sum()), int((~equal & unknown).sum()))


def _repeat(study: StudyResult, result: CellResult, reading: Reading) -> tuple[LoadRepeat, np.ndarray]:
    work = result.cell.workload
    assert isinstance(work, ServeWorkload)
    columns = result.kind.columns
    samples = study.samples(reading, columns)
    # Of a search they are read again, one at a time: what is derived of a run is as large as its samples.
    found = None if work.find is None else _search(study, result, work, runs_of(reading.record, samples, reading.path))
    run = _nearest(runs_of(reading.record, samples, reading.path), found)
    figures = serving_metrics(run, work.objectives)
    probes = [np.asarray(samples.get(f"0/{name}", ()), dtype=np.float64) for name in PROBE_COLUMNS]
    if len({len(one) for one in probes}) != 1:
        raise DamagedSamplesError(f"{reading.path}: columns of compared answers differ in length")
    state = {name: np.asarray(samples.get(f"0/{name}", ()), dtype=np.float64) for name in STATE_COLUMNS}
    repeat = LoadRepeat(
        figures,
        judged(run, figures),
        found,
        _highest(state["state_waiting"]),
        _highest(state["state_memory_bytes"]),
    )
    return repeat, np.column_stack(probes)


def _search(study: StudyResult, result: CellResult, work: ServeWorkload, runs: Iterable[LoadRun]) -> FoundRate:
    target = next(one for one in study.plan.targets if one.name == result.cell.target)
    request = work.search(target.max_rate if isinstance(target, EndpointTarget) else None)
    return search_after(goal_of(request), request.objectives, runs).result()


def _nearest(runs: Iterable[LoadRun], found: FoundRate | None) -> LoadRun:
    """The last run at the highest rate that passes; the last run of all where none does, or nothing was searched."""
    low = None if found is None else found.low
    last: LoadRun | None = None
    passing: LoadRun | None = None
    for last in runs:
        # Divided by the turns of a conversation and multiplied again, a rate is the same but for its last digits.
        if low is not None and isclose(last.facts.job.requested_rate or 0.0, low):
            passing = last
    nearest = last if passing is None else passing
    assert nearest is not None, "a record has a run"
    return nearest


def _highest(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else None
