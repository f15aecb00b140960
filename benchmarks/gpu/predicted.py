"""The planner's predictions of what the checks measure, and their errors.

    python -m benchmarks.gpu.predicted docs/measurements/gpu/h100-2026-11-26-c       # of one run, anywhere

Before: from the catalog's data sheet. After: with the mean error of the other figures of the same kind of work removed,
shrunk for their number, as the planner learns from records (`engine.planner.learning`).
"""

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.cells import generate_cell, training_cell
from benchmarks.gpu.machines import machine_with
from benchmarks.gpu.reporting.results import CheckResult, read_results
from benchmarks.gpu.shapes import Sized, decode_sizes, large_model, prefill_lengths, training_model
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Machine
from configs.spec.cell import Cell
from engine.planner.cells import predict_cell
from engine.planner.families import read_architecture
from engine.planner.learning import LEARNING_SHRINKAGE

_TOKEN = "time_per_output_token_seconds"


@dataclass(frozen=True)
class PredictionError:
    """Predicted over measured, less 1; None and 0 where it was not measured. others: that it was learned from."""

    name: str
    before: float | None
    after: float = 0.0
    others: int = 0


@dataclass(frozen=True)
class _Subject:
    place: tuple[str, str]
    name: str
    cell: Cell
    config: dict[str, object]
    field: str


@dataclass(frozen=True)
class _Real:
    rehearsal: bool = False


def prediction_errors(results: Iterable[CheckResult], machine: Machine, bench: Sized) -> list[PredictionError]:
    """Return the error of each prediction for a machine of the catalog."""
    measured = {
        (result.check, figure.name): float(figure.value)
        for result in results
        if result.rehearsal == bench.rehearsal
        for figure in result.figures
        if isinstance(figure.value, float | int)
    }
    subjects = list(_subjects(bench))
    logs: dict[str, float] = {}  # positive: it took longer than predicted
    for subject in subjects:
        predicted = getattr(predict_cell(subject.cell, read_architecture(subject.config), machine), subject.field)
        if subject.place in measured and predicted is not None:
            logs[subject.name] = math.log(measured[subject.place] / (predicted * 1e3))
    found = []
    for subject in subjects:
        own = logs.get(subject.name)
        kind = subject.cell.workload.kind
        alike = [one.name for one in subjects if one.cell.workload.kind == kind and one.name != subject.name]
        others = [logs[name] for name in alike if name in logs]
        learned = sum(others) / (len(others) + LEARNING_SHRINKAGE)
        if own is None:
            found.append(PredictionError(subject.name, None))
        else:
            found.append(PredictionError(subject.name, math.expm1(-own), math.expm1(learned - own), len(others)))
    return found


def _subjects(bench: Sized) -> Iterator[_Subject]:
    large, small = large_model(bench), training_model(bench)
    sizes = decode_sizes(bench)
    for batch in sizes.batches:
        cell = generate_cell(batch, sizes.prompt, sizes.new_tokens)
        yield _Subject(("decode", f"batch {batch}: a token"), f"decode, batch {batch}", cell, large, _TOKEN)
    for length in prefill_lengths(bench):
        place = ("prefill", f"{length} tokens: time to the first token")
        yield _Subject(place, f"prefill, {length} tokens", generate_cell(1, length, 1), large, "ttft_seconds")
    for name, cell in (("one rank", training_cell(bench)), ("fsdp", training_cell(bench, "fsdp"))):
        yield _Subject(("training", f"{name}: step"), f"training, {name}", cell, small, "step_seconds")


def main(folders: list[str]) -> int:
    """Print the errors of one run, whose results may lie in several folders."""
    results = [result for folder in folders for result in read_results(Path(folder)).values()]
    name = next(str(one.surroundings["device"]) for one in results if one.surroundings)
    for error in prediction_errors(results, machine_with(accelerator(name)), _Real()):
        told = "not measured" if error.before is None else f"{error.before:+7.1%}, after {error.after:+7.1%}"
        print(f"{error.name:24} {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
