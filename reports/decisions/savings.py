"""Estimates of common savings, quantified where prices or measurements are available.

    found = savings(study, costs, targets)
    savings_table(found); unknown_savings(found)

Only what follows from the study's prices, records and inputs is given a number. Everything else is unknown
and says what to supply: rules of thumb from elsewhere are not this user's numbers.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from configs.common.printable import plural_noun
from configs.hardware.prices import Market, Price, TargetPrices
from configs.inputs.prompts import read_prompts
from configs.plans.paths import RunPaths
from configs.spec.objectives import Purpose
from configs.targets.rented import RentedTarget
from configs.targets.resources import Resources
from reports.correctness.section import JudgedCell
from reports.decisions.cost import CellCost, market_name, one_unit
from reports.decisions.nodes import batch_of, without_batch, work_key
from reports.decisions.spending import TargetCost
from reports.numbers.statistics import Ratio, estimate, paired_ratio
from reports.reading.load import CellResult, StudyResult
from reports.tables import cpu_use
from reports.text import Table, code, escaped, joined, mebibytes, number, percent, plural

BATCH: tuple[Purpose, ...] = ("batch", "hybrid")
SERVING: tuple[Purpose, ...] = ("serving", "hybrid")
EVERY: tuple[Purpose, ...] = ("batch", "serving", "hybrid")
HYBRID: tuple[Purpose, ...] = ("hybrid",)

UNKNOWN_EFFECT = "unknown"


@dataclass(frozen=True)
class Saving:
    """One saving: for which purposes, what it would bring (Markdown), and what that rests on or lacks."""

    name: str
    purposes: tuple[Purpose, ...]
    effect: str
    basis: str


def savings(
    study: StudyResult,
    costs: Sequence[CellCost],
    targets: Sequence[TargetCost],
    judged: Sequence[tuple[str, JudgedCell]] = (),
    wrong: Collection[str] = (),
) -> list[Saving]:
    """Every saving for the study's purpose, or for all three where it names none.

    wrong: keys of cells with wrong answers, which save nothing.
    """
    costs, right = [cost for cost in costs if cost.result.key not in wrong], " with right answers" if wrong else ""
    results = [cost.result for cost in costs if cost.result.completed]
    found = [
        *_market(study, "spot or preemptible machines", BATCH, ("spot",)),
        *_region(study),
        *_market(study, "reserved machines", EVERY, ("reserved_1_year", "reserved_3_years")),
        _auto_scaling(targets),
        *_batch_size(costs, right),
        *_smaller_model(results, judged, right),
        *_caching(study),
        *_several_models(results),
        *_preprocessing(results),
        *_across_targets(costs, right),
    ]
    purpose = study.plan.purpose
    return [saving for saving in found if purpose is None or purpose in saving.purposes]


def savings_table(found: Sequence[Saving]) -> Table | None:
    """One row for each saving that has a figure; None where none has."""
    known = [saving for saving in found if saving.effect != UNKNOWN_EFFECT]
    if not known:
        return None
    rows = tuple((saving.name, ", ".join(saving.purposes), saving.effect, saving.basis) for saving in known)
    return Table(("saving", "for", "what it would bring", "from what"), rows, text_columns=4)


def unknown_savings(found: Sequence[Saving]) -> str | None:
    """One sentence (Markdown) of the savings without a figure, and what each lacks; None where all have one."""
    missing: dict[str, list[str]] = {}
    for saving in found:
        names = missing.setdefault(saving.basis, [])
        if saving.effect == UNKNOWN_EFFECT and saving.name not in names:
            names.append(saving.name)
    told = [f"{joined(names)} ({basis})" for basis, names in missing.items() if names]
    return f"Without a figure: {'; '.join(told)}." if told else None


def _market(
    study: StudyResult, name: str, purposes: tuple[Purpose, ...], markets: tuple[Market, ...]
) -> Iterator[Saving]:
    """Another market for the same machine: in its own region if that is known, else the cheapest."""
    missing: list[str] = []
    for target, prices, price in _priced_targets(study):
        title, home = f"{name} ({code(target.name)})", price.region or target.region
        if price.market in markets:
            yield Saving(title, purposes, "taken already", f"its cells are priced as {market_name(price)}")
            continue
        if isinstance(target, RentedTarget) and target.market in markets:
            basis = f"its nodes are asked for as {target.market}; its cells are priced as {market_name(price)}"
            yield Saving(title, purposes, "taken already", basis)
            continue
        found = False
        for market in markets:
            known = [other for other in prices.others if other.market == market]
            here = [other for other in known if other.region in (None, home)]
            if known:
                found = True
                other = min(here or known, key=lambda item: item.usd_per_hour)
                yield Saving(title, purposes, _change(price, other), _offers(price, other) + _condition(price, other))
        missing += [] if found else [target.name]
    if missing:
        words = joined(f"`market: {market}`" for market in markets)
        basis = f"no such price of {joined(map(code, missing))} is known; give it with {words} in a file under `prices`"
        yield Saving(name, purposes, UNKNOWN_EFFECT, basis)
    yield from _without_price(study, name, purposes)


def _priced_targets(study: StudyResult) -> Iterator[tuple[Resources, TargetPrices, Price]]:
    for target in study.plan.targets:
        prices = study.plan.prices.get(target.name)
        if prices is not None and prices.price is not None:
            yield target, prices, prices.price


def _without_price(study: StudyResult, name: str, purposes: tuple[Purpose, ...]) -> Iterator[Saving]:
    """One row for all targets whose own price is unknown."""
    known = {target.name for target, _, _ in _priced_targets(study)}
    unknown = [target.name for target in study.plan.targets if target.name not in known]
    if unknown:
        yield Saving(name, purposes, UNKNOWN_EFFECT, f"the price of {joined(map(code, unknown))} is unknown")


def _condition(price: Price, other: Price) -> str:
    """What a market asks in return."""
    if other.market == "spot":
        return "; work that is lost when the machine is taken away is not counted"
    share = other.usd_per_hour / price.usd_per_hour
    return f"; paid around the clock, so it pays from {percent(share, 2)} use on" if share < 1 else ""


def _region(study: StudyResult) -> Iterator[Saving]:
    """The same machine in the same market elsewhere."""
    name = "a cheaper region"
    missing: list[str] = []
    for target, prices, price in _priced_targets(study):
        home = price.region or target.region
        others = [other for other in prices.others if other.market == price.market and other.region not in (None, home)]
        if not others:
            missing.append(target.name)
            continue
        best = min(others, key=lambda item: item.usd_per_hour)
        effect = _change(price, best) if best.usd_per_hour < price.usd_per_hour else "nothing"
        basis = f"{_offers(price, best)}, the cheapest of {plural(len(others), 'other region')} known"
        yield Saving(f"{name} ({code(target.name)})", BATCH, effect, f"{basis}; moving the data is not counted")
    if missing:
        basis = f"no price of {joined(map(code, missing))} in another region is known; give one under `prices`"
        yield Saving(name, BATCH, UNKNOWN_EFFECT, basis)
    yield from _without_price(study, name, BATCH)


def _change(price: Price, other: Price) -> str:
    share = 1 - other.usd_per_hour / price.usd_per_hour
    return f"**{percent(share)}** less" if share > 0 else f"{percent(-share)} more" if share < 0 else "nothing"


def _offers(price: Price, other: Price) -> str:
    """Both prices, with market, place, day and source of the other."""
    place = f" in {escaped(other.region)}" if other.region else ""
    day = f", {other.as_of}" if other.as_of else ""
    return (
        f"${number(other.usd_per_hour, 4)} an hour {market_name(other)}{place} ({escaped(other.source)}{day}) "
        f"against ${number(price.usd_per_hour, 4)}"
    )


def _auto_scaling(targets: Sequence[TargetCost]) -> Saving:
    """The idle share of the user's own load is not in a study; how long a new process takes is.

    A launch's first measurement begins before its model is loaded, and on this machine often in a process that has
    imported the engine before.
    """
    startup = estimate([seconds for target in targets for seconds in target.startups])
    basis = "the saving is the idle share of your load over a day, which a study does not see"
    if startup is not None:
        basis += (
            f"; a launch took {number(startup.median)} s until its first measurement (median of {startup.count:,}), "
            "which a new node takes after it has booted, beside the time to import the engine and to load the model"
        )
    return Saving("auto-scaling", EVERY, UNKNOWN_EFFECT, basis)


def _batch_size(costs: Sequence[CellCost], right: str) -> Iterator[Saving]:
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


def _ratio(first: CellResult, second: CellResult, comparisons: int) -> Ratio | None:
    """Throughput of a node over throughput of a node, block by block: what a node costs is one price."""

    def rates(result: CellResult) -> dict[int, float]:
        return {repeat: value / result.cell.nodes for repeat, value in result.values("throughput").items()}

    return paired_ratio(rates(first), rates(second), comparisons=comparisons, confidence=first.confidence)


def _of_a_node(result: CellResult) -> float | None:
    """Median throughput of each of the cell's nodes."""
    value = result.estimate("throughput")
    return None if value is None else value.median / result.cell.nodes


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


