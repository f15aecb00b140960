"""Comparison of the engines of a sweep or an optimization, and of their answers.

    result = engines(study, experiment, judged)       # None where it has one engine only
    engines_sentence(result), engines_table(result), engines_lines(result)

Engines are compared where all else is the same: at each combination of the other swept values. Ratios are over pairs
of the same block. The verdict on an engine's answers comes from the study's correctness experiments; an engine whose
answers are a defect is not recommended, however fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.plans.plan import PlannedExperiment
from configs.spec.cell import Cell
from configs.workloads.descriptor import ShownTime
from reports.correctness.section import JudgedCell
from reports.experiments.compression import why_lost
from reports.numbers.statistics import Ratio, paired_ratio
from reports.reading.load import CellResult, StudyResult, shown_times
from reports.tables import max_over_ranks
from reports.text import UNKNOWN, Table, escaped, estimate_cell, joined, mebibytes, number, plural, ratio_cell

ENGINE_FIELDS = ("engine", "engine_mode")
WORST_FIRST = ("defect", "not judged", "agrees")
REFERENCE = "reference"
"""Word for what the answers of the others are judged by."""


@dataclass(frozen=True)
class EngineRow:
    """One engine in one place. ratio: throughput of the fastest over its own; above 1 is how much faster that is.

    result: None where this version has no such cell; `reason` says why there is no figure.
    """

    engine: str
    result: CellResult | None
    reason: str | None
    word: str
    why: str = ""
    ratio: Ratio | None = None

    @property
    def rate(self) -> float | None:
        value = self.result.estimate("throughput") if self.result else None
        return value.median if value else None


@dataclass(frozen=True)
class EngineComparison:
    """One combination of the other values: engines by rate, the fastest first, those without a figure last."""

    label: str
    rows: tuple[EngineRow, ...]

    @property
    def usable(self) -> list[EngineRow]:
        """With a figure, and with answers that are no defect."""
        return [row for row in self.rows if row.rate is not None and row.word != "defect"]


@dataclass(frozen=True)
class Engines:
    """The engines of one experiment of one model."""

    unit: str
    places: tuple[EngineComparison, ...]


def engine_of(cell: Cell) -> str:
    """`transformers`, or `transformers compiled` where it decodes in another mode than the usual."""
    return cell.engine if cell.engine_mode == "eager" else f"{cell.engine} {cell.engine_mode}"


def engines(
    study: StudyResult, experiment: PlannedExperiment, judged: Sequence[tuple[str, JudgedCell]] = ()
) -> Engines | None:
    """None where the points have one engine only. `judged`: (model, verdict) of every correctness experiment."""
    found: dict[str, list[EngineRow]] = {}
    for point in experiment.points:
        result = study.cells[point.cell]
        word, why = _verdict(result, judged)
        reason = None if result.completed else why_lost(result)
        row = EngineRow(engine_of(result.cell), result, reason, word, why)
        found.setdefault(_place(point.values), []).append(row)
    for item in experiment.refused:
        name = " ".join(str(item.values[field]) for field in ENGINE_FIELDS if field in item.values) or item.label
        found.setdefault(_place(item.values), []).append(EngineRow(name, None, item.reason, "not judged"))
    if len({row.engine for rows in found.values() for row in rows if row.result is not None}) < 2:
        return None
    unit = study.cells[experiment.points[0].cell].unit
    return Engines(unit, tuple(EngineComparison(label, _ranked(rows)) for label, rows in found.items()))


def _place(values: dict[str, object]) -> str:
    """The other swept values; a variant of an optimization is no place of its own."""
    rest = {name: value for name, value in values.items() if name not in (*ENGINE_FIELDS, "variant")}
    return ", ".join(f"{name.removeprefix('workload.')} {value}" for name, value in rest.items())


def _ranked(rows: Sequence[EngineRow]) -> tuple[EngineRow, ...]:
    """The fastest first; the others with the ratio of the fastest to them."""
    ordered = sorted(rows, key=lambda row: -(row.rate or 0.0))
    best = ordered[0]
    if best.result is None or best.rate is None:
        return tuple(ordered)
    count = max(1, sum(row.rate is not None for row in ordered) - 1)
    return (best, *(replace(row, ratio=_ratio(best, row, count)) for row in ordered[1:]))


def _ratio(best: EngineRow, other: EngineRow, comparisons: int) -> Ratio | None:
    if best.result is None or other.result is None:
        return None
    values = (best.result.values("throughput"), other.result.values("throughput"))
    return paired_ratio(*values, comparisons=comparisons, confidence=best.result.confidence)


def _verdict(result: CellResult, judged: Sequence[tuple[str, JudgedCell]]) -> tuple[str, str]:
    """The worst word on this engine's answers of this model, in its own layout and precision where that was judged."""
    cell = result.cell
    own = [
        item
        for model, item in judged
        if model == result.model
        and engine_of(item.result.cell) == engine_of(cell)
        and item.result.cell.workload.kind == cell.workload.kind
        and item.result.cell.compression == cell.compression
    ]
    for same in (("layout", "dtype"), ("layout",), ()):
        chosen = [item for item in own if all(getattr(item.result.cell, f) == getattr(cell, f) for f in same)]
        if chosen:
            worst = min(chosen, key=lambda item: WORST_FIRST.index(item.verdict.word))
            told = "" if "layout" in same else f"judged as {worst.label}"
            return worst.verdict.word, "; ".join(filter(None, (worst.verdict.reason, told)))
    if judged and cell.engine == "transformers" and cell.layout.ranks == 1 and cell.dtype == "float32":
        return (REFERENCE, "") if cell.engine_mode == "eager" else ("not judged", "")
    return "not judged", ""


