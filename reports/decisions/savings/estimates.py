"""Estimates of common savings, quantified where prices or measurements are available.

    savings(study, costs, targets)

Only what follows from the study's prices, records and inputs is given a number. Everything else is unknown
and says what to supply: rules of thumb from elsewhere are not this user's numbers.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from statistics import median

from configs.inputs.prompts import read_prompts
from configs.plans.paths import RunPaths
from reports.correctness.section import JudgedCell
from reports.decisions.cost import CellCost, one_unit
from reports.decisions.nodes import batch_of, without_batch
from reports.decisions.savings.prices import market_savings, region_savings
from reports.decisions.savings.saving import BATCH, EVERY, HYBRID, SERVING, UNKNOWN_EFFECT, Saving
from reports.decisions.savings.throughput import batch_size_savings, smaller_model_savings
from reports.decisions.spending import TargetCost
from reports.numbers.statistics import estimate
from reports.reading.load import CellResult, StudyResult
from reports.tables import cpu_use
from reports.text import code, escaped, mebibytes, number, percent, plural


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
        *market_savings(study, "spot or preemptible machines", BATCH, ("spot",)),
        *region_savings(study),
        *market_savings(study, "reserved machines", EVERY, ("reserved_1_year", "reserved_3_years")),
        _auto_scaling(targets),
        *batch_size_savings(costs, right),
        *smaller_model_savings(results, judged, right),
        *_caching(study),
        *_several_models(results),
        *_preprocessing(results),
        *_across_targets(costs, right),
    ]
    purpose = study.plan.purpose
    return [saving for saving in found if purpose is None or purpose in saving.purposes]


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
