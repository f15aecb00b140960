"""How often the report decides right: python -m benchmarks.decisions

    python -m benchmarks.decisions [--seeds 50]

Simulates studies whose right decision is known, each with several seeds: clear cases (more than linear, not worth its
ranks, out of memory, failed, wrong answers, an objective missed, a cheaper region, ...) and ties, in which the larger
candidate must not win. Prints how often the decision was right. Ends with exit code 1 where a clear case is right in
fewer than 95 % of its seeds, or a tie is won in more than 5 %.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.common.execution import Layout
from configs.hardware.prices import Price, TargetPrices
from configs.plans.plan import Plan
from configs.records.rates import Rates
from configs.records.record import Failure, Record, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.noop import NoopWorkload
from reports.correctness.judge import CorrectnessVerdict
from reports.correctness.section import JudgedCell
from reports.decisions.cost import cell_costs
from reports.decisions.decision import Decision, decide
from reports.decisions.objectives import OBJECTIVES, Judgement
from reports.decisions.wrong_answers import cells_with_wrong_answers
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading

SEEDS = 50
BAR = 0.95
"""Share of the seeds: of clear cases decided right, of ties not won."""


@dataclass(frozen=True)
class Simulated:
    """A cell: work a second in the mean, and how many of its repeats were measured (None: all)."""

    ranks: int
    rate: float
    batch: int = 1
    target: str = "local"
    nodes: int = 1
    measured: int | None = None
    wrong: bool = False
    objective: str | None = None


@dataclass(frozen=True)
class Scenario:
    """Cells, and the index of those that are right to choose. noise: of each repeat; drift: of each block."""

    cells: tuple[Simulated, ...]
    right: tuple[int, ...]
    repeats: int = 10
    noise: float = 0.02
    drift: float = 0.1
    usd_per_hour: dict[str, float] = field(default_factory=dict)


CLEAR = {
    "two ranks do more than twice the work": Scenario((Simulated(1, 100), Simulated(2, 260)), (1,)),
    "the same in noise": Scenario((Simulated(1, 100), Simulated(2, 300)), (1,), noise=0.12),
    "the larger batch": Scenario((Simulated(1, 100), Simulated(1, 160, batch=4), Simulated(2, 300, batch=4)), (1,)),
    "not worth its ranks": Scenario((Simulated(1, 100), Simulated(2, 130), Simulated(4, 180)), (0,)),
    "a second node for nothing": Scenario((Simulated(1, 100), Simulated(2, 103, nodes=2)), (0,)),
    "more than linear to two ranks, less after": Scenario(
        (Simulated(1, 100), Simulated(2, 260), Simulated(4, 400)), (1,)
    ),
    "one rank runs out of memory": Scenario(
        (Simulated(1, 100, measured=0), Simulated(2, 120), Simulated(4, 190)), (1,)
    ),
    "the fastest has failed": Scenario((Simulated(1, 100), Simulated(2, 300, measured=0)), (0,)),
    "two repeats of the fastest failed": Scenario((Simulated(1, 100), Simulated(2, 300, measured=8)), (1,)),
    "the fastest has one repeat": Scenario((Simulated(1, 100), Simulated(2, 400, measured=1)), (0,)),
    "the fastest answers wrongly": Scenario((Simulated(1, 100), Simulated(2, 300, wrong=True)), (0,)),
    "the fastest misses its objective": Scenario(
        (Simulated(1, 100, objective="met"), Simulated(1, 200, batch=8, objective="missed")), (0,)
    ),
    "only the larger meets the objective": Scenario(
        (Simulated(1, 100, objective="missed"), Simulated(2, 110, objective="met")), (1,)
    ),
    "a cheaper region": Scenario(
        (Simulated(1, 100, target="here"), Simulated(1, 100, target="there")), (1,),
        usd_per_hour={"here": 1.0, "there": 0.7},
    ),
    "twice as fast, three times as dear": Scenario(
        (Simulated(1, 100, target="a"), Simulated(1, 200, target="b")), (0,), usd_per_hour={"a": 1.0, "b": 3.0}
    ),
    "three times as fast, twice as dear": Scenario(
        (Simulated(1, 100, target="a"), Simulated(1, 300, target="b")), (1,), usd_per_hour={"a": 1.0, "b": 2.0}
    ),
    "a paid machine used whole": Scenario((Simulated(1, 100), Simulated(2, 180)), (1,), usd_per_hour={"local": 1.0}),
    "six repeats are enough": Scenario((Simulated(1, 100), Simulated(2, 260)), (1,), repeats=6),
    "three repeats are not": Scenario((Simulated(1, 100), Simulated(2, 260)), (0,), repeats=3),
}  # fmt: skip

TIES = {
    "linear": Scenario((Simulated(1, 100), Simulated(2, 200)), (0,)),
    "linear, in noise": Scenario((Simulated(1, 100), Simulated(2, 200)), (0,), noise=0.15),
    "linear to eight ranks": Scenario(tuple(Simulated(n, 100 * n) for n in (1, 2, 4, 8)), (0,)),
    "six repeats": Scenario((Simulated(1, 100), Simulated(2, 200)), (0,), repeats=6),
    "another target, as fast": Scenario((Simulated(1, 100), Simulated(1, 100, target="b")), (0,)),
    "as much for a dollar": Scenario(
        (Simulated(1, 100, target="a"), Simulated(1, 200, target="b")), (0,), usd_per_hour={"a": 1.0, "b": 2.0}
    ),
}


def simulate(scenario: Scenario, seed: int) -> tuple[StudyResult, list[CellResult]]:
    """A study of this scenario. Repeats of one block share its drift."""
    generator = np.random.default_rng([seed, 7])
    blocks = np.exp(generator.normal(0, scenario.drift, scenario.repeats))
    results = []
    for index, one in enumerate(scenario.cells):
        speeds = one.rate * blocks * np.exp(generator.normal(0, scenario.noise, scenario.repeats))
        measured = scenario.repeats if one.measured is None else one.measured
        results.append(cell_result(index, one, [float(speed) for speed in speeds[:measured]], scenario.repeats))
    cells = {result.key: result for result in results}
    prices = {
        name: TargetPrices(price=Price(usd_per_hour=usd, source="a test"))
        for name, usd in scenario.usd_per_hour.items()
    }
    plan = Plan(
        study="s", models=(), targets=(), measuring=Measuring(), pack=True, experiments=(), prices=prices,
        cells={key: result.cell for key, result in cells.items()}, repeats={},
    )  # fmt: skip
    return StudyResult(Path(), plan, cells, (), {}), results


def cell_result(index: int, one: Simulated, speeds: list[float], repeats: int) -> CellResult:
    """A cell of the noop workload with these speeds; repeats without one ran out of memory."""
    cell = Cell(workload=NoopWorkload(items=one.batch), layout=Layout(dp=one.ranks), target=one.target, nodes=one.nodes)
    readings = {}
    for repeat in range(repeats):
        speed = speeds[repeat] if repeat < len(speeds) else None
        record = Record(
            key=cell.key, cell=cell, repeat=repeat, attempt=1, job="j", position=0, started_at=None, finished_at=None,
            status=Status.OUT_OF_MEMORY if speed is None else Status.COMPLETED,
            failure=Failure(message="no memory left") if speed is None else None,
        )  # fmt: skip
        readings[repeat] = Reading(record, "p", True, None if speed is None else Rates(1.0, 1, items_per_second=speed))
    return CellResult(cell.key, cell, f"cell {index}", "no model", repeats, readings, None)


def decided(scenario: Scenario, seed: int) -> tuple[Decision, list[CellResult]]:
    """The decision on a simulated study, and its cells in the order of the scenario."""
    study, results = simulate(scenario, seed)
    judged, judgements = [], []
    for one, result in zip(scenario.cells, results, strict=True):
        if one.wrong:
            judged.append(("m", JudgedCell("c", result, CorrectnessVerdict("defect", "logits are off"))))
        if one.objective is not None:
            objective: Any = OBJECTIVES["p99_latency_seconds"]
            word: Any = one.objective
            judgements.append(Judgement(objective, 1.0, word, "because", "no model", "c", result))
    (found,) = decide(study, cell_costs(study), judgements, cells_with_wrong_answers(study, judged))
    return found, results


def count(scenario: Scenario, holds: Callable[[Decision, list[CellResult]], bool], seeds: int = SEEDS) -> int:
    """In how many of the seeds from 0 on something holds of the decision."""
    return sum(holds(*decided(scenario, seed)) for seed in range(seeds))


def is_right(scenario: Scenario) -> Callable[[Decision, list[CellResult]], bool]:
    """Whether one of the cells that are right to choose is chosen."""
    return lambda found, results: any(found.chosen is results[index] for index in scenario.right)


def main() -> int:
    """Simulate and print each; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    seeds = parser.parse_args().seeds
    if seeds < 1:
        parser.error(f"--seeds: got {seeds}, expected at least 1")
    is_met = True
    for title, group in (("clear case: decided right", CLEAR), ("tie: not won by the larger", TIES)):
        total = 0
        print(f"{title:<45} {f'of {seeds}':>8} {'share':>8}")
        for name, scenario in group.items():
            right = count(scenario, is_right(scenario), seeds)
            total += right
            is_met = is_met and right >= BAR * seeds
            print(f"  {name:<43} {right:>8} {right / seeds:>8.1%}")
        print(f"  {'all ' + str(len(group)):<43} {total:>8} {total / seeds / len(group):>8.1%}")
    print("the bars are met" if is_met else f"MISSED: a case below {BAR:.0%}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
