"""The answers of a run for other programs: decisions, scaling, verdicts and gaps, each with interval and evidence.

    print(run_answers(load_comparable(run)).model_dump_json(indent=2))

`rankwise report RUN --format json` prints it; docs/reference/report-json.md has every field. Values are whole, not
rounded, in the units that their names carry. What is not known is null.
"""

from typing import Literal

from pydantic import Field

from configs.common.base import Frozen
from configs.plans.plan import PlannedExperiment
from reports.correctness.section import JudgedCell, judge_experiment
from reports.decisions.cost import cell_costs
from reports.decisions.decision import Basis, Decision, decide
from reports.decisions.next_measurement import next_lines, repeats_to_decide
from reports.decisions.objectives import judge_objectives
from reports.decisions.wrong_answers import cells_with_wrong_answers
from reports.experiments.load.choice import FIGURES, MeasuredServer, ServerChoice, server_choices
from reports.experiments.load.choice_text import next_server_lines
from reports.experiments.scaling import scaling
from reports.numbers.statistics import Estimate, Ratio
from reports.reading.load import CellResult, StudyResult

ANSWERS_VERSION = 1

BoundsKind = Literal["interval", "range"]


class Value(Frozen):
    """A median or ratio over repeats or pairs of repeats, and its bounds."""

    value: float
    low: float
    high: float
    bounds: BoundsKind = Field(description="`interval`: 95 %, corrected for the comparisons made; `range`: too few")
    count: int = Field(description="repeats, or pairs of the same block")


class ChosenCell(Frozen):
    """One cell with its figures and where they come from."""

    key: str
    name: str
    target: str
    nodes: int
    ranks: int
    unit: str = Field(description="of throughput")
    throughput: Value | None
    latency_seconds: Value | None = Field(description="of a token, a request or a step, as the kind of work has it")
    usd_per_hour: float | None
    records: tuple[str, ...] = Field(description="paths of the records behind the figures, relative to the run folder")


class DecisionAnswer(Frozen):
    """What to run for one model and work; docs/explanation/decision.md has the rule."""

    model: str
    work: str
    better_by: Basis = Field(description="work per dollar or per rank, or latency")
    candidates: int
    left_out: dict[str, int] = Field(description="cells that were no candidates, by reason")
    chosen: ChosenCell | None
    simplest: ChosenCell | None = Field(description="null: the chosen one")
    gain_over_simplest: Value | None = Field(description="ratio of work a second")
    larger: ChosenCell | None = Field(description="of those that cost more, the one that does the most work")
    larger_over_chosen: Value | None = Field(description="ratio of work a second")
    larger_over_chosen_per_size: Value | None = Field(description="the same per rank or dollar")


class ScalingPointAnswer(Frozen):
    """One number of ranks of a scaling experiment."""

    ranks: int
    key: str
    speedup: Value | None
    efficiency: Value | None


class ScalingAnswer(Frozen):
    """A strong or weak scaling experiment of one model."""

    experiment: str
    kind: Literal["strong", "weak"]
    model: str
    baseline_ranks: int
    points: tuple[ScalingPointAnswer, ...]


class ServerAnswer(Frozen):
    """One way to serve, at the point that speaks for it."""

    label: str
    key: str
    load: float | None = Field(description="users, or requests a second asked for; null: the experiment has one load")
    carries: Value = Field(description="in the unit of the experiment")
    ttft_p99_seconds: Value | None
    tpot_p99_seconds: Value | None
    usd_per_hour: float | None
    usd_per_million_tokens: Value | None


class ServingAnswer(Frozen):
    """Which server a load experiment decides for."""

    experiment: str
    model: str | None
    compared: Literal["limit", "goodput", "tokens"]
    by_latency: bool = Field(description="all keep up with the rate asked for: the sooner answer decides")
    unit: str
    chosen: ServerAnswer
    others: tuple[ServerAnswer, ...]
    over_next: Value | None = Field(description="ratio of what it carries, or of the speed of its answers, to the next")
    left_out: dict[str, str] = Field(description="servers that were no candidates, with the reason")


class VerdictAnswer(Frozen):
    """Whether a cell's answers are those of the reference."""

    model: str
    cell: str
    key: str
    word: str = Field(description="agrees, defect, or not judged")
    reason: str


class MissingCell(Frozen):
    """A cell without a figure."""

    key: str
    name: str
    status: str
    reason: str | None


class OpeningAnswers(Frozen):
    """Everything that the opening of a report rests on."""

    version: int = ANSWERS_VERSION
    study: str
    decisions: tuple[DecisionAnswer, ...]
    serving: tuple[ServingAnswer, ...] = ()
    scaling: tuple[ScalingAnswer, ...]
    correctness: tuple[VerdictAnswer, ...]
    without_figure: tuple[MissingCell, ...]
    unreadable: tuple[str, ...] = Field(description="files of the run that were left out")
    repeats_to_decide: int | None = Field(description="of every cell; null: more repeats would settle nothing")
    next: tuple[str, ...] = Field(description="sentences on what a further measurement would settle")


