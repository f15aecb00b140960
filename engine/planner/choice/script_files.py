"""Configuration files that the planner writes for a cell of a script, for DeepSpeed, Accelerate, the Trainer, torch.

    planned_contents(work, layout, dtype="bfloat16", nodes=2, on_cpu=False)     # {"deepspeed.json": {...}}

They are those of `rankwise plan --output FOLDER`: what is predicted and what is measured are set up alike.
"""

from typing import Any

from configs.common.execution import Layout
from configs.workloads.script import ScriptWorkload
from configs.workloads.train import TrainWorkload
from engine.planner.choice.launchers import FILE_MAKERS, LaunchedTraining


def planned_contents(
    work: ScriptWorkload, layout: Layout, dtype: str, nodes: int, on_cpu: bool
) -> dict[str, dict[str, Any]]:
    """Return name -> content. Raises ValueError naming the file that cannot express the cell."""
    if not work.planned_files:
        return {}
    step = LaunchedTraining(
        layout=layout,
        micro_batch=work.micro_batch_size,
        accumulation=work.accumulation_steps or 1,
        sequence_length=work.sequence_length,
        sixteen_bit=None if dtype == "float32" else dtype,
        checkpointing=work.activation_checkpointing or "none",
        on_cpu=on_cpu,
        nodes=nodes,
        deepspeed_file=work.planned_name("deepspeed") or "deepspeed.json",
    )
    found = {}
    for name, kind in work.planned_files.items():
        try:
            found[name] = FILE_MAKERS[kind](step, TrainWorkload())
        except ValueError as error:
            raise ValueError(f"workload.planned_files.{name}: {error}") from error
    return found
