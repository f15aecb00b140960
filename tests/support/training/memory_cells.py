"""Peak memory of training steps on CPU ranks, exact to the byte: what the planner is held against.

    python tests/support/training/memory_cells.py cells.json measured.json [--trace FOLDER] [--estimates]

cells.json: a list of cells, each {config, strategy, precision, checkpointing, accumulation, micro_batch,
sequence_length, tp}; measured.json: for each cell {peaks: bytes of each rank, error}, and with
--estimates {accelerate, deepspeed}: what those libraries' own estimators say. One pool of ranks goes through all the
cells, each prepared by the engine's own strategies (`engine.training.trainers`) and stepped as its loop does.

Counted is every byte that torch's CPU allocator gives out, as its own memory profiler reports it: tensors, and what
operators need for themselves while they run.
"""

import argparse
import ctypes
import gc
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import configs.spec.cell
from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.training.task_types.common import the_task
from engine.training.trainer import Trainer, TrainerOptions, TrainingBatch
from engine.training.trainers import STRATEGIES
from tests.support.training.memory_models import build

RANKS = 2
TIME_LIMIT = timedelta(minutes=3)  # for what one rank waits for the other, which may have failed
STEPS = 3  # optimizer states appear in the first, DDP lays its buckets out anew in the second; the last is measured

Cell = dict[str, Any]
Step = Callable[[], None]


def count_on_every_thread() -> None:
    """Let torch's CPU allocator keep its books always, not only on threads that are being profiled.

    Else what a thread of gloo releases would be held to be alive. The flag is one of c10's, without a Python name.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


class Allocations:
    """What the CPU allocator held over time; `with` begins, `peak` ends."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, str]] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> "Allocations":
        gc.collect()
        self._profile.__enter__()
        torch.empty(1)  # an event that says how much is held already
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)

    def mark(self, name: str) -> None:
        """A phase begins."""
        self.marks.append((time.time_ns(), name))
        torch.empty(1)  # what other threads have released since the last event is said by this one

    def timeline(self) -> list[tuple[int, int, int, str]]:
        """(nanosecond, bytes held above those at the beginning, change, operator), in order of time."""
        from torch._C._profiler import _EventType

        stack = list(self._profile.profiler.kineto_results.experimental_event_tree())
        found = []
        while stack:
            event = stack.pop()
            stack.extend(event.children)
            if event.tag == _EventType.Allocation:
                size = event.extra_fields
                name = event.parent.name if event.parent else ""
                found.append((event.start_time_ns, size.total_allocated, size.alloc_size, name))
        found.sort()
        before = found[0][1] - found[0][2]
        return [(moment, held - before, change, name) for moment, held, change, name in found]

    def peak(self, mark: str) -> int:
        """The most bytes held since the last mark of that name."""
        since = max(moment for moment, name in self.marks if name == mark)
        return max(held for moment, held, _, _ in self.timeline() if moment >= since)


