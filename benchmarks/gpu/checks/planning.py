"""The planner against the figures of the other checks: from the catalog's data sheet, and once it has learned.

`benchmarks.gpu.predicted` says what before and after are. Read are the results in the same folder; what is missing
there is not reached here. At the end the host is calibrated as by `rankwise doctor --calibrate`.
"""

import subprocess
import sys
from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.machines import before
from benchmarks.gpu.peaks import copy_bytes_per_second, product_flops
from benchmarks.gpu.predicted import prediction_errors
from benchmarks.gpu.reporting.results import read_results
from configs.hardware.calibration import Calibration

_MOST_ERROR = 0.10
_CALIBRATION = "calibration of the host"
_CALIBRATION_SECONDS = 15.0
_END_SECONDS = 3.0


def run(bench: Bench) -> None:
    """Report the error of each prediction before and after."""
    copied, product = copy_bytes_per_second(bench), product_flops(bench, torch.bfloat16)
    bench.seen("bandwidth of a copy, of the data sheet's", copied / before(bench).accelerator.bytes_per_second)
    bench.seen("FLOP/s of a product, of the data sheet's", product / before(bench).accelerator.peak_flops["bfloat16"])
    _kernel_seconds(bench)
    for error in prediction_errors(read_results(bench.out).values(), before(bench), bench):
        title = f"{error.name}, before: error"
        if error.before is None:
            bench.not_reached(title, "not measured, or not predicted")
            continue
        bench.seen(title, error.before, note="predicted over measured, less 1")
        after, note = abs(error.after), f"from {error.others} others"
        bench.figure(f"{error.name}, after: error", [after], "", _MOST_ERROR, "at most", note)
    # Last, because it takes a quarter of a minute, and more on a busy machine; the device's rates do not need it.
    bench.attempt(_CALIBRATION, partial(_calibrate, bench), seconds=_CALIBRATION_SECONDS)


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
