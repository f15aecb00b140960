"""How long a study will take, and what that costs: its launches, and in each the visits of its cells.

    cost = study_cost(plan)             # plan.predictions are there
    cost.seconds, cost.usd, cost.text

A visit is as long as the measuring rules ask: warm-up passes, then as many as `least_seconds` and `least_passes`
need. Each launch pays for starting its ranks; each of the memory pass's visits for a process and a model of its own.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import ceil

from configs.cell import Cell, EncodeWorkload, NoopWorkload, PromptedWorkload
from configs.job import Measuring
from configs.plan import Plan
from configs.prediction import Prediction
from configs.training import TrainWorkload
from engine.planner.cells import new_tokens_of
from tasks.ledger import is_profiled

LAUNCH_SECONDS = 3.8
"""Of a launch beside its visits: docs/measurements/pipeline.md, 2026-11, two cores."""
TRANSFORMERS_SECONDS = 5.0
"""Importing transformers: measured on the same machine, 2026-11."""
RUN_SECONDS = 2.0
"""Of a run beside its launches: start of the flow and the report, docs/measurements/pipeline.md."""
MEMORY_VISIT_SECONDS = 0.5
"""A process of the memory pass, its model and its work left out: assumption."""


@dataclass(frozen=True)
class StudyCost:
    """`seconds` and `usd` are None where a cell or a price is unknown; `unknown` counts such cells."""

    launches: int
    visits: int
    seconds: float
    unknown: int
    usd: float | None

    @property
    def text(self) -> str:
        """For the first line."""
        left_out = f" without the {self.unknown} that cannot be predicted" if self.unknown else ""
        dollars = "" if self.usd is None else f", ${self.usd:,.2f}"
        launches = f"{self.launches} launch{'es' if self.launches != 1 else ''}"
        return f"to measure it takes about {duration(self.seconds)}{dollars} in {launches}{left_out}"


def duration(seconds: float) -> str:
    """In the unit that a person would choose."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.95 * size:
            return f"{seconds / size:.2g} {name}" if seconds < 10 * size else f"{seconds / size:,.0f} {name}"
    return f"{seconds:.0f} s"


def study_cost(plan: Plan) -> StudyCost:
    """All launches one after the other. Dollars are of the nodes that each launch has."""
    rules = plan.measuring
    launches: Counter[tuple[str, str]] = Counter()
    busy: dict[str, float] = defaultdict(float)
    cells: dict[str, Cell] = {}
    visits, unknown = 0, 0
    for key, cell in plan.cells.items():
        repeats, pack = plan.repeats[key], cell.pack_key if plan.pack else key
        cells[pack] = cell
        launches["timed", pack] = max(launches["timed", pack], repeats)
        visits += repeats
        one = visit_seconds(cell, plan.predictions.get(key, Prediction()), rules)
        if one is None:
            unknown += 1
            one = 0.0
        busy[pack] += repeats * one
        for measuring_pass, taken in _untimed_seconds(cell, one, rules).items():
            launches[measuring_pass, pack] = 1
            visits += 1
            busy[pack] += taken
        if cell.engine == "transformers" and launches["timed", pack] == repeats:
            busy[pack] += repeats * TRANSFORMERS_SECONDS
    for (_, pack), count in launches.items():
        busy[pack] += count * LAUNCH_SECONDS
    usd = plan.usd_per_hour
    if usd is not None:
        usd = (
            RUN_SECONDS * usd + sum(busy[pack] * (plan.usd_per_hour_of(cells[pack]) or 0.0) for pack in cells)
        ) / 3600
    return StudyCost(sum(launches.values()), visits, RUN_SECONDS + sum(busy.values()), unknown, usd)


def _untimed_seconds(cell: Cell, visit: float, rules: Measuring) -> dict[str, float]:
    """Seconds of a cell in each pass that times nothing; `visit` is those of a timed repeat, more than a profile's."""
    if getattr(cell.workload, "answers", False):
        return {}
    found = {"memory": MEMORY_VISIT_SECONDS} if rules.memory else {}
    profiles = (["profile"] if rules.profile else []) + ([rules.profiler] if rules.profiler else [])
    return found | dict.fromkeys(profiles if is_profiled(cell) else [], visit)


def visit_seconds(cell: Cell, said: Prediction, rules: Measuring) -> float | None:
    """One repeat of one cell; None where it is not predicted."""
    work = cell.workload
    if isinstance(work, NoopWorkload):
        return work.seconds * ceil(work.items / cell.layout.ranks)
    if isinstance(work, TrainWorkload):
        if said.step_seconds is None:
            return None
        return said.step_seconds * (work.steps or rules.warmup + _passes(said.step_seconds, rules))
    if said.throughput is None or not isinstance(work, PromptedWorkload):
        return None
    units = 1 if isinstance(work, EncodeWorkload) else new_tokens_of(work)
    one = (work.num_prompts or work.batch_size * cell.layout.dp) * units / said.throughput
    return one * (rules.warmup + _passes(one, rules))


def _passes(seconds: float, rules: Measuring) -> int:
    return max(rules.least_passes, ceil(rules.least_seconds / seconds))
