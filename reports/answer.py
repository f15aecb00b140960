"""The summary of the report: recommendation, correctness of the answers, and missing figures.

    sentences = answer(study, verdicts)

Each sentence has a lead that can stand alone and a body with the numbers behind it. They are plain text:
the report makes the lead bold, a terminal prints both.
"""

from dataclasses import dataclass

from configs.common.printable import shortened
from reports.correctness.section import JudgedCell
from reports.decisions.cost import cell_cost, price_of
from reports.experiments.compression import compression, compression_sentence
from reports.experiments.engines import WORST_FIRST, engines, engines_sentence
from reports.experiments.kernels import different_kernels
from reports.experiments.targets import side_by_side, targets_lines, targets_sentence
from reports.numbers.statistics import Estimate, paired_ratio
from reports.reading.load import CellResult, StudyResult, unaltered
from reports.text import estimate_text, joined, mebibytes, number, plural

_MOST_FILES = 3
"""Named in a sentence; the table of failures has all."""


@dataclass(frozen=True)
class Sentence:
    """One statement of the answer, as plain text."""

    lead: str
    body: str

    @property
    def text(self) -> str:
        return f"{self.lead} {self.body}"


def answer(study: StudyResult, judged: list[tuple[str, JudgedCell]]) -> list[Sentence]:
    """The opening sentences. `judged`: (model, verdict) of every correctness experiment."""
    sentences = [*_damaged(study), *_devices(study)]
    if lines := different_kernels(study):
        sentences.append(Sentence("Points of one curve ran on different kernels:", f"{'; '.join(lines)}."))
    sentences += [best for group in _groups(study) if (best := _best(study, group)) is not None]
    sentences += _experiments(study, judged)
    if judged:
        sentences.append(_correctness(judged))
    sentences.append(_lost(study))
    return sentences


def _damaged(study: StudyResult) -> list[Sentence]:
    """What the other sentences are missing: records that cannot be read, and those that a run has set aside."""
    found = []
    if study.unreadable:
        shown = [f"{item.path} ({item.reason})" for item in study.unreadable[:_MOST_FILES]]
        if len(study.unreadable) > len(shown):
            shown.append(f"{len(study.unreadable) - len(shown):,} more")
        told = (
            f"{joined(shown)}. {'It is' if len(study.unreadable) == 1 else 'They are'} left out, so figures and "
            "recommendations may be others than with all files. `rankwise run` sets damaged records aside and measures "
            "them again."
        )
        found.append(Sentence(f"{plural(len(study.unreadable), 'file')} of the run cannot be read:", told))
    if study.set_aside:
        shown = [*study.set_aside[:_MOST_FILES]]
        if len(study.set_aside) > len(shown):
            shown.append(f"{len(study.set_aside) - len(shown):,} more")
        count = len(study.set_aside)
        lead = f"{plural(count, 'record')} {'was' if count == 1 else 'were'} unreadable and set aside:"
        found.append(
            Sentence(lead, f"{joined(shown)}. `rankwise run` measures {'it' if count == 1 else 'them'} again.")
        )
    return found


def _devices(study: StudyResult) -> list[Sentence]:
    """That figures of several devices are apart, and why."""
    if len(study.devices) < 2:
        return []
    told = (
        f"{joined(study.devices)}. No curve, ratio, fit or recommendation spans them: the difference between devices "
        "would pass for one between layouts, batches or numbers of ranks."
    )
    if study.other_devices:
        told += (
            f" Left out, because the other repeats of the cell ran on another device: {joined(study.other_devices)}."
        )
    return [Sentence(f"Figures of {len(study.devices)} devices are kept apart:", told)]


def _experiments(study: StudyResult, judged: list[tuple[str, JudgedCell]]) -> list[Sentence]:
    """Which engine, which compression, and which point on which target, of the experiments that ask so."""
    found = []
    for experiment in study.plan.experiments:
        model = experiment.model or "the model"
        if experiment.kind == "compression" and experiment.points:
            told = compression_sentence(compression(study, experiment))
            found.append(Sentence(f"Compression of {model}:", told))
        elif experiment.kind in ("sweep", "optimization") and experiment.points:
            sides = engines(study, experiment, judged)
            found += [] if sides is None else [Sentence(f"Engine for {model}:", engines_sentence(sides))]
    for several in side_by_side(study):
        told = " ".join([targets_sentence(several), *targets_lines(several)])
        found.append(Sentence(f"Targets of {several.title}:", told))
    return found


