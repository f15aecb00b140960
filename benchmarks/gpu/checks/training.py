"""Training step of a 1B shape in bfloat16: MFU against the peak measured just before, peak memory against prediction.

One rank, with and without activation checkpointing, compiled, then FSDP2 and ZeRO-2 over a group of one. FLOPs are the
model's (recomputation not counted). Memory is predicted before each run, from the configuration and the device's size.
"""

from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cells import measure, training_cell
from benchmarks.gpu.machines import before
from benchmarks.gpu.peaks import product_flops
from benchmarks.gpu.shapes import training_model
from configs.spec.cell import Cell
from engine.planner.cells import predict_cell
from engine.planner.families import read_architecture

_LEAST_MFU, _MOST_MEMORY_ERROR = 0.45, 0.05


def run(bench: Bench) -> None:
    """Report step time, MFU and memory by strategy."""
    peak = product_flops(bench, torch.bfloat16)
    cells = {
        "one rank": training_cell(bench),
        "one rank, compiled": training_cell(bench, compiled=True),
        "fsdp": training_cell(bench, "fsdp"),
        "one rank, full checkpointing": training_cell(bench, checkpointing="full"),
        "zero2": training_cell(bench, "zero2"),
        "fsdp, full checkpointing": training_cell(bench, "fsdp", checkpointing="full"),
        "fsdp, compiled": training_cell(bench, "fsdp", compiled=True),
    }
    for name, cell in cells.items():
        bench.attempt(name, partial(_one, bench, name, cell, peak), seconds=3.0 if bench.rehearsal else 8.0)


def _one(bench: Bench, name: str, cell: Cell, peak: float) -> None:
    config = training_model(bench)
    prediction = predict_cell(cell, read_architecture(config), before(bench))
    outcome, taken = measure(bench, cell, config)
    measured = outcome.samples["step_seconds"][int(str(outcome.figures.get("warmup_steps") or 0)) :]
    flops = outcome.figures["model_flops_per_step"]
    assert isinstance(flops, float | int)
    bench.figure(f"{name}: step", [float(one) * 1e3 for one in measured], "ms")
    shares = [float(flops) / float(one) / peak for one in measured]
    bench.figure(f"{name}: MFU", shares, bar=None if "full" in name else _LEAST_MFU)
    bench.seen(f"{name}: peak memory", None if taken is None else taken / 2**30, "GiB")
    expected = prediction.peak_memory_bytes
    if taken is None or expected is None:
        bench.not_reached(f"{name}: error of the predicted memory", prediction.reason or "no peak is known")
        return
    note = f"predicted {expected / 2**30:.3g} GiB"
    error = abs(expected / taken - 1)
    bench.figure(f"{name}: error of the predicted memory", [error], "", _MOST_MEMORY_ERROR, "at most", note)
