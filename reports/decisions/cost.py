"""Cost of work: dollars per million tokens or embeddings, per thousand steps or prompts, and for the whole study.

    costs = cell_costs(study)                        # by cell, with the throughput's interval carried over
    table = unit_cost_table(costs)                   # and the other tables and sentences of this section

A target's price is of a whole machine, of one node where it has several: a cell that uses a part of it pays for all
of it, and for all its nodes. Where no price is known there are no dollars, and the report says how to give one. A price
is stale by the day the study was measured, never by today's: rendering again gives the same report.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property

from configs.hardware.prices import OF_STUDY, STALE_DAYS, Price
from configs.spec.cell import Cell
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget
from reports.decisions.spending import HOUR_SECONDS, PAUSE_SECONDS, PHASES, PROFILING, TargetCost
from reports.numbers.statistics import Estimate, estimate
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.text import UNKNOWN, Table, code, count, escaped, estimate_cell, joined, number, percent, plural

MOST_ROWS = 60
"""So many rows a table of cells shows in the report; cells.csv has a line for every cell."""

HOW_TO_PRICE = (
    "set `targets[].price_usd_per_hour`, add a file under `prices`, or name the rented machine in "
    "`targets[].machine`, such as `aws/g4dn.xlarge/us-east-1`"
)
BILLING = (
    "Clouds bill by the second and at least 60 s for each start of a machine "
    "(https://aws.amazon.com/ec2/pricing/on-demand/, "
    "https://cloud.google.com/compute/vm-instance-pricing); disks, network and taxes are not counted."
)


@dataclass(frozen=True)
class CellCost:
    """What one cell's work costs; None where price or figure is unknown. Items are prompts where it generates."""

    result: CellResult
    price: Price | None
    usd_per_million_tokens: Estimate | None = None
    usd_per_million_embeddings: Estimate | None = None
    usd_per_thousand_steps: Estimate | None = None
    usd_per_thousand_items: Estimate | None = None

    @cached_property
    def joules_per_token(self) -> Estimate | None:
        """Energy of a token; None where it is unknown. Goes through all records of the cell, so only where asked."""
        return _joules_per_token(self.result)

    @property
    def usd_per_hour(self) -> float | None:
        """What an hour of the cell costs, all its nodes; None where the price is unknown."""
        return None if self.price is None else self.price.usd_per_hour * self.result.cell.nodes

    @property
    def usd_per_million(self) -> Estimate | None:
        """Of what its throughput counts: embeddings where it encodes, else tokens; None for items of noop."""
        return self.usd_per_million_embeddings or self.usd_per_million_tokens


def one_unit(result: CellResult) -> str:
    """`a token`, `an embedding`: one of what a cell's throughput counts."""
    return f"{'an' if result.work_unit[0] in 'aeiou' else 'a'} {result.work_unit}"


def inverse(value: Estimate | None, numerator: float) -> Estimate | None:
    """numerator / value, its interval turned over with it; None where the value is not above 0 throughout."""
    if value is None or min(value.low, value.bounds[0]) <= 0:
        return None
    interval = None if value.interval is None else (numerator / value.interval[1], numerator / value.interval[0])
    return Estimate(numerator / value.median, numerator / value.high, numerator / value.low, value.count, interval)


def price_of(study: StudyResult, result: CellResult) -> Price | None:
    """What an hour of the cell's target costs; None where it is unknown."""
    known = study.plan.prices.get(result.cell.target)
    return known.price if known else None


def cell_costs(study: StudyResult) -> list[CellCost]:
    """Every cell whose speed may be compared, in the plan's order."""
    return [cell_cost(result, price_of(study, result)) for result in study.cells.values() if result.compared]


def cell_cost(result: CellResult, price: Price | None) -> CellCost:
    """The price of an hour of all the cell's nodes over the work of an hour."""
    if price is None:
        return CellCost(result, None)
    per_second = price.usd_per_hour * result.cell.nodes / HOUR_SECONDS
    items = result.estimate("prompts_per_second") or result.estimate("items_per_second")
    steps = _mean_step_seconds(result)
    return CellCost(
        result,
        price,
        usd_per_million_tokens=inverse(result.estimate("tokens_per_second"), per_second * 1e6),
        usd_per_million_embeddings=inverse(result.estimate("embeddings_per_second"), per_second * 1e6),
        usd_per_thousand_steps=None if steps is None else steps.scaled(per_second * 1e3),
        usd_per_thousand_items=inverse(items, per_second * 1e3),
    )