def _groups(study: StudyResult) -> list[list[CellResult]]:
    """Cells whose speed may be compared: by model and kind of workload, in the order of the plan."""
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for result in study.cells.values():
        if result.compared:
            groups.setdefault((result.model, result.cell.workload.kind), []).append(result)
    return [unaltered(group) for group in groups.values()]


def _best(study: StudyResult, group: list[CellResult]) -> Sentence | None:
    """The best cells of a group for throughput, latency and memory; None where nothing was measured."""
    values = [(value, result) for result in group if (value := result.estimate("throughput")) is not None]
    if not values:
        return None
    values.sort(key=lambda pair: -pair[0].median)
    value, best = values[0]
    cost = cell_cost(best, price_of(study, best)).usd_per_million
    paid = f" at ${number(cost.median)} per million {best.work_unit}s" if cost else ""
    parts = [f"It gives {estimate_text(value, best.unit)}{paid}{_advantage(best, values)}."]
    least = _min(group, best.latency.figure) if best.latency else None
    if best.latency is not None and least is not None:
        where = "the same cell" if least[1] is best else least[1].name
        parts.append(f"Lowest latency: {where}, {estimate_text(least[0], best.latency.unit, 1000)}.")
    peaks = [(peak, result) for result in group if (peak := result.peak_bytes) is not None]
    if peaks:
        peak, smallest = min(peaks, key=lambda pair: pair[0])
        where = "the same cell" if smallest is best else smallest.name
        parts.append(f"Least memory: {where}, {mebibytes(peak)} MiB at the peak over all its ranks.")
    what = best.name if best.cell.model is None else f"{best.model} as {best.name}"
    return Sentence(f"{best.kind.verb} {what}.", " ".join(parts))


def _advantage(best: CellResult, values: list[tuple[Estimate, CellResult]]) -> str:
    """How much better than one rank on the same work, and than the next best cell.

    The best was chosen among all, so its ratios are corrected for as many comparisons.
    """
    if len(values) == 1:
        return ": the only cell with a figure"
    others = [result for _, result in values[1:]]
    single = next((result for result in others if _is_single_rank_of(result, best)), None)
    texts = []
    if single is not None:
        texts.append(f"{_times(best, single, len(others))} one rank")
    if others[0] is not single:
        texts.append(f"{_times(best, others[0], len(others))} the next best ({others[0].name})")
    if _may_be_noise(best, others[0], len(others)):
        texts[-1] += ", which may be noise"
    return f": {joined(texts)}"


def _times(best: CellResult, other: CellResult, comparisons: int) -> str:
    """`1.90 times (1.85 to 1.96)`; medians alone where fewer than two blocks have both."""
    ratio = paired_ratio(best.values("throughput"), other.values("throughput"), comparisons, best.confidence)
    if ratio is not None and ratio.count > 1:
        low, high = ratio.bounds
        return f"{number(ratio.value)} times ({number(low)} to {number(high)})"
    ours, theirs = best.estimate("throughput"), other.estimate("throughput")
    assert ours is not None and theirs is not None
    return f"{number(ours.median / theirs.median)} times"


def _may_be_noise(best: CellResult, other: CellResult, comparisons: int) -> bool:
    ratio = paired_ratio(best.values("throughput"), other.values("throughput"), comparisons, best.confidence)
    return ratio is not None and ratio.count > 1 and ratio.bounds[0] <= 1


def _is_single_rank_of(result: CellResult, best: CellResult) -> bool:
    """Whether a cell is `best` on one rank, with the same total work or the same work a rank."""
    ranks = best.cell.layout.ranks
    if ranks == 1 or result.cell.layout.ranks != 1:
        return False
    same = best.cell.model_copy(update={"layout": result.cell.layout, "workload": result.cell.workload})
    if same != result.cell:
        return False
    return best.cell.workload in (result.cell.workload, result.cell.workload.scaled(ranks))


def _min(group: list[CellResult], figure: str) -> tuple[Estimate, CellResult] | None:
    values = [(value, result) for result in group if (value := result.estimate(figure)) is not None]
    return min(values, key=lambda pair: pair[0].median) if values else None