def run_answers(study: StudyResult) -> OpeningAnswers:
    """The answers of a study as read."""
    experiments = [one for one in study.plan.experiments if one.points]
    judged: list[tuple[str, JudgedCell]] = []
    for experiment in experiments:
        if experiment.kind == "correctness":
            base, items = judge_experiment(study, experiment)
            judged += [(base.model, item) for item in items]
    decisions = decide(study, cell_costs(study), judge_objectives(study), cells_with_wrong_answers(study, judged))
    served = server_choices(study)
    needed = [repeats_to_decide(decisions), *(one.repeats_needed for *_, one in served if one is not None)]
    return OpeningAnswers(
        study=study.plan.study,
        decisions=tuple(_decision(one) for one in decisions),
        serving=tuple(_serving(one, choice) for one, _, choice in served if choice is not None),
        scaling=tuple(_scaling(study, one) for one in experiments if one.kind in ("strong", "weak")),
        correctness=tuple(_verdict(model, item) for model, item in judged),
        without_figure=tuple(_missing(one) for one in study.cells.values() if not one.completed),
        unreadable=tuple(one.path for one in study.unreadable),
        repeats_to_decide=max((count for count in needed if count is not None), default=None),
        next=(*next_lines(decisions, study.cells.values()), *next_server_lines(served)),
    )


def _decision(found: Decision) -> DecisionAnswer:
    choice = found.choice

    def cell(index: int | None) -> ChosenCell | None:
        return None if index is None else _cell(found, found.members[index])

    apart = None if choice is None or choice.simplest == choice.chosen else choice.simplest
    return DecisionAnswer(
        model=found.model,
        work=found.work,
        better_by=found.basis,
        candidates=len(found.members),
        left_out=dict(found.left_out),
        chosen=cell(None if choice is None else choice.chosen),
        simplest=cell(apart),
        gain_over_simplest=_ratio(None if choice is None else choice.gain),
        larger=cell(None if choice is None else choice.larger),
        larger_over_chosen=_ratio(None if choice is None else choice.more),
        larger_over_chosen_per_size=_ratio(None if choice is None else choice.per_size),
    )


def _cell(found: Decision, result: CellResult) -> ChosenCell:
    cost, latency = found.costs.get(result.key), result.latency
    return ChosenCell(
        key=result.key,
        name=result.name,
        target=result.cell.target,
        nodes=result.cell.nodes,
        ranks=result.cell.layout.ranks,
        unit=result.unit,
        throughput=_value(result.estimate("throughput")),
        latency_seconds=None if latency is None else _value(result.estimate(latency.figure)),
        usd_per_hour=None if cost is None else cost.usd_per_hour,
        records=tuple(reading.path for reading in result.completed.values()),
    )


def _scaling(study: StudyResult, experiment: PlannedExperiment) -> ScalingAnswer:
    found = scaling(study, experiment)
    return ScalingAnswer(
        experiment=experiment.name,
        kind=found.kind,
        model=found.baseline.result.model,
        baseline_ranks=found.baseline.ranks,
        points=tuple(
            ScalingPointAnswer(
                ranks=point.ranks,
                key=point.result.key,
                speedup=_ratio(point.speedup),
                efficiency=_ratio(point.efficiency),
            )
            for point in found.points
        ),
    )


def _serving(experiment: PlannedExperiment, choice: ServerChoice) -> ServingAnswer:
    compared: Literal["limit", "goodput", "tokens"] = choice.figure
    return ServingAnswer(
        experiment=experiment.name,
        model=experiment.model,
        compared=compared,
        by_latency=choice.by_latency,
        unit=FIGURES[compared],
        chosen=_server(choice.chosen),
        others=tuple(_server(one) for one in choice.servers if one is not choice.chosen),
        over_next=_ratio(choice.ratio),
        left_out=dict(choice.left_out),
    )


def _server(found: MeasuredServer) -> ServerAnswer:
    point = found.point
    return ServerAnswer(
        label=found.label,
        key=point.result.key,
        load=found.at,
        carries=_bounded(found.value.median, found.value),
        ttft_p99_seconds=_value(point.value("ttft_p99")),
        tpot_p99_seconds=_value(point.value("tpot_p99")),
        usd_per_hour=point.usd_per_hour,
        usd_per_million_tokens=_value(point.usd_per_million_tokens),
    )


def _verdict(model: str, item: JudgedCell) -> VerdictAnswer:
    verdict = item.verdict
    return VerdictAnswer(model=model, cell=item.label, key=item.result.key, word=verdict.word, reason=verdict.reason)


def _missing(result: CellResult) -> MissingCell:
    record = result.measurements[max(result.measurements)].record if result.measurements else None
    failure = None if record is None else record.failure
    return MissingCell(
        key=result.key, name=result.title, status=result.status, reason=None if failure is None else failure.message
    )


def _value(found: Estimate | None) -> Value | None:
    return None if found is None else _bounded(found.median, found)


def _ratio(found: Ratio | None) -> Value | None:
    return None if found is None else _bounded(found.value, found)


def _bounded(value: float, found: Estimate | Ratio) -> Value:
    low, high = found.bounds
    kind: BoundsKind = "range" if found.interval is None else "interval"
    return Value(value=value, low=low, high=high, bounds=kind, count=found.count)
