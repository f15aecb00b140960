"""Plans of one cell, and the runs that measured them, without measuring."""

import json
from pathlib import Path
from typing import Any

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget
from configs.workloads.generate import GenerateWorkload
from configs.workloads.noop import NoopWorkload
from engine.planner.local import this_fingerprint
from tests.support.run_folders.priced_runs import write_measurements, write_run

NAME = "synthetic:llama-1m@0"


def plan_of(kind: str, model: PlannedModel | None = None, **work: Any) -> Plan:
    """One cell of a kind of work."""
    known = model or PlannedModel(name="llama-1m", identity=NAME, manifest="")
    if kind == "noop":
        cell = Cell(workload=NoopWorkload(**{"seconds": 0.5} | work))
    else:
        fields = {"batch_size": 2, "num_prompts": 2, "new_tokens": 5} | work
        cell = Cell(model=known.identity, workload=GenerateWorkload(**fields))
    return Plan(
        study="s",
        models=(known,),
        targets=(LocalTarget(),),
        measuring=Measuring(repeats=3),
        pack=True,
        experiments=(),
        cells={cell.key: cell},
        repeats={cell.key: 3},
    )


def measured_run(folder: Path, plan: Plan, rate: float, share: float = 0.0, **environment: Any) -> RunPaths:
    """A run of a plan whose measurements reached a rate on this hardware."""
    run = write_run(folder, plan)
    here = this_fingerprint()
    facts = {"cpu_model": here.cpu_model, "cores": here.cores, "torch": here.torch, "device": "cpu"} | environment
    run.environments.mkdir()
    run.environment("e1").write_text(json.dumps(facts))
    (cell,) = plan.cells.values()
    write_measurements(run, cell, [rate] * 3, figures={"others_cpu_share": share})
    for path in run.records.glob("*/*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"environment": "e1"}))
    return run