def _smaller_model(
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


def _caching(study: StudyResult) -> Iterator[Saving]:
    """Repeated prompts in the workload's inputs: the most that a cache of whole answers could save."""
    name = "caching of frequent requests"
    files: dict[tuple[str, str | None, int | None], None] = {}
    for result in study.cells.values():
        source = result.cell.workload.prompt_source
        if result.compared and source is not None:
            files[source] = None
    whole = [key for key in files if (key[0], None, None) not in files or key[1:] == (None, None)]
    count = 0
    for digest, variant, limit in whole:
        path = RunPaths(study.folder).inputs / f"{digest}.jsonl"
        if path.is_file():
            prompts = read_prompts(path, variant, limit)
            repeated = sum(found - 1 for found in Counter(prompts).values())
            part = "".join(f", {field} {value}" for field, value in (("variant", variant), ("limit", limit)) if value)
            effect = f"at most **{percent(repeated / len(prompts))}** of requests" if repeated else "nothing"
            asked = f"{repeated:,} of {plural(len(prompts), 'prompt')}"
            basis = f"{asked} of {code(digest[:12])}{escaped(part)} were asked before"
            count += 1
            yield Saving(name, SERVING, effect, f"{basis}; your traffic may repeat itself more")
    if not count:
        missing = "the prompts are random; give recorded requests as `workload.prompts` to see how many repeat"
        yield Saving(name, SERVING, UNKNOWN_EFFECT, missing)


def _several_models(results: Sequence[CellResult]) -> Iterator[Saving]:
    """What the fastest cell of each model leaves of its cores, and the memory that another would need beside it.

    Each kind of work by itself: a token that is learnt is not one that is generated.
    """
    name = "several models on one machine"
    best: dict[tuple[str, str], CellResult] = {}
    for result in results:
        group = result.model, result.cell.workload.kind
        value, kept = result.estimate("throughput"), best.get(group)
        kept_value = kept.estimate("throughput") if kept else None
        if value is not None and (kept_value is None or value.median > kept_value.median):
            best[group] = result
    kinds = Counter(model for model, _ in best)
    found = False
    for (model, kind), result in best.items():
        use = cpu_use(result)
        if use is not None and result.cell.model is not None:
            found = True
            memory = f"; it holds {mebibytes(result.peak_bytes)} MiB" if result.peak_bytes is not None else ""
            idle = 1 - use
            which = escaped(model) + (f" ({kind})" if kinds[model] > 1 else "")
            basis = f"the fastest cell of {which} uses {percent(use)} of its cores' time{memory}"
            effect = f"at most {percent(idle, 2)} of these cores" if idle >= 0.005 else "nothing: the cores are busy"
            yield Saving(name, SERVING, effect, f"{basis}; measured alone, not together")
    if not found:
        yield Saving(name, SERVING, UNKNOWN_EFFECT, "no record says how busy the cores were")


def _preprocessing(results: Sequence[CellResult]) -> Iterator[Saving]:
    """Time spent on preparing inputs, over that of the measurement, which it is part of: all that moving it could free.

    A measurement shorter than that found them prepared by an earlier one of its launch.
    """
    name = "preprocessing elsewhere"
    shares = []
    for result in results:
        for measurement in result.completed.values():
            spent, whole = map(measurement.numbers_by_rank, ("preprocess_seconds", "measurement_seconds"))
            if spent and whole and 0 < max(whole) >= max(spent):
                shares.append(max(spent) / max(whole))
    if not shares:
        yield Saving(name, HYBRID, UNKNOWN_EFFECT, "no record says how long the inputs took to prepare")
        return
    basis = f"preparing inputs against measuring, median of {plural(len(shares), 'measurement')}"
    yield Saving(name, HYBRID, f"at most {percent(median(shares))} of the time", basis)


def _across_targets(costs: Sequence[CellCost], right: str) -> Iterator[Saving]:
    """The same cell on several targets with prices: what routing it to the cheapest saves over the dearest."""
    name = "the cheaper place for each work (own machines for the baseline, cloud for peaks)"
    groups: dict[tuple[str, str], list[tuple[float, CellCost]]] = {}
    for cost in costs:
        value, cell = cost.usd_per_million, cost.result.cell
        if value is not None:
            rest = without_batch(cell, "target", "cores_per_rank", "env")
            groups.setdefault((rest, str(batch_of(cell))), []).append((value.median, cost))
    best: tuple[float, CellCost, CellCost] | None = None
    for members in groups.values():
        cheapest: dict[str, tuple[float, CellCost]] = {}  # of each target
        for pair in sorted(members, key=lambda pair: pair[0]):
            cheapest.setdefault(pair[1].result.cell.target, pair)
        if len(cheapest) > 1:
            (low, cheap), *_, (high, dear) = cheapest.values()
            if best is None or low / high < best[0]:
                best = (low / high, cheap, dear)
    if best is None:
        missing = f"no cell was measured{right} on two targets with prices; name both under `targets`"
        yield Saving(name, HYBRID, UNKNOWN_EFFECT, missing)
        return
    share, cheap, dear = best
    here, there = (code(cost.result.cell.target) for cost in (cheap, dear))
    work = escaped(f"{cheap.result.subject}, {cheap.result.cell.label}")
    basis = f"{work} on {here} against {there}, medians; the largest difference found"
    effect = f"**{percent(1 - share)}** less {one_unit(cheap.result)}" if share < 1 else "nothing"
    yield Saving(name, HYBRID, effect, basis)
