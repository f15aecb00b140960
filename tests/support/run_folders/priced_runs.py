"""Run folders with known rates and prices, for the tests of cost, objectives, recommendations and nodes."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from configs.common.execution import Layout
from configs.hardware.prices import Price, TargetPrices
from configs.plans.job import Job, JobEnd, Launcher, Measurement
from configs.plans.paths import RunPaths
from configs.plans.plan import CellPoint, Plan, PlannedExperiment, PlannedModel
from configs.records.record import MeasuringPass, Record, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.spec.objectives import Objectives, Purpose
from configs.targets.target import LocalTarget, Target
from configs.workloads.generate import GenerateWorkload
from configs.workloads.train import TrainWorkload
from reports.reading.load import StudyResult, load_run

TINY = PlannedModel(name="tiny", identity="folder:abc", manifest="")
LARGE = PlannedModel(name="large", identity="folder:def", manifest="")
START = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
NOISE = [100.0, 98.0, 102.0, 99.0, 101.0, 100.5, 99.5, 103.0, 97.0, 100.0]
"""Throughputs of ten repeats around 100."""
Measured = Sequence[tuple[Cell, list[float]]]


def cell(model: PlannedModel = TINY, target: str = "local", dp: int = 1, batch_size: int = 4, **work: Any) -> Cell:
    """Generates 5 tokens for each of `batch_size` prompts a rank."""
    fields = {"num_prompts": batch_size * dp, "new_tokens": 5, "batch_size": batch_size, **work}
    return Cell(model=model.identity, workload=GenerateWorkload(**fields), layout=Layout(dp=dp), target=target)


def train_cell(model: PlannedModel = TINY, target: str = "local", batch: int = 8) -> Cell:
    return Cell(model=model.identity, workload=TrainWorkload(steps=4, global_batch_size=batch), target=target)


def make_plan(
    cells: Sequence[Cell],
    repeats: int = 10,
    prices: dict[str, float | Price | TargetPrices] | None = None,
    objectives: dict[str, float] | None = None,
    purpose: Purpose | None = None,
    targets: Sequence[Target] = (LocalTarget(),),
    experiments: Sequence[PlannedExperiment] = (),
) -> Plan:
    return Plan(
        study="priced",
        models=(TINY, LARGE),
        targets=tuple(targets),
        measuring=Measuring(repeats=repeats),
        pack=True,
        experiments=tuple(experiments),
        cells={item.key: item for item in cells},
        repeats={item.key: repeats for item in cells},
        objectives=Objectives.model_validate(objectives or {}),
        purpose=purpose,
        prices={name: as_prices(price) for name, price in (prices or {}).items()},
    )


def as_prices(price: float | Price | TargetPrices) -> TargetPrices:
    if isinstance(price, TargetPrices):
        return price
    known = price if isinstance(price, Price) else Price(usd_per_hour=price, source="the study file")
    return TargetPrices(price=known)


def strong(cells: Sequence[Cell], model: PlannedModel = TINY) -> PlannedExperiment:
    points = tuple(
        CellPoint(cell=item.key, values={"ranks": item.layout.ranks}, label=f"{item.layout.ranks}", baseline=index == 0)
        for index, item in enumerate(cells)
    )
    return PlannedExperiment(name="strong", kind="strong", model=model.name, grow="dp", points=points)


def write_run(folder: Path, plan: Plan) -> RunPaths:
    run = RunPaths(folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.plan.write_text(plan.model_dump_json())
    return run


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def write_record(
    run: RunPaths,
    of: Cell,
    repeat: int = 0,
    status: Status = Status.COMPLETED,
    began: float = 0.0,
    seconds: float = 1.0,
    job: str | None = None,
    attempt: int = 1,
    measuring_pass: MeasuringPass = "timed",
    figures: dict[str, Any] | None = None,
    samples: dict[str, Any] | None = None,
    **further: Any,
) -> None:
    path = run.record(of.key, measuring_pass, repeat, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = Record(
        key=of.key,
        cell=of,
        measuring_pass=measuring_pass,
        repeat=repeat,
        attempt=attempt,
        status=status,
        job=job or f"job-{measuring_pass}-{repeat}",
        position=0,
        started_at=at(began),
        finished_at=at(began + seconds),
        figures=figures or {},
        **further,
    )
    path.write_text(record.model_dump_json())
    if samples is not None:
        np.savez(path.with_suffix(".npz"), **{name: np.asarray(values) for name, values in samples.items()})


def write_measurements(
    run: RunPaths, of: Cell, tokens_per_second: Sequence[float], passes: int = 4, **fields: Any
) -> None:
    """A completed repeat of each rate. A token takes an eighth of a request; the first takes the other half."""
    for repeat, rate in enumerate(tokens_per_second):
        write_record(run, of, repeat, samples=samples_of(of, rate, passes), **{"figures": figures_of(of), **fields})


def figures_of(of: Cell) -> dict[str, Any]:
    return {
        "measurement_seconds": 2.0,
        "cpu_seconds": 1.0,
        **({"tokens_per_step": 1024} if of.workload.kind == "train" else {}),
    }


def samples_of(of: Cell, tokens_per_second: float, passes: int) -> dict[str, Any]:
    if not isinstance(of.workload, GenerateWorkload):
        return {"0/step_seconds": [1024 / tokens_per_second] * passes}
    work, ranks = of.workload, of.layout.ranks
    seconds = (work.num_prompts or 1) * work.new_tokens / tokens_per_second
    batches = max(1, (work.num_prompts or 1) // ranks // work.batch_size)
    request = seconds / batches
    gap = request / 2 / (work.new_tokens - 1)
    samples: dict[str, Any] = {}
    for rank in range(ranks):
        samples[f"{rank}/pass_seconds"] = [seconds] * passes
        samples[f"{rank}/request_seconds"] = [request] * (passes * batches)
        samples[f"{rank}/ttft_seconds"] = [request / 2] * (passes * batches)
        samples[f"{rank}/gap_seconds"] = [gap] * (passes * batches * (work.new_tokens - 1))
        samples[f"{rank}/batch_sequences"] = [work.batch_size] * (passes * batches)
    return samples


def write_launch(run: RunPaths, name: str, of: Cell, began: float, turn: float | None, ended: float | None) -> None:
    """The files of a launch: job.json, launcher.json, and end.json where it ended."""
    paths = run.job(name)
    paths.folder.mkdir(parents=True, exist_ok=True)
    job = Job(
        name=name,
        study="priced",
        measuring_pass="timed",
        measuring=Measuring(),
        measurements=(Measurement(cell=of, repeat=0, attempt=1),),
        ranks_per_node=of.layout.ranks,
        timeout_seconds=60,
        inputs="inputs",
        cache="cache",
    )
    paths.job.write_text(job.model_dump_json())
    launcher = Launcher(
        pid=1, pid_started=1, host="h", started_at=at(began), lock_acquired_at=None if turn is None else at(turn)
    )
    paths.launcher.write_text(launcher.model_dump_json())
    if ended is not None:
        end = JobEnd(status=Status.COMPLETED, return_code=0, finished_at=at(ended))
        paths.end.write_text(end.model_dump_json().ljust(4096))


def rates(tokens_per_second: float, noise: list[float] = NOISE) -> list[float]:
    """Throughputs of repeats around this one."""
    return [tokens_per_second * factor / 100 for factor in noise]


def study_of(folder: Path, plan: Plan, measured: Measured, **fields: Any) -> StudyResult:
    """The run folder of a plan with these throughputs by repeat, read."""
    run = write_run(folder / "run", plan)
    for item, values in measured:
        write_measurements(run, item, values, **fields)
    return load_run(run)
