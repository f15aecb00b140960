"""`rankwise plan --model NAME --learn-from GLOB`: correct a model's predictions with runs on the same accelerator.

    learned, remark = learned_from("runs/*", setup_cell, architecture, accelerator, catalog)

Runs on a CPU say nothing of another machine's CPU, so they correct studies of that machine only (`rankwise plan
STUDY.yaml --learn-from GLOB`).
"""

from collections.abc import Mapping
from typing import Any

from configs.common.execution import Layout
from configs.common.printable import plural
from configs.hardware.catalog import HardwareCatalog
from configs.hardware.hardware import Accelerator, Machine
from configs.spec.cell import Cell
from configs.workloads.generate import GenerateWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.cells import Learned
from engine.planner.learning import learner_from, merged
from tasks.planning.predictions import experiences_of


def cell_of(config: dict[str, Any], training: bool) -> Cell:
    """Return the cell that a study would measure for a configuration; its layout is not checked for our engine."""
    work: TrainWorkload | GenerateWorkload
    if training:
        work = TrainWorkload(global_batch_size=config["global_batch_size"], sequence_length=config["sequence_length"])
    else:
        work = GenerateWorkload(
            prompt_tokens=config["prompt_tokens"],
            new_tokens=max(1, config["new_tokens"]),
            batch_size=config["batch_size_per_replica"],
        )
    half = config.get("mixed_precision", config.get("weights") != "float32")
    cell = Cell(model=config["model_name"], workload=work, dtype="bfloat16" if half else "float32")
    return cell.model_copy(update={"layout": Layout.model_validate(config["layout"])})


def learned_from(
    pattern: str, cell: Cell, architecture: Architecture, accelerator: Accelerator, known: HardwareCatalog
) -> tuple[Learned | None, str]:
    """Return the correction for a cell on an accelerator, None without one, and a sentence about it.

    Raises ValueError if no run folder matches.
    """
    from flows.cli.plan.planned_study import runs_matching

    if accelerator.kind == "cpu":
        remark = f"runs do not apply to {accelerator.name}; plan a study of the machine that made them"
        return None, f"no correction: {remark}"

    def alike(environment: Mapping[str, Any]) -> bool:
        try:
            return known.accelerator(str(environment.get("device"))).name == accelerator.name
        except ValueError:
            return False

    experiences = [experiences_of(run, alike) for run in runs_matching(pattern)]
    machine = Machine(name=accelerator.name, accelerator=accelerator, accelerators=8, inside=accelerator.link)
    learner = learner_from(merged(experiences), lambda _: machine)
    learned = learner(cell, architecture) if learner is not None else None
    if learned is None:
        count = sum(len(each.experiences) for each in experiences)
        verb = "is" if count == 1 else "are"
        cells = f"{plural(count, 'cell')} of these runs {verb} of {accelerator.name}"
        return None, f"no correction: {cells}, none of this workload"
    return learned, f"time x {learned.times:.2f}, from {plural(learned.records, 'record')} of {accelerator.name}"