def _mean_step_seconds(result: CellResult) -> Estimate | None:
    """Mean seconds of a step, over the repeats: slow steps are paid for, and a median leaves them out. None of work
    without steps."""
    if result.estimate("step_seconds") is None:
        return None
    steps = result.values("passes")
    means = [wall / steps[repeat] for repeat, wall in result.values("wall_seconds").items() if steps.get(repeat)]
    return estimate(means, result.confidence)


def _joules_per_token(result: CellResult) -> Estimate | None:
    """Mean power of all ranks on all nodes over the throughput; None where one of them is unknown."""
    values = []
    for measurement in result.completed.values():
        watts, rates = _watts(result, measurement), measurement.rates
        if watts is not None and rates is not None and rates.tokens_per_second:
            values.append(watts / rates.tokens_per_second)
    return estimate(values, result.confidence)


def _watts(result: CellResult, measurement: Reading) -> float | None:
    """Of a measurement, by its figures named `*_joules`; None where unmeasured, or where some rank has no figure: the
    sum of the others would be too little.

    Of a program of the user's whose steps are timed, the power while the GPUs worked: its energy is that of the start,
    too, in which they idle, and its own figures are of a step or a line.
    """
    ranks = result.cell.layout.ranks
    if result.cell.workload.energy_is_of_start_too:
        working = measurement.numbers_by_rank("gpu_power_watts")
        return sum(working) if len(working) == ranks else None
    names = {
        name for name in (*measurement.record.figures, *measurement.record.rank_figures) if name.endswith("_joules")
    }
    seconds = measurement.figure("measurement_seconds")
    by_rank = [measurement.numbers_by_rank(name) for name in sorted(names)]
    if not by_rank or not seconds or any(len(known) != ranks for known in by_rank):
        return None
    return sum(map(sum, by_rank)) / seconds


def unit_cost_table(costs: Sequence[CellCost]) -> Table | None:
    """One row for each cell with a price and a figure, the cheapest tokens of a model first; at most MOST_ROWS."""
    rows = [cost for cost in _ordered(costs) if _has_figure(cost)]
    if not rows:
        return None
    columns = (
        "model",
        "cell",
        "target",
        "ranks",
        "USD an hour",
        "USD per million tokens, median (interval)",
        "USD per million embeddings, median (interval)",
        "USD per thousand steps",
        "USD per thousand prompts or items",
        "energy, J a token",
    )
    lines = tuple(
        (
            escaped(cost.result.model),
            escaped(cost.result.name),
            escaped(cost.result.cell.target),
            count(cost.result.cell.layout.ranks),
            number(cost.usd_per_hour),
            estimate_cell(cost.usd_per_million_tokens),
            estimate_cell(cost.usd_per_million_embeddings),
            estimate_cell(cost.usd_per_thousand_steps),
            estimate_cell(cost.usd_per_thousand_items),
            estimate_cell(cost.joules_per_token),
        )
        for cost in rows[:MOST_ROWS]
    )
    return Table(columns, lines, text_columns=3).without_empty_columns()


def _has_figure(cost: CellCost) -> bool:
    """Whether any cost is known, of money or of energy."""
    known = (cost.usd_per_million_tokens, cost.usd_per_thousand_steps, cost.usd_per_thousand_items)
    return any(value is not None for value in (*known, cost.joules_per_token))


def _ordered(costs: Sequence[CellCost]) -> list[CellCost]:
    """Models and workloads in the plan's order, within them the cheapest first."""
    groups = list(dict.fromkeys((cost.result.model, cost.result.cell.workload.kind) for cost in costs))

    def place(cost: CellCost) -> tuple[int, float]:
        value = cost.usd_per_million or cost.usd_per_thousand_items
        group = groups.index((cost.result.model, cost.result.cell.workload.kind))
        return group, value.median if value else float("inf")

    return sorted(costs, key=place)