def _correctness(judged: list[tuple[str, JudgedCell]]) -> Sentence:
    """One sentence over all verdicts, the worst first."""
    by_word = {word: [pair for pair in judged if pair[1].verdict.word == word] for word in WORST_FIRST}
    bodies = []
    for model, item in by_word["defect"]:
        bodies.append(f"{model}, {item.label}, is off by more than noise: {item.verdict.reason}.")
    for model, item in by_word["not judged"]:
        bodies.append(f"{model}, {item.label}, could not be judged: {item.verdict.reason}.")
    right = by_word["agrees"]
    if right:
        bodies.append(f"{_cells(right)} from the reference by the noise of reduction order alone{_tokens(right)}.")
    if by_word["defect"]:
        lead = "Some answers are wrong." if right else "The answers are wrong."
    elif not right:
        lead = "Whether the answers are right is not known."
    else:
        lead = "The answers that could be judged are right." if by_word["not judged"] else "The answers are right."
    missed = dict.fromkeys(part for _, item in right if item.reach is not None for part in item.reach.missed)
    if missed:
        bodies.append(f"Not reached by the comparison: {'; '.join(missed)}.")
    return Sentence(lead, " ".join(bodies))


def _cells(pairs: list[tuple[str, JudgedCell]]) -> str:
    if len(pairs) == 1:
        return f"{pairs[0][0]}, {pairs[0][1].label}, differs"
    return f"{plural(len(pairs), 'cell')} ({'; '.join(f'{model}, {item.label}' for model, item in pairs)}) differ"


def _tokens(pairs: list[tuple[str, JudgedCell]]) -> str:
    """Prompts with every token equal, and the largest difference of a logit; of embeddings how far they turn."""
    ladders = [item.verdict.ladder for _, item in pairs if item.verdict.ladder is not None]
    encoded = [item.verdict.encoded for _, item in pairs if item.verdict.encoded is not None]
    if encoded and not ladders:
        worst = number(max(each.cosine_worst for each in encoded), 2)
        count = plural(sum(each.prompts for each in encoded), "embedding")
        largest = number(max(each.state_difference for each in encoded), 2)
        return f" (cosine distance of the worst of {count} {worst}; largest state difference {largest})"
    if not ladders:
        return ""
    equal, prompts = sum(each.prompts_equal or 0 for each in ladders), sum(each.prompts or 0 for each in ladders)
    largest = number(max(each.logit_difference for each in ladders), 2)
    return f" (every token equal on {equal} of {plural(prompts, 'prompt')}; largest logit difference {largest})"


def _lost(study: StudyResult) -> Sentence:
    """How many cells have no figure, and why; else how many repeats were lost on the way."""
    lost = [result for result in study.cells.values() if not result.completed]
    total = len(study.cells)
    refused = sum(len(experiment.refused) for experiment in study.plan.experiments)
    verb = "is" if refused == 1 else "are"
    told = f"; {plural(refused, 'point')} of the grids {verb} unsupported, listed under failures"
    unsupported = told if refused else ""
    unusable = [f"model {model.name}" for model in study.plan.unusable]
    if unusable:
        unsupported += f"; {joined(unusable)} could not be measured at all, listed under failures"
    if not lost:
        failed = sum(len(result.measurements) - len(result.completed) for result in study.cells.values())
        missing = sum(result.planned - len(result.measurements) for result in study.cells.values())
        if not failed and not missing:
            done = f"Each of {plural(total, 'cell')} was measured as often as planned"
            return Sentence("Models are missing:" if unusable else "Nothing is missing.", f"{done}{unsupported}.")
        parts = [f"{plural(failed, 'repeat')} failed"] if failed else []
        parts += [f"{plural(missing, 'repeat')} had no record yet"] if missing else []
        return Sentence("Every cell has a figure,", f"but {joined(parts)}{unsupported}.")
    reasons = [f"{result.title}: {_why(result)}" for result in lost[:3]]
    more = f"; and {len(lost) - 3:,} more, listed under failures" if len(lost) > 3 else ""
    verb = "has" if len(lost) == 1 else "have"
    return Sentence(
        f"{len(lost):,} of {plural(total, 'cell')} {verb} no figure:", f"{'; '.join(reasons)}{more}{unsupported}."
    )


def _why(result: CellResult) -> str:
    if not result.measurements:
        return "not measured yet"
    record = result.measurements[max(result.measurements)].record
    state = record.status.value.replace("_", " ")
    return f"{state} ({shortened(record.failure.message, 120).rstrip('.')})" if record.failure else state
