"""Savings that follow from measured throughputs, paired by block: a larger batch, and a smaller model."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from configs.common.printable import plural_noun
from reports.correctness.section import JudgedCell
from reports.decisions.cost import CellCost, one_unit
from reports.decisions.nodes import batch_of, without_batch, work_key
from reports.decisions.savings.saving import EVERY, SERVING, UNKNOWN_EFFECT, Saving
from reports.numbers.statistics import Ratio, paired_ratio
from reports.reading.load import CellResult
from reports.text import code, escaped, number, percent


def batch_size_savings(costs: Sequence[CellCost], right: str) -> Iterator[Saving]:
    """The batch of highest throughput against the smallest: on one machine less time a token is less money a token."""
    series: dict[tuple[str, str | None], list[CellCost]] = {}
    for cost in costs:
        if cost.result.completed and cost.result.kind.needs_model:
            series.setdefault((without_batch(cost.result.cell), cost.result.device), []).append(cost)
    gains: dict[str, tuple[Ratio | None, CellCost, CellCost]] = {}
    for members in series.values():
        gain, model = _batch_gain(members), members[0].result.model
        if gain is not None and (model not in gains or _times(gain[0]) > _times(gains[model][0])):
            gains[model] = gain
    for model, (ratio, small, best) in gains.items():
        yield Saving(f"batch size ({escaped(model)})", EVERY, *_batch_effect(ratio, small, best))
    if not gains:
        missing = f"no two batch sizes of one layout were measured{right}; sweep over `batch_size`"
        yield Saving("batch size", EVERY, UNKNOWN_EFFECT, missing)


def _times(ratio: Ratio | None) -> float:
    return 0.0 if ratio is None else ratio.value


def _batch_effect(ratio: Ratio | None, small: CellCost, best: CellCost) -> tuple[str, str]:
    """Effect and basis."""
    cell, least = best.result.cell, batch_of(small.result.cell)
    place = f"{cell.place}, {cell.dtype}, {escaped(cell.target)}"
    if batch_of(cell) == least:
        return "nothing", f"no batch above {least:,}, the smallest measured, is known to be faster ({place})"
    basis = f"batch {batch_of(cell):,} against {least:,} ({place})"
    if ratio is None:
        return UNKNOWN_EFFECT, f"{basis} share no block"
    basis += ", same price an hour"
    if small.usd_per_million and best.usd_per_million:
        low, high = (cost.usd_per_million.median for cost in (best, small) if cost.usd_per_million)
        basis += f": ${number(low)} instead of ${number(high)} per million {plural_noun(best.result.work_unit)}"
    return _less(ratio, best.result), basis + _slower(small.result, best.result)


def _slower(small: CellResult, best: CellResult) -> str:
    """What the larger batch asks of a user."""
    before, after = (result.estimate("time_per_output_token_seconds") for result in (small, best))
    if before is None or after is None:
        return ""
    return f"; TPOT is {number(after.median * 1000)} ms instead of {number(before.median * 1000)} ms"


def _batch_gain(members: Sequence[CellCost]) -> tuple[Ratio | None, CellCost, CellCost] | None:
    """(throughput of the best batch over the smallest's, the smallest, the best); None where there are not two.

    The ratio is None where the two share no block.
    """
    known = [(value.median, cost) for cost in members if (value := cost.result.estimate("throughput")) is not None]
    if len({batch_of(cost.result.cell) for _, cost in known}) < 2:
        return None
    best = max(known, key=lambda pair: pair[0])[1]
    small = min((best, *(cost for _, cost in known)), key=lambda cost: batch_of(cost.result.cell))
    return _ratio(best.result, small.result, len(known) - 1), small, best


def smaller_model_savings(
    results: Sequence[CellResult], judged: Sequence[tuple[str, JudgedCell]], right: str
) -> Iterator[Saving]:
    """Each model against the next larger one on the same work and target, with what is known of its answers."""
    name = "a smaller or distilled model"
    best: dict[tuple[str, str | None, str], dict[str, CellResult]] = {}
    for result in results:
        value = _of_a_node(result)
        if value is not None and result.cell.model is not None:
            group = best.setdefault((result.cell.target, result.device, work_key(result.cell)), {})
            kept = group.get(result.model)
            if kept is None or value > (_of_a_node(kept) or 0.0):
                group[result.model] = result
    count = 0
    for group in best.values():
        sized = [(size, result) for result in group.values() if (size := _parameters(result)) is not None]
        for (small_size, small), (large_size, large) in pairwise(sorted(sized, key=lambda pair: pair[0])):
            ratio = _ratio(small, large, 1)
            if ratio is not None and small_size < large_size:
                count += 1
                sizes = [
                    f"{escaped(item.model)} ({number(_parameters(item), 3)} parameters)" for item in (small, large)
                ]
                basis = f"{' against '.join(sizes)}, best cell of each on {code(small.cell.target)}; "
                yield Saving(name, SERVING, _less(ratio, small), basis + _quality(small, large, judged))
    if not count:
        missing = f"no two models did the same work{right} in this study; measure the smaller one beside the larger"
        yield Saving(name, SERVING, UNKNOWN_EFFECT, missing)


def _parameters(result: CellResult) -> float | None:
    return next(
        (size for measurement in result.completed.values() if (size := measurement.figure("model_parameters"))), None
    )


def _quality(small: CellResult, large: CellResult, judged: Sequence[tuple[str, JudgedCell]]) -> str:
    """What is known of how the answers of two models compare."""
    random = [result.model for result in (small, large) if (result.cell.model or "").startswith("synthetic:")]
    if random:
        return "what it does to the answers is unknown: random weights have no right answers"
    perplexities = {model: item.verdict.perplexity_candidate for model, item in judged}
    ours, theirs = perplexities.get(small.model), perplexities.get(large.model)
    if ours is None or theirs is None:
        return "what it does to the answers is unknown: a correctness experiment of both gives their perplexities"
    return f"perplexity {number(ours)} against {number(theirs)} on the prompts (comparable with one tokenizer only)"


def _of_a_node(result: CellResult) -> float | None:
    """Median throughput of each of the cell's nodes."""
    value = result.estimate("throughput")
    return None if value is None else value.median / result.cell.nodes


def _ratio(first: CellResult, second: CellResult, comparisons: int) -> Ratio | None:
    """Throughput of a node over throughput of a node, block by block: what a node costs is one price."""

    def rates(result: CellResult) -> dict[int, float]:
        return {repeat: value / result.cell.nodes for repeat, value in result.values("throughput").items()}

    return paired_ratio(rates(first), rates(second), comparisons=comparisons, confidence=first.confidence)


def _less(ratio: Ratio, of: CellResult) -> str:
    """A ratio of throughputs as the share of machine time, so of money, that is saved; whether that may be noise."""
    if ratio.value <= 1:
        return "nothing"
    share, sure = percent(1 - 1 / ratio.value), ratio.differs
    text = f"{f'**{share}**' if sure else share} less {one_unit(of)}"
    note = "" if sure else ", which may be noise"
    if ratio.count == 1:
        return f"{text} (1 pair){note}"
    low, high = (percent(1 - 1 / bound) for bound in ratio.bounds)
    brackets = "[{} to {}]" if ratio.interval is None else "({} to {})"
    return f"{text} {brackets.format(low, high)}{note}"