def cost_sentences(study: StudyResult, costs: Sequence[CellCost], targets: Sequence[TargetCost]) -> list[str]:
    """What to know before reading the tables: prices, their age, whole machines, energy."""
    prices = _prices(study)
    lines = [_price_sentence(study, name, price) for name, price in prices.items() if price is not None]
    unpriced = [code(name) for name, price in prices.items() if price is None]
    if unpriced:
        lines.append(f"No cost in dollars for {joined(unpriced)}: the price of an hour is not known; {HOW_TO_PRICE}.")
    if any(cost.price for cost in costs):
        lines += [_whole_machine(study, costs), BILLING]
        left_out = sum(_has_figure(cost) for cost in costs) - MOST_ROWS
        if left_out > 0:
            verb = "is" if left_out == 1 else "are"
            told = f"{plural(left_out, 'more cell')} {verb} left out of the table"
            lines.append(f"{told}; `cells.csv` has a line for each.")
    if not any(cost.joules_per_token for cost in costs):
        lines.append("Energy is unknown: no record has a figure in joules.")
    else:
        lines.append("Energy is that of the accelerators of all ranks, over all nodes, by their own counters.")
    pauses = sum(target.pause_seconds for target in targets)
    if pauses:
        lines.append(
            f"{_hours(pauses)} h lie in pauses of more than {number(PAUSE_SECONDS / 60, 2)} minutes between launches. "
            "They are not counted: a machine that is paid for would be given back."
        )
    unknown = sum(target.without_times for target in targets)
    if unknown:
        lines.append(
            f"The start-up of {plural(unknown, 'launch')} is unknown: the launcher left no time, or no measurement "
            "was reached."
        )
    return lines


def _prices(study: StudyResult) -> dict[str, Price | None]:
    found = {}
    for target in study.plan.targets:
        known = study.plan.prices.get(target.name)
        found[target.name] = known.price if known else None
    return found


def _price_sentence(study: StudyResult, target: str, price: Price) -> str:
    place = f" in {escaped(price.region)}" if price.region else ""
    kinds = {known.name: known.kind for known in study.plan.targets}
    what = (
        f"a node of target {code(target)}" if kinds[target] not in ("local", "endpoint") else f"target {code(target)}"
    )
    text = (
        f"An hour of {what} costs ${number(price.usd_per_hour, 4)} ({market_name(price)}{place}; "
        f"source: {escaped(price.source)}"
    )
    text = f"{text}{', ' + age if (age := _age(study, price)) else ''})"
    return f"{text}{_rented_otherwise(study, target, price)}."


def _rented_otherwise(study: StudyResult, target: str, price: Price) -> str:
    """That a target's nodes are rented in another market than that of its price."""
    found = next((known for known in study.plan.targets if known.name == target), None)
    if not isinstance(found, RentedTarget) or found.market == price.market or price.source == OF_STUDY:
        return ""
    market = found.market.replace("_", " ")
    return f"; its nodes are asked for as {market}, and the section on rented nodes says what they cost"


def _age(study: StudyResult, price: Price) -> str:
    """How old the price was when the study was measured."""
    if price.as_of is None:
        return "" if price.source == OF_STUDY else "without a date"
    measured = measured_on(study)
    days = price.age_days(measured) if measured else None
    if days is not None and days > STALE_DAYS:
        return f"as of {price.as_of}, **stale**: {days:,} days old when this was measured"
    return f"as of {price.as_of}"


def measured_on(study: StudyResult) -> date | None:
    """The day on which the last repeat that counts ended; None where none did."""
    times = [reading.record.finished_at for reading in study.readings if reading.used and reading.record.finished_at]
    return date.fromisoformat(max(times)[:10]) if times else None


def market_name(price: Price) -> str:
    """`on demand`, `spot`, `reserved 1 year`."""
    return price.market.replace("_", " ")


