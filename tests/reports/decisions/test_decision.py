"""What a report decides: simulated studies whose right decision is known, and what it says of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from reports.decisions.choice import Candidate, choose_candidate
from reports.decisions.cost import cell_costs
from reports.decisions.decision import Decision, decide, decision_body, decision_lead
from reports.decisions.next_measurement import repeats_to_decide
from reports.decisions.objectives import OBJECTIVES, Judgement
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading

SEEDS = range(50)


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
    study, results = simulate(scenario, seed)
    judged, judgements = [], []
    for one, result in zip(scenario.cells, results, strict=True):
        if one.wrong:
            judged.append(("m", JudgedCell("c", result, CorrectnessVerdict("defect", "logits are off"))))
        if one.objective is not None:
            objective: Any = OBJECTIVES["p99_latency_seconds"]
            word: Any = one.objective
            judgements.append(Judgement(objective, 1.0, word, "because", "no model", "c", result))
    (found,) = decide(study, cell_costs(study), judgements, judged)
    return found, results


def count(scenario: Scenario, holds: Callable[[Decision, list[CellResult]], bool]) -> int:
    return sum(holds(*decided(scenario, seed)) for seed in SEEDS)


def is_right(scenario: Scenario) -> Callable[[Decision, list[CellResult]], bool]:
    return lambda found, results: any(found.chosen is results[index] for index in scenario.right)


@pytest.mark.parametrize("name", CLEAR)
def test_clear_cases_are_decided_right(name: str) -> None:
    assert count(CLEAR[name], is_right(CLEAR[name])) >= 0.95 * len(SEEDS)


@pytest.mark.parametrize("name", TIES)
def test_ties_are_not_won(name: str) -> None:
    assert count(TIES[name], is_right(TIES[name])) >= 0.95 * len(SEEDS)


def test_equals_of_one_size_go_to_the_one_that_answers_first() -> None:
    rates = {repeat: 100.0 + repeat % 3 for repeat in range(8)}
    slow = Candidate("slow", 1, dict(rates), {repeat: 0.2 for repeat in rates})
    soon = Candidate("soon", 1, {repeat: rate * (0.99, 1.02)[repeat % 2] for repeat, rate in rates.items()},
                     {repeat: 0.1 for repeat in rates})  # fmt: skip
    assert choose_candidate([slow, soon]).chosen == 1
    faster = Candidate("faster", 1, {repeat: rate * 1.2 for repeat, rate in rates.items()}, slow.latency)
    assert choose_candidate([slow, soon, faster]).chosen == 2


def test_serving_goes_by_latency() -> None:
    repeats = range(8)
    noise = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]

    def one(ranks: int, rate: float, latency: float) -> Candidate:
        return Candidate(
            str(ranks), ranks, {k: rate * noise[k] for k in repeats}, {k: latency / noise[-k] for k in repeats}
        )

    halves, tie = [one(1, 100, 0.1), one(2, 120, 0.06)], [one(1, 100, 0.1), one(2, 120, 0.1)]
    assert choose_candidate(halves, by_latency=True).chosen == 1 and choose_candidate(halves).chosen == 0
    assert choose_candidate(tie, by_latency=True).chosen == 0


def test_the_sentence_says_what_the_larger_would_bring() -> None:
    found, _ = decided(CLEAR["not worth its ranks"], 1)
    assert decision_lead(found) == "Run cell 0"
    body = decision_body(found)
    assert "items/s" in body and "; cell 2 does 1.77 times (1.74 to 1.83" in body and "on 4 ranks instead of 1" in body
    assert body.endswith(", 44.2 % (43.6 to 45.7) as much per rank")
    few, _ = decided(CLEAR["three repeats are not"], 1)
    assert decision_body(few).endswith("as much per rank, of which 6 repeats would make sure")


def test_how_many_repeats_would_decide() -> None:
    def needed(scenario: Scenario, seed: int = 1) -> int | None:
        return repeats_to_decide([decided(scenario, seed)[0]])

    assert needed(CLEAR["three repeats are not"]) == 6, "the fewest that give an interval"
    assert needed(TIES["linear, in noise"]) == 40, "four times as many halve the interval"
    assert needed(CLEAR["not worth its ranks"]) is None and needed(CLEAR["the larger batch"]) is None
    assert needed(CLEAR["two ranks do more than twice the work"]) is None


def test_what_was_left_out_is_said() -> None:
    found, _ = decided(CLEAR["the fastest answers wrongly"], 1)
    assert decision_body(found).endswith("(left out: 1 cell with wrong answers)")
    nothing, _ = decided(Scenario((Simulated(1, 100, objective="missed"),), ()), 1)
    assert decision_lead(nothing) == "No cell of no model can be recommended"
    assert decision_body(nothing).startswith("1 cell missing an objective")
