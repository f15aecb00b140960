"""A whole study through `slurm.launch`, without Prefect; its run folder is brought back and reported elsewhere.

    tar xzf study.tar.gz && rankwise report study

Planned, launched, collected and predicted as `rankwise run` does, by the packages below its Prefect tasks.
"""

import tarfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from configs.common.base import write_atomically
from configs.plans.packing import pack_launches
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Record, Status
from configs.spec.study import StudySpec, parse_study, study_yaml
from tasks.campaign.launches.jobs import run_job, write_job
from tasks.campaign.ledger import missing_measurements, read_ledger
from tasks.campaign.records import Collected
from tasks.planning.inputs import copy_inputs
from tasks.planning.predictions import with_predictions
from tasks.planning.study_models import planned_model
from tasks.planning.study_plan import make_plan

_ARCHIVE = "study.tar.gz"


def study_data(rehearsal: bool) -> dict[str, Any]:
    """Return the study: batches, training, and answers of a small model."""
    generate: dict[str, Any] = {"kind": "generate"}
    train: dict[str, Any] = {"kind": "train"}
    if rehearsal:
        generate |= {"num_prompts": 2, "prompt_tokens": 16, "new_tokens": 8, "batch_size": 2}
        train |= {"global_batch_size": 4, "sequence_length": 64, "steps": 6}
    else:
        generate |= {"num_prompts": 8, "prompt_tokens": 512, "new_tokens": 64, "batch_size": 8}
        train |= {"global_batch_size": 16, "sequence_length": 1024, "steps": 12}
    # Answers keep all logits of every token: few of them, as the archive has to travel.
    answers = generate | {"new_tokens": 8 if rehearsal else 16}
    few = {"repeats": 1, "min_seconds": 0.1, "memory": False} if rehearsal else {"repeats": 2, "min_seconds": 0.5}
    return {
        "study": "gpu-check",
        "models": [{"id": f"synthetic:{'llama-1m' if rehearsal else 'llama-110m'}@0"}],
        "workload": generate,
        "dtype": "bfloat16",
        "experiments": {
            "batch": {"kind": "sweep", "over": {"batch_size": [1, 2 if rehearsal else 8]}},
            "training": {"kind": "sweep", "base": {"workload": train}, "over": {"dtype": ["float32", "bfloat16"]}},
            "correctness": {"kind": "correctness", "base": {"workload": answers}, "prompts": 2, "layouts": [{}]},
        },
        "measuring": few,
    }


def run(bench: Bench) -> None:
    """Report how many measurements completed, and keep the run folder as an archive."""
    run_paths = RunPaths((bench.folder / "study").absolute())
    cache = bench.folder / "cache"
    study = parse_study(study_data(bench.rehearsal))
    plan = _planned(study, run_paths, cache)
    asked = sum(plan.repeats.values())
    records: list[Record] = []
    try:
        for measuring_pass in ("timed", "memory") if plan.measuring.memory else ("timed",):
            missing = missing_measurements(plan, read_ledger(run_paths), measuring_pass, False)
            for launch in pack_launches(missing, measuring_pass, plan.measuring.seed, plan.pack):
                if bench.seconds_left < 5:
                    bench.not_reached(f"{len(launch.measurements)} measurements", "the share of this check was spent")
                    continue
                job = write_job(launch, plan, run_paths, cache)
                collected = run_job(job, run_paths, print)
                records += collected.records
                _report(bench, collected)
    finally:
        _keep(run_paths.folder, bench.out / _ARCHIVE)
    timed = [record for record in records if record.measuring_pass == "timed"]
    done = sum(record.status is Status.COMPLETED for record in timed)
    bench.judged("measurements completed", done / asked, 1.0, "is", note=f"{done} of {asked}; {_ARCHIVE}")


def _planned(study: StudySpec, run_paths: RunPaths, cache: Path) -> Plan:
    """Return the plan, written with the study, its inputs and its predictions."""
    models = [planned_model(spec, place, cache, Path.cwd()) for place, spec in enumerate(study.models)]
    inputs = copy_inputs(study, run_paths, Path.cwd())
    plan = make_plan(study, models, inputs, run_paths.inputs, cache)
    plan = with_predictions(plan, run_paths.inputs, cache, None)
    run_paths.jobs.mkdir(parents=True, exist_ok=True)
    write_atomically(run_paths.study, study_yaml(study))
    write_atomically(run_paths.plan, plan.model_dump_json(indent=1))
    return plan


def _report(bench: Bench, collected: Collected) -> None:
    for record in collected.records:
        said = record.failure.message if record.failure else ""
        bench.seen(
            f"{record.measuring_pass}: {record.cell.label}, repeat {record.repeat}", str(record.status), note=said
        )
    if collected.start_failure:
        bench.judged(f"launch {collected.job}", collected.start_failure, "no error", "is")


def _keep(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname="study")
