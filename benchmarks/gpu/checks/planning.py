"""The planner against the figures of the other checks: with the catalog's data sheet, and with rates measured here.

Before: the machine as `rankwise plan` takes it from the catalog. After: the same with the bandwidth of a plain copy,
the FLOP/s of a matrix product and the time of an empty kernel, measured by this check; and the host calibrated as by
`rankwise doctor --calibrate`. Read are the results in the same folder; what is missing there is not reached here.
"""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cells import generate_cell, training_cell
from benchmarks.gpu.machines import after, before
from benchmarks.gpu.peaks import copy_bytes_per_second, product_flops
from benchmarks.gpu.reporting.results import read_results
from benchmarks.gpu.shapes import decode_sizes, large_model, prefill_lengths, training_model
from configs.hardware.calibration import Calibration
from configs.hardware.hardware import Machine
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from engine.planner.cells import predict_cell
from engine.planner.families import read_architecture

_MOST_ERROR = 0.10
_CALIBRATION = "calibration of the host"
_CALIBRATION_SECONDS = 15.0
_END_SECONDS = 3.0


def run(bench: Bench) -> None:
    """Report the error of each prediction before and after."""
    copied, product = copy_bytes_per_second(bench), product_flops(bench, torch.bfloat16)
    machines = {"before": before(bench), "after": after(bench, copied, product, _kernel_seconds(bench))}
    measured = {
        (result.check, figure.name): figure.value
        for result in read_results(bench.out).values()
        if result.rehearsal == bench.rehearsal
        for figure in result.figures
        if isinstance(figure.value, float | int)
    }
    for place, name, cell, config, field in _subjects(bench):
        value = measured.get(place)
        for when, machine in machines.items():
            bar = _MOST_ERROR if when == "after" else None
            title = f"{name}, {when}: error"
            predicted = getattr(_predicted(cell, config, machine), field)
            if value is None or predicted is None:
                bench.not_reached(title, "not measured" if value is None else "not predicted", bar, "at most")
                continue
            note = f"predicted {predicted * 1e3:.3g} ms, measured {value:.3g} ms"
            bench.figure(title, [abs(predicted * 1e3 / float(value) - 1)], "", bar, "at most", note)
    # Last, because it takes a quarter of a minute, and more on a busy machine; the device's rates do not need it.
    bench.attempt(_CALIBRATION, partial(_calibrate, bench), seconds=_CALIBRATION_SECONDS)


def _subjects(bench: Bench) -> Iterator[tuple[tuple[str, str], str, Cell, dict[str, object], str]]:
    """Yield check and figure, name, cell, model, and the field of the prediction."""
    large, small = large_model(bench), training_model(bench)
    sizes = decode_sizes(bench)
    for batch in sizes.batches:
        cell = generate_cell(batch, sizes.prompt, sizes.new_tokens)
        yield ("decode", f"batch {batch}: a token"), f"decode, batch {batch}", cell, large, _TOKEN
    for length in prefill_lengths(bench):
        figure = f"{length} tokens: time to the first token"
        yield ("prefill", figure), f"prefill, {length} tokens", generate_cell(1, length, 1), large, "ttft_seconds"
    for name, cell in (("one rank", training_cell(bench)), ("fsdp", training_cell(bench, "fsdp"))):
        yield ("training", f"{name}: step"), f"training, {name}", cell, small, "step_seconds"


_TOKEN = "time_per_output_token_seconds"


def _predicted(cell: Cell, config: dict[str, object], machine: Machine) -> Prediction:
    return predict_cell(cell, read_architecture(config), machine)


def _calibrate(bench: Bench) -> None:
    """Calibrate as `rankwise doctor` does, in a process of its own that this check does not outlive."""
    file = bench.folder / "calibration.json"
    command = [sys.executable, "-m", "engine.tools.calibrate", str(file), *["--quick"] * bench.rehearsal]
    limit = bench.seconds_left - _END_SECONDS
    try:
        subprocess.run(command, check=True, timeout=limit)
    except subprocess.TimeoutExpired:
        bench.not_reached(_CALIBRATION, f"it took more than the {limit:.0f} s that were left")
        return
    found = Calibration.model_validate_json(file.read_bytes())
    bench.seen(_CALIBRATION, found.took_seconds, "s", note=f"{found.ranks} ranks on CPU cores")


def _kernel_seconds(bench: Bench) -> float:
    """Return the least time of an operator: of adding to one number."""
    number = torch.zeros(1, device=bench.device)
    timed = bench.clock.seconds(lambda: number.add_(1.0), limit_seconds=1.0)
    bench.figure("an empty operator", [one * 1e6 for one in timed.samples], "us")
    return timed.median