def engines_table(result: Engines) -> Table:
    """One row for each engine in each place, the fastest first; of its times the first to pass comes first."""
    results = [row.result for place in result.places for row in place.rows if row.result is not None]
    times = shown_times(results)[::-1]
    columns = (
        "at",
        "engine",
        "answers",
        "repeats",
        f"{result.unit}, median (interval)",
        "the fastest is so many times as fast (interval)",
        *(shown.unit for shown in times),
        "peak memory, MiB, all ranks",
        "loading, s",
        "state",
    )
    rows = tuple(_row(place, row, times) for place in result.places for row in place.rows)
    return Table(columns, rows, text_columns=3).without_empty_columns()


def _row(place: EngineComparison, row: EngineRow, times: Sequence[ShownTime]) -> tuple[str, ...]:
    where, word = escaped(place.label) or UNKNOWN, f"**{row.word}**" if row.word == "defect" else row.word
    answers = f"{word}: {escaped(row.why)}" if row.why else word
    result = row.result
    if result is None:
        return (
            where,
            escaped(row.engine),
            UNKNOWN,
            *(UNKNOWN,) * (5 + len(times)),
            f"unsupported: {escaped(row.reason or '')}",
        )
    fastest = row is place.rows[0] and row.rate is not None
    return (
        where,
        escaped(row.engine),
        answers,
        f"{len(result.completed)} of {result.planned}",
        estimate_cell(result.estimate("throughput")),
        "fastest" if fastest else ratio_cell(row.ratio),
        *(estimate_cell(result.time(shown), 1000) for shown in times),
        mebibytes(result.peak_bytes),
        number(max_over_ranks(list(result.completed.values()), "load_seconds")),
        result.status.replace("_", " ") if row.reason is None else escaped(row.reason),
    )


def choice(place: EngineComparison) -> tuple[str, ...]:
    """The engine to use there; two or more where the fastest cannot be told from the next; none without a figure."""
    usable = place.usable
    if not usable:
        return ()
    best, count = usable[0], max(1, len(usable) - 1)
    ratios = [(row, _ratio(best, row, count)) for row in usable[1:]]
    near = [row.engine for row, ratio in ratios if ratio is not None and ratio.bounds[0] <= 1]
    return tuple(dict.fromkeys((best.engine, *near)))


