"""Comparison of training strategies on the same ranks of each target, and of their predicted ranking.

    for found in strategies(study):                 # one for each piece of work and place that several ways measured
        strategies_table(study, found), strategies_sentence(found)
        draw_strategies(figure, found)              # reports.plots.experiments.training

Two ways differ clearly where the intervals of their step times (with fewer than six repeats their ranges) lie apart.
The ranking is right where no pair that differs clearly is predicted the other way round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import (
    UNKNOWN,
    Table,
    escaped,
    estimate_cell,
    estimate_text,
    joined,
    mebibytes,
    not_apart,
    number,
    percent,
    plural,
)
from reports.training.cells import exposed_shares, network_bytes_of
from reports.training.equality import what_is_learnt


@dataclass(frozen=True)
class Way:
    """One way to train: its cell, what was measured of a step, and what was said beforehand."""

    name: str
    result: CellResult
    prediction: Prediction | None

    @property
    def measured(self) -> Estimate | None:
        """Seconds of a step."""
        return self.result.estimate("step_seconds")

    @property
    def predicted(self) -> float | None:
        """The same as the planner said."""
        return None if self.prediction is None else self.prediction.step_seconds


@dataclass(frozen=True)
class Strategies:
    """Ways on one target with the same ranks; `ways` in the order of the plan."""

    title: str
    target: str
    ways: tuple[Way, ...]

    @property
    def ranked(self) -> list[Way]:
        """Those with a figure, the fastest first."""
        known = [(way.measured.median, way) for way in self.ways if way.measured is not None]
        return [way for _, way in sorted(known, key=lambda pair: pair[0])]

    @property
    def expected(self) -> list[Way]:
        """Those with a figure and a prediction, the fastest by prediction first."""
        known = [(way.predicted, way) for way in self.ranked if way.predicted is not None]
        return [way for _, way in sorted(known, key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Ranking:
    """Pairs of ways (faster, slower, as measured) that both have a prediction, by what became of it."""

    pairs: int
    right: tuple[tuple[Way, Way], ...]
    equal: tuple[tuple[Way, Way], ...]
    wrong: tuple[tuple[Way, Way], ...]

    @property
    def clear(self) -> int:
        """Pairs that differ clearly."""
        return len(self.right) + len(self.equal) + len(self.wrong)


def way_name(cell: Cell) -> str:
    """What tells ways to train apart: `fsdp hybrid, cpu offload, in 4 micro-batches`."""
    work, layout = cell.workload, cell.layout
    assert isinstance(work, TrainWorkload)
    parts = [layout.strategy + (" hybrid" if work.sharding == "hybrid" else "")]
    if layout.tp > 1:
        parts[0] += f" x tp={layout.tp}"
    if work.offload != "none":
        parts.append(f"{work.offload} offload")
    if work.activation_checkpointing != "none":
        parts.append(f"{work.activation_checkpointing} checkpointing")
    if work.compiled:
        parts.append("compiled")
    turns = work.accumulation(layout.dp)
    if turns > 1:
        parts.append(f"in {turns} micro-batches")
    if work.checkpoint_every is not None:
        parts.append(
            "a checkpoint every " + ("step" if work.checkpoint_every == 1 else f"{work.checkpoint_every} steps")
        )
    return ", ".join(parts)


def strategies(study: StudyResult) -> list[Strategies]:
    """Every piece of work that was planned in several ways on the same ranks of a target, and measured on one device.

    Ways without a figure stay with the first device.
    """
    groups: dict[tuple[object, ...], list[CellResult]] = {}
    for result in study.cells.values():
        cell = result.cell
        if result.kind.trains:
            place = (cell.target, cell.layout.ranks, cell.nodes, cell.cores_per_rank)
            groups.setdefault((what_is_learnt(cell), cell.dtype, *place), []).append(result)
    found = []
    for members in (part for group in groups.values() for part in _by_device(group)):
        names = [way_name(result.cell) for result in members]
        if len(set(names)) < 2:
            continue
        told = len(set(names)) == len(names)  # else something else tells them apart, such as variables
        ways = tuple(
            Way(name if told else result.name, result, study.plan.predictions.get(result.key))
            for name, result in zip(names, members, strict=True)
        )
        found.append(Strategies(_title(members[0]), members[0].cell.target, ways))
    return found


def _by_device(group: Sequence[CellResult]) -> list[list[CellResult]]:
    devices: list[str | None] = [*dict.fromkeys(one.device for one in group if one.device is not None)] or [None]
    return [[one for one in group if (one.device or devices[0]) == device] for device in devices]


def _title(result: CellResult) -> str:
    cell = result.cell
    assert isinstance(cell.workload, TrainWorkload)
    ranks = plural(cell.layout.ranks, "rank") + (f" on {cell.nodes} nodes" if cell.nodes > 1 else "")
    batch = f"batch {cell.workload.global_batch_size}"
    if cell.workload.task != "image_classification":  # whose length is the model's
        batch += f" x {cell.workload.sequence_length}"
    return f"{cell.target}: {result.model}, {ranks}, {cell.dtype}, {batch}"


def ranking(found: Strategies) -> Ranking:
    """Clear pairs by whether the planner had them in the same order."""
    right: list[tuple[Way, Way]] = []
    equal: list[tuple[Way, Way]] = []
    wrong: list[tuple[Way, Way]] = []
    pairs = list(combinations([way for way in found.ranked if way.predicted is not None], 2))
    for faster, slower in pairs:
        if not clearly(faster, slower):
            continue
        assert faster.predicted is not None and slower.predicted is not None
        ratio = slower.predicted / faster.predicted
        (right if ratio > 1 else equal if ratio == 1 else wrong).append((faster, slower))
    return Ranking(len(pairs), tuple(right), tuple(equal), tuple(wrong))


def clearly(faster: Way, slower: Way) -> bool:
    """Whether their intervals (or ranges) lie apart; a single repeat tells nothing."""
    one, other = faster.measured, slower.measured
    assert one is not None and other is not None, "ranked are those with a figure"
    return min(one.count, other.count) > 1 and one.bounds[1] < other.bounds[0]


def strategies_table(study: StudyResult, found: Strategies) -> Table:
    """One row for each way: measured beside predicted, and the place of each."""
    columns = (
        "way",
        "step, ms, measured",
        "predicted",
        "place measured",
        "place predicted",
        "exposed communication",
        "predicted",
        "sent by a node, MB a step",
        "predicted",
        "peak memory, MiB, fullest rank",
        "predicted",
        "state",
    )
    return first_rows(Table(columns, tuple(_row(study, found, way) for way in found.ways)).without_empty_columns())


def _row(study: StudyResult, found: Strategies, way: Way) -> tuple[str, ...]:
    said, peaks = way.prediction or Prediction(), way.result.peak_by_rank()
    exposed, share = said.exposed_communication_seconds, exposed_shares(way.result)
    sent = network_bytes_of(study, way.result)
    return (
        escaped(way.name),
        estimate_cell(way.measured, 1000),
        number(None if way.predicted is None else way.predicted * 1000),
        _place(way, found.ranked),
        _place(way, found.expected),
        percent(None if share is None else share.median),
        UNKNOWN if exposed is None or way.predicted is None else percent(exposed / way.predicted),
        number(None if sent is None else sent / 1e6),
        number(None if said.network_bytes_per_step is None else said.network_bytes_per_step / 1e6),
        mebibytes(max(peaks) if peaks else None),
        mebibytes(said.peak_memory_bytes),
        way.result.status.replace("_", " "),
    )


def _place(way: Way, order: Sequence[Way]) -> str:
    return str(order.index(way) + 1) if way in order else UNKNOWN


def strategies_sentence(found: Strategies) -> str:
    """The fastest, and whether the planner's ranking is right."""
    ranked = found.ranked
    if not ranked or ranked[0].measured is None:
        return "Nothing has a figure."
    text = f"Fastest is {ranked[0].name}: {estimate_text(ranked[0].measured, 'ms a step', 1000)}"
    text += not_apart([way.name for way in ranked[1:] if not clearly(ranked[0], way)]) + "."
    result = ranking(found)
    if not result.pairs:
        return f"{text} The plan predicts too few of them for a ranking."
    if not result.clear:
        return f"{text} No pair of ways differs clearly, so the planner's ranking cannot be judged."
    verb, them = ("differs", "it") if result.clear == 1 else ("differ", "them")
    text += f" Of {plural(result.pairs, 'pair')} {result.clear} {verb} clearly, and the planner's ranking of {them} is "
    if result.wrong:
        told = joined(f"{faster.name} is faster than {slower.name}" for faster, slower in result.wrong)
        text += f"wrong in {len(result.wrong)}: {told}."
    else:
        text += "right."
    if result.equal:
        text += f" It takes {plural(len(result.equal), 'pair')} of them for equally fast."
    return text
