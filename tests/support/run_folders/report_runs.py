"""Run folders as a study leaves them, written without measuring: every number is known beforehand."""

from pathlib import Path
from typing import Any

import numpy as np

from configs.common.base import canonical_json
from configs.common.execution import Layout
from configs.hardware.prices import Price, TargetPrices
from configs.plans.paths import RunPaths
from configs.plans.plan import CellPoint, Plan, PlannedExperiment, PlannedModel
from configs.records.record import Record, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget
from configs.workloads.generate import GenerateWorkload

MODEL = PlannedModel(name="tiny", identity="folder:abc", manifest="m/manifest.json")
RANDOM = PlannedModel(name="llama-110m", identity="synthetic:llama-110m@0", manifest="s/manifest.json")
REPEATS = 3
TEN = [0.9955 + 0.001 * step for step in range(10)]


def generate(model: PlannedModel = MODEL, dp: int = 1, dtype: str = "float32", **work: Any) -> Cell:
    fields = {"num_prompts": 8, "new_tokens": 5, "batch_size": 4, **work}
    return Cell.model_validate(
        {"model": model.identity, "workload": GenerateWorkload(**fields), "layout": Layout(dp=dp), "dtype": dtype}
    )


def experiment(
    name: str, kind: str, points: list[tuple[Cell, dict[str, Any], str]], **fields: Any
) -> PlannedExperiment:
    placed = [
        CellPoint(cell=cell.key, values=values, label=label, baseline=position == 0)
        for position, (cell, values, label) in enumerate(points)
    ]
    return PlannedExperiment.model_validate(
        {"name": name, "kind": kind, "model": MODEL.name, "points": placed, **fields}
    )


def plan_of(cells: list[Cell], experiments: list[PlannedExperiment], repeats: int = REPEATS) -> Plan:
    return Plan(
        study="quick",
        models=(MODEL, RANDOM),
        targets=(LocalTarget(),),
        measuring=Measuring(repeats=repeats),
        pack=True,
        experiments=tuple(experiments),
        cells={cell.key: cell for cell in cells},
        repeats={cell.key: repeats for cell in cells},
    )


def write_plan(folder: Path, plan: Plan) -> RunPaths:
    run = RunPaths(folder)
    run.environments.mkdir(parents=True)
    run.plan.write_text(plan.model_dump_json())
    run.environment("e1").write_text(canonical_json({"python": "3.11.2", "commit": "abc123", "variables": {"A": "1"}}))
    return run


def write_record(
    run: RunPaths,
    cell: Cell,
    repeat: int = 0,
    attempt: int = 1,
    status: Status = Status.COMPLETED,
    samples: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    measuring_pass = fields.get("measuring_pass", "timed")
    path = run.record(cell.key, measuring_pass, repeat, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = Record(
        key=cell.key,
        cell=cell,
        repeat=repeat,
        attempt=attempt,
        status=status,
        job=f"job-{measuring_pass}-{repeat}",
        position=0,
        started_at=f"2026-01-01T00:0{repeat}:00Z",
        finished_at=f"2026-01-01T00:0{repeat}:30Z",
        **{"environment": "e1", **fields},
    )
    path.write_text(record.model_dump_json())
    if samples is not None:
        np.savez(path.with_suffix(".npz"), **{name: np.asarray(values) for name, values in samples.items()})
    return path


def generated(cell: Cell, seconds: float, slow: float = 0.0) -> dict[str, Any]:
    """Two passes of so many seconds; the last rank is `slow` seconds slower. TTFT 10 ms, then 5 ms a token."""
    work, ranks = cell.workload, cell.layout.ranks
    assert isinstance(work, GenerateWorkload)
    share = (work.num_prompts or 1) // ranks
    batches = max(1, share // work.batch_size)
    samples: dict[str, Any] = {}
    for rank in range(ranks):
        late = slow if rank == ranks - 1 else 0.0
        samples[f"{rank}/pass_seconds"] = [seconds + late] * 2
        samples[f"{rank}/ttft_seconds"] = [0.010] * (2 * batches)
        samples[f"{rank}/request_seconds"] = [0.010 + 0.005 * (work.new_tokens - 1)] * (2 * batches)
        samples[f"{rank}/batch_sequences"] = [share / batches] * (2 * batches)
    return samples


def write_measurements(
    run: RunPaths, cell: Cell, seconds: list[float], peak_mib: float | None = None, **fields: Any
) -> None:
    """A completed repeat for each of `seconds`, and a memory pass."""
    for repeat, value in enumerate(seconds):
        figures = {"measurement_seconds": 2.0, "cpu_seconds": 1.5, "others_cpu_share": 0.02, **fields}
        write_record(run, cell, repeat, samples=generated(cell, value), figures=figures)
    if peak_mib is not None:
        figures = {"peak_memory_bytes": int(peak_mib * 2**20), "memory_growth_bytes": 2**20}
        write_record(run, cell, measuring_pass="memory", figures=figures)


def node_run(
    folder: Path,
    target: str,
    slowness: float,
    price: float | None = None,
    cells: tuple[int, ...] = (4, 8),
    **facts: str,
) -> RunPaths:
    """A run of cells of these batch sizes on one target: 40 tokens/s over the slowness, ten repeats."""
    made = [cell_on(target, size) for size in cells]
    prices = {target: TargetPrices(price=Price(usd_per_hour=price, source="the study file"))} if price else {}
    plan = plan_of(made, [], repeats=10).model_copy(update={"prices": prices, "study": "nodes"})
    run = write_plan(folder, plan)
    environment = {"python": "3.11.2", "commit": "abc123", "hostname": target, **facts}
    run.environment("e1").write_text(canonical_json(environment))
    for cell in made:
        write_measurements(run, cell, [slowness * value for value in TEN], peak_mib=100 * slowness)
    return run


def cell_on(target: str, batch_size: int) -> Cell:
    return generate(batch_size=batch_size).model_copy(update={"target": target})