def engines_sentence(result: Engines) -> str:
    """Which engine to use, why, and whether its answers are right."""
    chosen = {place.label: choice(place) for place in result.places}
    known = {label: names for label, names in chosen.items() if names}
    if not known:
        return "No engine has a figure with answers that are no defect, so none is recommended."
    first = next(iter(known.values()))
    if all(names == first for names in known.values()):
        everywhere = f" at {plural(len(known), 'combination')} of the other values" if len(known) > 1 else ""
        if len(first) == 1:
            return f"Use {first[0]}: it is the fastest{everywhere}{_margin(result, first[0])}. {_trust(result, first)}"
        return f"Undecided between {joined(first)}: not told apart{everywhere}. {_trust(result, first)}"
    names = list(dict.fromkeys(name for each in known.values() for name in each))
    wins = {name: sum(each == (name,) for each in known.values()) for name in names}
    shared = sum(len(each) > 1 for each in known.values())
    text = f"It depends on the other values: of {plural(len(known), 'combination')} "
    parts = [f"{name} at {count}" for name, count in wins.items() if count]
    told = [f"{joined(parts)} is the fastest"] if parts else []
    told += [f"{shared} {'is' if shared == 1 else 'are'} undecided"] if shared else []
    return f"{text}{', and '.join(told)}. {_trust(result, names)}"


def _margin(result: Engines, engine: str) -> str:
    """`, 1.8 to 3.2 times the next`."""
    ratios: list[Ratio] = []
    alone = True
    for place in result.places:
        usable = place.usable
        if len(usable) > 1 and usable[0].engine == engine:
            alone = False
            ratio = _ratio(usable[0], usable[1], max(1, len(usable) - 1))
            ratios += [ratio] if ratio is not None else []
    if not ratios:
        return ", and the only one with a figure" if alone else " by its median (no block has both it and the next)"
    low, high = (number(pick(ratio.value for ratio in ratios)) for pick in (min, max))
    few = ", from too few pairs for an interval" if any(ratio.interval is None for ratio in ratios) else ""
    return f", {low if low == high else f'{low} to {high}'} times the next{few}"


def _trust(result: Engines, names: Sequence[str]) -> str:
    """What the study knows of their answers, where they are usable; of several engines each by its name."""
    groups: dict[str, list[str]] = {}
    for name in names:
        rows = [row for place in result.places for row in place.usable if row.engine == name]
        words = {row.word for row in rows}
        known = "agrees" if "agrees" in words else REFERENCE
        groups.setdefault(known if words <= {"agrees", REFERENCE} else "not judged", []).append(name)
    told = []
    for word, found in groups.items():
        its = "Its answers" if len(names) == 1 else f"The answers of {joined(found)}"
        told.append(
            {
                "agrees": f"{its} agree with the reference.",
                REFERENCE: f"{'It' if len(names) == 1 else joined(found)} is the reference itself.",
                "not judged": f"{its} were not judged in every combination; a correctness experiment over `engines` "
                "does so.",
            }[word]
        )
    return " ".join(told)


def engines_lines(result: Engines) -> list[str]:
    """For each place which engine; then the engines whose answers are wrong."""
    lines = []
    for place in result.places:
        names = choice(place)
        if len(result.places) > 1 and names:
            rate = next(row for row in place.rows if row.engine == names[0]).result
            assert rate is not None
            told = f"use {names[0]}" if len(names) == 1 else f"undecided between {joined(names)}"
            lines.append(f"{place.label}: {told} ({estimate_cell(rate.estimate('throughput'))} {result.unit}).")
    return [*lines, *_wrong_lines(result)]


def _wrong_lines(result: Engines) -> list[str]:
    """The engines with wrong answers, and where, if they have others elsewhere."""
    wrong: dict[str, list[str]] = {}
    whys: dict[str, str] = {}
    for place in result.places:
        for row in place.rows:
            if row.word == "defect" and row.result is not None:
                wrong.setdefault(row.engine, []).append(place.label or row.result.name)
                whys.setdefault(row.engine, row.why)
    lines = []
    for name, places in wrong.items():
        elsewhere = any(row.engine == name for place in result.places for row in place.usable)
        where = f" at {joined(dict.fromkeys(places))}" if elsewhere else ""
        lines.append(f"{name} is not recommended{where}, its answers are a defect: {whys[name]}.")
    return lines
