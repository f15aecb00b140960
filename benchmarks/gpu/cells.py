"""Cells of the checks, as a study has them, and one measurement of a cell in this process.

cell = training_cell("fsdp", checkpointing="full")
outcome, peak_bytes = measure(bench, cell, config, work=training_job(...))
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.shapes import Sized
from configs.common.execution import Layout, Strategy
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import MeasuringPass
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from configs.workloads.train import ActivationCheckpointing, TrainWorkload
from engine.context import Context, RankResult
from engine.rank.host_usage import peak_memory_bytes, reset_peak_memory
from engine.worker import load_workload

IDENTITY = "synthetic:gpu-check@0"


def generate_cell(batch: int, prompt: int, new_tokens: int) -> Cell:
    """Return greedy decoding in bfloat16 on one rank."""
    work = GenerateWorkload(num_prompts=batch, prompt_tokens=prompt, new_tokens=new_tokens, batch_size=batch)
    return Cell(model=IDENTITY, workload=work, layout=Layout(), dtype="bfloat16")


def training_cell(
    bench: Sized,
    strategy: Strategy = "none",
    checkpointing: ActivationCheckpointing = "none",
    compiled: bool = False,
) -> Cell:
    """Return training in bfloat16 on one rank: 4 sequences of 2048 tokens a step."""
    batch, length, steps = (2, 32, 4) if bench.rehearsal else (4, 2048, 13)
    work = TrainWorkload(
        global_batch_size=batch,
        sequence_length=length,
        steps=steps,
        activation_checkpointing=checkpointing,
        compiled=compiled,
    )
    return Cell(model=IDENTITY, workload=work, layout=Layout(strategy=strategy), dtype="bfloat16")


def measure(
    bench: Bench, cell: Cell, config: dict[str, Any], measuring_pass: MeasuringPass = "timed"
) -> tuple[RankResult, int | None]:
    """Measure a cell in this process, as `engine.worker` does; return its outcome and the peak memory of the device.

    On a GPU the peak is the allocator's, on a CPU the process's (None where the kernel does not tell).
    """
    context = context_of(bench, cell, config, measuring_pass)
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    reset_peak_memory()
    outcome = load_workload(cell)(context.job.measurements[0], context)
    return outcome, torch.cuda.max_memory_allocated(bench.device) if on_gpu else peak_memory_bytes()


def context_of(bench: Bench, cell: Cell, config: dict[str, Any], measuring_pass: MeasuringPass) -> Context:
    """Return one rank's context for a cell, with a job folder in the check's own."""
    folder = Path(bench.folder) / cell.key
    paths = JobPaths(folder)
    paths.parts.mkdir(parents=True, exist_ok=True)
    job = Job(
        name="gpu-check",
        study="gpu-check",
        measuring_pass=measuring_pass,
        measuring=Measuring(warmup=3 if not bench.rehearsal else 1, min_seconds=0.0),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=1,
        timeout_seconds=600,
        inputs=str(folder / "inputs"),
        cache=str(bench.folder / "cache"),
    )
    manifest = ModelManifest(identity=IDENTITY, source="synthetic", folder="", files={}, config=config)
    return Context(job, paths, 0, 1, bench.device, manifest, lambda: None)