def training_cell(cell: Cell) -> configs.spec.cell.Cell:
    """The cell as a study would say it."""
    tp = cell["tp"]
    work = TrainWorkload(
        global_batch_size=cell["micro_batch"] * cell["accumulation"] * RANKS // tp,
        micro_batch_size=cell["micro_batch"],
        sequence_length=cell["sequence_length"],
        activation_checkpointing=cell["checkpointing"],
    )
    dtype = "float32" if cell["precision"] == "float32" else "bfloat16"
    layout = Layout(dp=RANKS // tp, tp=tp, strategy=cell["strategy"])
    return configs.spec.cell.Cell(model="m", workload=work, layout=layout, dtype=dtype)  # type: ignore[arg-type]


_KEPT: dict[str, Any] = {}  # groups and meshes, as long as the pool lives


def context_of(cell: configs.spec.cell.Cell) -> Context:
    """A launch's surroundings, without a model's files."""
    job = Job(
        name="memory",
        study="memory",
        measuring_pass="memory",
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        measuring=Measuring(group_timeout_seconds=TIME_LIMIT.total_seconds()),
        ranks_per_node=RANKS,
        timeout_seconds=600,
        inputs=".",
        cache=".",
    )
    paths, device = JobPaths(Path(tempfile.gettempdir())), torch.device("cpu")
    return Context(job, paths, dist.get_rank(), RANKS, device, None, dist.barrier, kept=_KEPT)


def engine_step(cell: Cell, memory: Allocations) -> tuple[Step, Trainer]:
    """The engine's own strategy of a cell, and a step of it."""
    model, _ = build(cell["config"])
    chosen = training_cell(cell)
    work, context = chosen.workload, context_of(chosen)
    assert isinstance(work, TrainWorkload)
    options = TrainerOptions.of(chosen)
    task = the_task(model, lambda module, inputs: module(inputs["tokens"]), {}, work, context, classes=False)
    trainer = STRATEGIES[options.strategy](task, options, context)
    share = 1 / (options.accumulation * options.dp)
    tokens = cell["micro_batch"] * cell["sequence_length"]

    def step() -> None:
        batches = [
            TrainingBatch(random_inputs(cell), share, cell["micro_batch"], tokens) for _ in range(options.accumulation)
        ]
        for number, batch in enumerate(batches):
            memory.mark("forward")
            loss = trainer.forward(batch)
            memory.mark("backward")
            trainer.backward(loss, batch, number == options.accumulation - 1)
        memory.mark("optimizer")
        trainer.step(1e-3)

    return step, trainer


def random_inputs(cell: Cell) -> dict[str, Tensor]:
    """Tokens of a micro-batch, and what should follow each."""
    vocabulary = cell["config"]["vocab_size"]
    rows = torch.randint(0, vocabulary, (cell["micro_batch"], cell["sequence_length"] + 1))
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def measure(cell: Cell, trace: Path | None = None) -> int:
    """This rank's peak in the last of a few steps, in bytes."""
    torch.manual_seed(dist.get_rank() // cell["tp"])
    with Allocations() as memory:
        step, trainer = engine_step(cell, memory)
        for _ in range(STEPS):
            memory.mark("step")
            step()
        memory.mark("end")
    if trace is not None:
        write_trace(memory, trace)
    peak = memory.peak("step")
    trainer.close()
    del step, trainer
    gc.collect()
    return peak


def write_trace(memory: Allocations, path: Path) -> None:
    """Every allocation and release of the run, with the phases between."""
    marks = list(memory.marks)
    with path.open("w") as file:
        for moment, held, change, name in memory.timeline():
            while marks and marks[0][0] <= moment:
                file.write(f"== {marks.pop(0)[1]}\n")
            file.write(f"{held:14,d} {change:+14,d} {name}\n")


def estimates(cell: Cell) -> dict[str, int | None]:
    """What `accelerate estimate-memory` prints as "Training using Adam", and DeepSpeed's of ZeRO 2 and 3, in bytes."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    with torch.device("meta"):
        model, _ = build(cell["config"])
    size, _ = calculate_maximum_sizes(model)
    kind = "float32" if cell["precision"] == "float32" else "bfloat16"
    found: dict[str, int | None] = {"accelerate": max(estimate_training_usage(size, kind).values()), "deepspeed": None}
    elements = sum(parameter.numel() for parameter in model.parameters())
    if cell["strategy"] == "zero2":
        _, found["deepspeed"] = estimate_zero2_model_states_mem_needs(elements, RANKS, cpu_offload=False)
    elif cell["strategy"] == "zero3":
        largest = max(sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules())
        _, found["deepspeed"], _ = estimate_zero3_model_states_mem_needs(
            elements, largest, RANKS, cpu_offload=False, cpu_offload_params=False
        )
    return found


def rank_main(rank: int, cells: list[Cell], store: str, output: str, traces: str | None) -> None:
    """One rank of the pool: all cells, then its results in a file of its own."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_SIZE": str(RANKS),  # DeepSpeed's shared-memory operator crashes without it
        "DS_ACCELERATOR": "cpu",
    }
    torch.set_num_threads(1)
    count_on_every_thread()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=TIME_LIMIT)
    results: list[Any] = []
    for number, cell in enumerate(cells):
        trace = Path(traces) / f"{number}-{rank}.txt" if traces else None
        try:
            results.append(measure(cell, trace))
        except Exception:
            results.append(traceback.format_exc())
        if rank == 0:
            print(f"{number + 1}/{len(cells)} {cell['strategy']} {results[-1]}", flush=True)
    Path(f"{output}.{rank}").write_text(json.dumps(results))
    dist.barrier()
    # A device mesh on gloo may abort the process at its exit.
    os._exit(0)


def main() -> None:
    """Measure all cells of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--trace", type=Path, help="folder for every allocation of every cell")
    parser.add_argument("--estimates", action="store_true", help="ask accelerate and DeepSpeed, too")
    arguments = parser.parse_args()
    cells = json.loads(arguments.cells.read_text())
    store = arguments.measured.with_suffix(".store")
    store.unlink(missing_ok=True)
    traces = str(arguments.trace) if arguments.trace else None
    ours = (cells, str(store.resolve()), str(arguments.measured), traces)
    torch.multiprocessing.spawn(rank_main, ours, nprocs=RANKS)
    parts = [Path(f"{arguments.measured}.{rank}") for rank in range(RANKS)]
    found = []
    for cell, *each in zip(cells, *(json.loads(part.read_text()) for part in parts), strict=True):
        error = next((one for one in each if isinstance(one, str)), None)
        others = estimates(cell) if arguments.estimates else {}
        found.append({"peaks": None if error else each, "error": error, **others})
    arguments.measured.write_text(json.dumps(found))
    for path in (*parts, store):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
