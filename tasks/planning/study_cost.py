"""Estimate the duration and cost of a study from its launches and their measurements.

    cost = study_cost(plan)             # plan.predictions are there
    cost.seconds, cost.usd, cost.text
    launches_cost(plan, launches)       # of these launches alone: what a run has still to measure

A measurement lasts as long as the measuring rules require: warm-up passes, then as many as `min_seconds` and
`min_passes` need. Each launch adds the start of its ranks; each measurement of the memory pass adds a process and
loading a model.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from configs.common.dollars import dollars
from configs.common.printable import duration_text, plural
from configs.plans.packing import Launch
from configs.plans.passes import passes_of
from configs.plans.plan import Plan
from configs.plans.prediction import Prediction
from configs.records.record import MeasuringPass
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring

LAUNCH_SECONDS = 3.8
"""Overhead of a launch: docs/measurements/pipeline.md, 2026-11, two cores."""
TRANSFORMERS_SECONDS = 5.0
"""Importing transformers: measured on the same machine, 2026-11."""
RUN_SECONDS = 2.0
"""Overhead of a run: start of the flow and the report, docs/measurements/pipeline.md."""
MEMORY_MEASUREMENT_SECONDS = 0.5
"""A process of the memory pass without its model and work: assumption."""


@dataclass(frozen=True)
class StudyCost:
    """`seconds` and `usd` leave out cells of unknown duration, which `unknown` counts. `usd`: None without a price.

    nothing_known: no cell has a known duration, so that both are of starting the launches alone. node_seconds: the same
    seconds, those of each launch times its nodes.
    """

    launches: int
    measurements: int
    seconds: float
    unknown: int
    usd: float | None
    nothing_known: bool = False
    node_seconds: float | None = None

    @property
    def text(self) -> str:
        """One clause for the first line of the plan."""
        left_out = f", excluding {plural(self.unknown, 'cell')} of unknown duration" if self.unknown else ""
        paid = "" if self.usd is None else f", ${dollars(self.usd)}"
        launches = plural(self.launches, "launch")
        about = f"about {duration_text(self.seconds)}{paid}"
        if self.nothing_known:
            return f"how long measuring takes is unknown; starting its {launches} alone takes {about}"
        return f"measuring takes {about} in {launches}{left_out}"


def study_cost(plan: Plan) -> StudyCost:
    """Sum the launches run one after the other; dollars cover the nodes of each launch.

    A profile counts as long as a timed repeat, which is more than it takes.
    """
    rules = plan.measuring
    launches: Counter[tuple[MeasuringPass, str]] = Counter()
    busy: dict[str, float] = defaultdict(float)
    cells: dict[str, Cell] = {}
    measurements, unknown = 0, 0
    for key, cell in plan.cells.items():
        repeats, pack = plan.repeats[key], cell.pack_key if plan.pack else key
        cells[pack] = cell
        launches["timed", pack] = max(launches["timed", pack], repeats)
        measurements += repeats
        one = measurement_seconds(cell, plan.predictions.get(key, Prediction()), rules)
        if one is None:
            unknown += 1
            one = 0.0
        busy[pack] += repeats * one
        for measuring_pass in passes_of(plan, key):
            # Under nsys each measurement has a launch of its own (`configs.plans.packing`).
            launches[measuring_pass, pack] = 1 + (launches[measuring_pass, pack] if measuring_pass == "nsys" else 0)
            measurements += 1
            busy[pack] += MEMORY_MEASUREMENT_SECONDS if measuring_pass == "memory" else one
    for (measuring_pass, pack), count in launches.items():
        busy[pack] += count * _starting_seconds(measuring_pass, cells[pack])
    usd = plan.usd_per_hour
    if usd is not None:
        usd = (
            RUN_SECONDS * usd + sum(busy[pack] * (plan.usd_per_hour_of(cells[pack]) or 0.0) for pack in cells)
        ) / 3600
    seconds, nothing_known = RUN_SECONDS + sum(busy.values()), unknown == len(plan.cells)
    return StudyCost(sum(launches.values()), measurements, seconds, unknown, usd, nothing_known)


def launches_cost(plan: Plan, launches: Sequence[Launch]) -> StudyCost:
    """Sum these launches run one after the other, without the overhead of a run; dollars cover the nodes of each."""
    seconds = node_seconds = 0.0
    usd: float | None = 0.0
    known: dict[int, float | None] = {}  # by identity: to make 100,000 keys takes seconds
    for launch in launches:
        cell = launch.measurements[0].cell
        busy = _starting_seconds(launch.measuring_pass, cell)
        for measurement in launch.measurements:
            place = id(measurement.cell)
            if place not in known:
                said = plan.predictions.get(measurement.cell.key, Prediction())
                known[place] = measurement_seconds(measurement.cell, said, plan.measuring)
            busy += MEMORY_MEASUREMENT_SECONDS if launch.measuring_pass == "memory" else known[place] or 0.0
        seconds, node_seconds = seconds + busy, node_seconds + busy * cell.nodes
        price = plan.usd_per_hour_of(cell)
        usd = None if usd is None or price is None else usd + busy / 3600 * price
    measurements = sum(len(launch.measurements) for launch in launches)
    unknown = sum(one is None for one in known.values())
    return StudyCost(len(launches), measurements, seconds, unknown, usd, unknown == len(known), node_seconds)


def _starting_seconds(measuring_pass: MeasuringPass, cell: Cell) -> float:
    imports = TRANSFORMERS_SECONDS if measuring_pass == "timed" and cell.engine == "transformers" else 0.0
    return LAUNCH_SECONDS + imports


def measurement_seconds(cell: Cell, said: Prediction, rules: Measuring) -> float | None:
    """Return seconds of one repeat of one cell; None without a prediction."""
    work = cell.workload
    stated = work.known_seconds(cell.layout.ranks)
    if stated is not None:
        return stated
    if said.step_seconds is not None:
        return said.step_seconds * (work.passes or rules.warmup + _passes(said.step_seconds, rules))
    units = work.units_per_pass(cell.layout.dp)
    if said.throughput is None or units is None:
        return None
    one = units / said.throughput
    return one * (rules.warmup + _passes(one, rules))


def _passes(seconds: float, rules: Measuring) -> int:
    return max(rules.min_passes, ceil(rules.min_seconds / seconds))
