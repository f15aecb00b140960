"""How well the planner predicts peak memory of training: 160 measured cells, and rows that others published.

    python -m benchmarks.planner.memory [docs/measurements/published] [--shapes all] [--tp 2] [--output FILE.csv]

Four model shapes x five strategies x checkpointing x accumulation are trained on two CPU ranks by the engine's own
strategies (tests/support/training/memory_cells.py, a few minutes), every byte of torch's allocator counted. Printed
beside the planner: what `accelerate estimate-memory` and DeepSpeed's own estimators say of the same cells. The
planner's formulas were worked out against the `worked` shapes; the `heldout` ones were measured afterwards.
"""

import argparse
import csv
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

from configs.common.execution import Layout, Strategy
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.check.memory import predict
from engine.planner.check.table import read_published_rows
from engine.planner.families import read_architecture
from engine.planner.memory.framework import of_engine
from engine.planner.memory.training import training_memory
from engine.planner.setup import TrainingSetup
from engine.planner.trained_cells import as_split

RANKS = 2
FILE = "training_memory.csv"
PUBLISHED = Path("docs/measurements/published")
SCRIPT = Path(__file__).parents[2] / "tests" / "support" / "training" / "memory_cells.py"
OUTPUT = Path("docs/measurements/planner_memory.csv")
STRATEGIES = tuple(strategy for strategy in get_args(Strategy) if strategy != "none")

Cell = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A config.json, what it is trained in (16: bfloat16), and the micro-batch."""

    config: dict[str, Any]
    bits: int
    micro_batch: int
    sequence_length: int


def _llama(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _gpt(vocabulary: int, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": vocabulary, "n_embd": hidden, "n_layer": layers, "n_head": heads,
        "n_positions": 512,
    }  # fmt: skip


SHAPES = {
    "worked": {
        "llama-a": Shape(_llama(4096, 256, 704, 4, 8, 8, False), 32, 2, 256),
        "llama-b": Shape(_llama(2048, 384, 1024, 6, 6, 2, False), 16, 2, 256),
        "gpt-c": Shape(_gpt(2048, 256, 4, 4), 32, 4, 256),
        "llama-d": Shape(_llama(8192, 256, 768, 2, 4, 4, True), 16, 4, 128),
    },
    "heldout": {
        "llama-e": Shape(_llama(1024, 320, 640, 5, 5, 1, False), 32, 3, 192),
        "llama-f": Shape(_llama(6144, 192, 512, 3, 6, 3, True), 32, 6, 128),
        "gpt-g": Shape(_gpt(3072, 384, 3, 6), 16, 2, 384),
        "llama-h": Shape(_llama(1536, 512, 1536, 3, 8, 4, False), 16, 1, 512),
    },
}


@dataclass(frozen=True)
class Result:
    """A cell as it was measured, ours and the others' predictions of it; bytes."""

    cell: Cell
    measured: int
    ours: int
    accelerate: int | None
    deepspeed: int | None

    @property
    def error(self) -> float:
        """Ours over measured, less 1: below 0 is the dangerous side."""
        return self.ours / self.measured - 1


def cells(shapes: dict[str, Shape], tp: int = 1) -> list[Cell]:
    """All strategies, with and without checkpointing and accumulation, of all shapes that `tp` ranks can share."""
    found = []
    for (name, shape), strategy, checkpointing, accumulation in itertools.product(
        shapes.items(), STRATEGIES, ("none", "full"), (1, 3)
    ):
        if tp > 1 and (strategy == "ddp" or shape.config.get("num_key_value_heads", 1) % tp):
            continue  # DDP of one replica is none
        # DDP keeps float32 weights and casts; FSDP2 and DeepSpeed compute with 16-bit weights.
        mixed = "bfloat16_autocast" if strategy == "ddp" else "bfloat16_mixed"
        found.append(
            {
                "shape": name, "config": shape.config, "tp": tp, "strategy": strategy, "checkpointing": checkpointing,
                "accumulation": accumulation, "precision": "float32" if shape.bits == 32 else mixed,
                "micro_batch": shape.micro_batch, "sequence_length": shape.sequence_length,
            }
        )  # fmt: skip
    return found