def _whole_machine(study: StudyResult, costs: Sequence[CellCost]) -> str:
    """That a part of a machine is paid as the whole, and how many cells that concerns."""
    most: dict[str, int] = {}
    for cost in costs:
        cell = cost.result.cell
        most[cell.target] = max(most.get(cell.target, 0), _cores_a_node(cell))
    fewer = sum(_cores_a_node(cost.result.cell) < most[cost.result.cell.target] for cost in costs)
    text = "The price is of the whole machine, whatever part of it a cell uses"
    if any(not isinstance(target, LocalTarget) for target in study.plan.targets):
        text += "; on a cluster it is of one node, and a cell pays for all its nodes"
    if not fewer:
        return f"{text}."
    verb = "uses" if fewer == 1 else "use"
    return f"{text}: {fewer:,} of {plural(len(costs), 'cell')} {verb} less of it than the largest."


def _cores_a_node(cell: Cell) -> int:
    return cell.layout.ranks // cell.nodes * cell.cores_per_rank


def study_cost_table(targets: Sequence[TargetCost], runs: Sequence[str] = ()) -> Table | None:
    """What the whole study cost, by target. runs: of several studies, the name of each target's run."""
    if not targets:
        return None
    several = any(target.node_seconds != target.seconds for target in targets)
    hours = ("duration, hours", "node hours") if several else ("duration, hours",)
    first = ("run",) if runs else ()
    columns = (*first, "provider", "target", "total cost, USD", *hours, "cost per hour, USD", "market", "launches")
    rows = tuple(
        (
            *(code(run) for run in runs[place : place + 1]),
            escaped(provider(target)),
            escaped(target.target),
            number(target.usd),
            _hours(target.total_seconds),
            *([_hours(target.total_node_seconds)] if several else []),
            number(target.price.usd_per_hour if target.price else None, 4),
            market_name(target.price) if target.price else "price unknown",
            count(target.launches),
        )
        for place, target in enumerate(targets)
    )
    return Table(columns, rows, text_columns=2 + len(first))


def provider(target: TargetCost) -> str:
    """Whose machine it is, where the target says so."""
    if target.machine is None:
        return UNKNOWN
    name = target.machine.split("/")[0]
    return name.upper() if name in ("aws", "gcp") else name.capitalize()


def phase_table(targets: Sequence[TargetCost]) -> Table | None:
    """Where the time and the money went."""
    if not targets:
        return None
    priced = [target for target in targets if target.price]
    columns = ["phase"]
    for target in targets:
        columns.append(f"{escaped(target.target)}, s")
        columns.append("share")
        columns += ["USD"] if target in priced else []
    rows = []
    for phase in PHASES:
        if phase in PROFILING and not any(target.seconds[phase] for target in targets):
            continue  # most studies ask for none
        row = [phase]
        for target in targets:
            seconds = target.seconds[phase]
            if phase == "start-up" and not target.startups:  # no launch of it left when it began
                row += [UNKNOWN] * (3 if target in priced else 2)
                continue
            row += [number(seconds), percent(seconds / target.total_seconds if target.total_seconds else None)]
            row += [number(target.usd_of(phase))] if target in priced else []
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def study_cost_sentence(targets: Sequence[TargetCost]) -> str | None:
    """What the study cost and how much of that was measuring; None where no launch left its times."""
    if not targets:
        return None
    total = sum(target.total_node_seconds for target in targets)
    spent = {
        phase: sum(target.node_seconds[phase] for target in targets)
        for phase in ("measuring", "memory pass", *PROFILING)
    }
    measuring = sum(spent.values())
    passes = [f"{phase}es" for phase, seconds in spent.items() if seconds and phase != "measuring"]
    failed = sum(target.node_seconds["failed attempts"] for target in targets)
    known = [usd for target in targets if (usd := target.usd) is not None]
    took = f"{_hours(total)} h of machine time, {percent(measuring / total if total else None)} of it measuring"
    took += f" ({joined(passes)} included)" if passes else ""
    took += f" and {percent(failed / total)} in failed attempts" if failed else ""
    if len(known) < len(targets):
        unpriced = [code(target.target) for target in targets if target.usd is None]
        verb = "has" if len(unpriced) == 1 else "have"
        return f"The study took {took}. What that cost is unknown: {joined(unpriced)} {verb} no price."
    return f"The study cost ${number(sum(known))}: {took}."


def _hours(seconds: float) -> str:
    return number(seconds / HOUR_SECONDS)