def predicted(cell: Cell) -> int:
    """The planner's peak of tensors, in bytes."""
    cpu = Accelerator(
        name="cpu-rank", title="", kind="cpu", memory_bytes=2**34, bytes_per_second=1e10, peak_flops={"float32": 1e11},
        source="only the kind is used",
    )  # fmt: skip
    tp = cell["tp"]
    layout = Layout(dp=RANKS // tp, tp=tp, strategy=cell["strategy"])
    architecture = as_split(read_architecture(cell["config"]), layout)
    setup = TrainingSetup(
        architecture, Machine(name="cpu", accelerator=cpu, accelerators=RANKS), layout, cell["micro_batch"],
        cell["sequence_length"], cell["accumulation"], cell["precision"], cell["checkpointing"], deferred=True,
        wide_reduction=True,
    )  # fmt: skip
    return training_memory(setup, of_engine(architecture.parameters)).tensors


_START_SECONDS, _CELL_SECONDS = 300.0, 60.0
"""A campaign that takes longer hangs; on two idle cores a cell takes three seconds."""


def campaign(chosen: Sequence[Cell], others: bool = True) -> list[Result]:
    """Measure cells on two ranks; `others`: and ask the other estimators. Raises RuntimeError where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "cells.json", Path(folder) / "measured.json"
        asked.write_text(json.dumps(list(chosen)))
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(asked), str(answered), *(["--estimates"] if others else [])],
            capture_output=True, text=True, check=False, timeout=_START_SECONDS + _CELL_SECONDS * len(chosen),
        )  # fmt: skip
        if done.returncode or not answered.is_file():
            raise RuntimeError(f"{SCRIPT.name} failed:\n{done.stderr[-3000:]}")
        answers = json.loads(answered.read_text())
    for cell, answer in zip(chosen, answers, strict=True):
        if answer["error"]:
            raise RuntimeError(f"{cell['shape']} {cell['strategy']}: {answer['error']}")
    return [
        Result(cell, max(answer["peaks"]), predicted(cell), answer.get("accelerate"), answer.get("deepspeed"))
        for cell, answer in zip(chosen, answers, strict=True)
    ]


def write_csv(results: Sequence[Result], path: Path) -> None:
    """One row a cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("shape", "tp", "strategy", "precision", "checkpointing", "accumulation", "micro_batch", "sequence_length",
             "measured_bytes", "planner_bytes", "planner_error", "accelerate_bytes", "deepspeed_bytes")
        )  # fmt: skip
        for result in results:
            named = [result.cell[name] for name in (
                "shape", "tp", "strategy", "precision", "checkpointing", "accumulation", "micro_batch",
                "sequence_length",
            )]  # fmt: skip
            others = ["" if size is None else size for size in (result.accelerate, result.deepspeed)]
            writer.writerow([*named, result.measured, result.ours, f"{result.error:+.4f}", *others])


def print_cells(results: Sequence[Result]) -> None:
    """The table of cells, and each predictor's errors."""
    print(f"Peak of a training step on {RANKS} CPU ranks, MiB of the fullest rank; error in % of the measured")
    print(
        f"{'shape':8} {'strategy':8} {'checkpoint':10} {'accumulate':>10} {'measured':>9} {'planner':>15} "
        f"{'accelerate':>15} {'DeepSpeed':>15}"
    )
    for result in results:
        cell = result.cell
        line = f"{cell['shape']:8} {cell['strategy']:8} {cell['checkpointing']:10} {cell['accumulation']:10} "
        line += f"{result.measured / 2**20:9.1f}"
        for size in (result.ours, result.accelerate, result.deepspeed):
            off = 0.0 if size is None else (size / result.measured - 1) * 100
            line += f" {'-':>15}" if size is None else f" {size / 2**20:8.1f} {off:+6.1f}"
        print(line)
    for name, found in (
        ("planner", [result.error for result in results]),
        ("accelerate estimate-memory", [r.accelerate / r.measured - 1 for r in results if r.accelerate is not None]),
        ("DeepSpeed's estimators", [r.deepspeed / r.measured - 1 for r in results if r.deepspeed is not None]),
    ):
        if found:
            sizes = [abs(error) * 100 for error in found]
            print(
                f"{name}: {len(found)} cells, median {median(sizes):.2f} %, worst {max(sizes):.1f} %, "
                f"most under {-min(0.0, *found) * 100:.1f} %"
            )


def print_published(published: Path) -> None:
    """Rows of the file in a folder, and the planner's errors."""
    rows, kind, _ = read_published_rows(published / FILE)
    blind = [{name: value for name, value in row.items() if name not in kind.measured} for row in rows]
    print("\nGiB reserved at the peak, measured by others; no constant was fitted on them")
    for row, prediction in zip(rows, predict(blind, []), strict=True):
        measured = float(row[kind.measured[0]])
        line = f"{row['model']:14} {row['num_gpus']:>4} GPUs {row['parallelism']:12} {measured:6.1f}"
        if prediction.predicted is None:
            print(f"{line}  - ({prediction.reason})")
        else:
            print(f"{line} {prediction.predicted:6.1f} {(prediction.predicted / measured - 1) * 100:+5.1f} %")


def main(published: Path, shapes: str = "worked", tp: int = 1, output: Path | None = None) -> None:
    """Measure, print both tables, keep the first. `shapes`: a key of SHAPES, or all."""
    results: list[Result] = []
    for name in SHAPES if shapes == "all" else (shapes,):
        found = campaign(cells(SHAPES[name], tp))
        print_cells(found)
        results += found
    if output is not None:
        write_csv(results, output)
        print(f"kept in {output}")
    if (published / FILE).is_file():
        print_published(published)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path, nargs="?", default=PUBLISHED, help="folder of published rows")
    parser.add_argument("--shapes", choices=[*SHAPES, "all"], default="worked")
    parser.add_argument("--tp", type=int, choices=(1, RANKS), default=1, help="the ranks: replicas, or shards of one")
    parser.add_argument("--output", type=Path, help=f"CSV to keep the cells in, such as {OUTPUT}")
    arguments = parser.parse_args()
    main(arguments.published, arguments.shapes, arguments.tp, arguments.output)
