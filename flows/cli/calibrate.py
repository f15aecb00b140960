"""`rankwise doctor --calibrate`: measures this machine once, and `rankwise run` does where nobody did.

    rankwise doctor --calibrate [--json]

The measuring is a process of its own (`engine.calibrate`: it needs torch, this does not) that takes the machine's
turn, so that it neither disturbs a study nor is disturbed by one. The figures stay in `<cache>/calibration/`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from configs.base import write_atomically
from configs.calibration import Calibration, calibration_path, read_calibration
from configs.plan import Plan
from engine.planner.local import estimated_machine, this_fingerprint
from flows.cli.tables import print_table
from flows.folders import cache_folder

SECONDS = 15
"""What it takes on two quiet cores, about."""
_LIMIT_SECONDS = 180.0
_PATIENCE_SECONDS = 600.0
_RUN_PATIENCE_SECONDS = 30.0
_OFF = "0"

Row = tuple[str, str, str, str, str]


class CalibrationError(ValueError):
    """The machine could not be measured; the message says why."""


def calibrate_command(as_json: bool) -> int:
    """Measure, save, print. Returns the exit code."""
    try:
        calibration = calibrate_now(cache_folder(), _PATIENCE_SECONDS)
    except CalibrationError as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        print(calibration.model_dump_json(indent=1))
        return 0
    print_calibration(calibration)
    print(f"\nsaved in {calibration_path(cache_folder(), calibration.fingerprint)}")
    return 0


def calibrate_now(cache: Path, patience_seconds: float, quick: bool = False) -> Calibration:
    """Measure this machine when it is free, and keep the figures. Raises CalibrationError."""
    from slurm.turn import machine_turn

    deadline = time.monotonic() + patience_seconds
    with machine_turn(give_up=lambda: time.monotonic() > deadline) as mine:
        if not mine:
            raise CalibrationError(f"a study has been measuring here for {patience_seconds:.0f} s; try again later")
        with tempfile.TemporaryDirectory(prefix="rankwise-") as folder:
            calibration = _measured(Path(folder) / "calibration.json", quick)
    path = calibration_path(cache, calibration.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, calibration.model_dump_json(indent=1))
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}; the figures are lost") from error
    return calibration


def ensure_calibration(plan: Plan, say: Callable[[str], None]) -> None:
    """Before a run: measure this machine if nobody has, and the study has something to predict.

    What goes wrong is said and is no reason not to run. RANKWISE_CALIBRATE=0 switches it off.
    """
    local = {target.name for target in plan.targets if target.kind == "local"}
    predicted = any(cell.model is not None and cell.target in local for cell in plan.cells.values())
    if os.environ.get("RANKWISE_CALIBRATE") == _OFF or not predicted:
        return
    cache = cache_folder()
    if read_calibration(calibration_path(cache, this_fingerprint())) is not None:
        return
    say(f"measuring this machine once, about {SECONDS} s (rankwise doctor --calibrate repeats it)")
    try:
        calibration = calibrate_now(cache, _RUN_PATIENCE_SECONDS)
    except CalibrationError as error:
        say(f"warning: this machine was not measured, predictions will be rough: {error}")
        return
    if calibration.disturbed:
        say(f"warning: {_disturbance(calibration)}")


def _measured(target: Path, quick: bool) -> Calibration:
    command = [sys.executable, "-m", "engine.calibrate", str(target), *["--quick"] * quick]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # a folder named `engine` where the user stands is not ours
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CalibrationError(f"measuring took more than {_LIMIT_SECONDS:.0f} s and was ended") from error
    calibration = read_calibration(target) if done.returncode == 0 else None
    if calibration is None:
        said = done.stderr.strip().splitlines()
        raise CalibrationError(f"measuring failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return calibration


def print_calibration(calibration: Calibration) -> None:
    """What was measured, beside what the CPU's flags suggest."""
    print(f"{calibration.fingerprint}: one core, alone and with {calibration.ranks} busy")
    title: Row = ("", "alone", "range", "all busy", "from CPU flags")
    print_table(title, _rows(calibration))
    for link in calibration.links:
        print(
            f"sum over {link.ranks} ranks (gloo): {link.latency_seconds * 1e3:.2f} ms a hop, then "
            f"{link.bytes_per_second / 1e9:.2f} GB/s; that line misses the median size by {link.error:.0%}"
        )
    print(
        f"a process without its model: {calibration.framework_bytes / 2**20:.0f} MiB, "
        f"{calibration.training_framework_bytes / 2**20:.0f} MiB where it trains"
    )
    print(f"took {calibration.took_seconds:.0f} s")
    if calibration.disturbed:
        print(f"warning: {_disturbance(calibration)}")


def _disturbance(calibration: Calibration) -> str:
    return (
        f"others took {calibration.others_cpu_share:.0%} of the CPU meanwhile, so the figures are too slow; "
        "repeat `rankwise doctor --calibrate` when the machine is quiet"
    )


def _rows(calibration: Calibration) -> list[Row]:
    estimate = estimated_machine(calibration.fingerprint).accelerator
    rows = []
    for number, rate in (("float32", estimate.flops("float32")), ("bfloat16", estimate.flops("bfloat16"))):
        rows.append(_row(calibration, f"{number} product, GFLOP/s", f"square/{number}", 1e-9, rate))
        rows.append(_row(calibration, f"{number} training, GFLOP/s", f"training/{number}", 1e-9))
    rows.append(_row(calibration, "memory read, GB/s", "read", 1e-9, estimate.bytes_per_second))
    for number, size in (("float32", 4), ("bfloat16", 2)):
        title = f"{number} weights read for one row, GB/s"
        rows.append(_row(calibration, title, f"linear/{number}/cold/1", size * 1e-9))
    rows.append(_row(calibration, "one operator, us", "operator", 1e6, estimate.kernel_seconds, inverse=False))
    rows.append(_row(calibration, "one layer of one token at least, us", "layer", 1e6, inverse=False))
    title = "one layer of a recorded decode step at least, us"
    rows.append(_row(calibration, title, "recorded_layer", 1e6, inverse=False))
    return rows


def _row(
    calibration: Calibration,
    title: str,
    name: str,
    scale: float,
    estimate: float | None = None,
    inverse: bool = True,
) -> Row:
    """Seconds as they are, or as a rate; the estimate is in the unit of the rate before scaling."""
    figure = calibration.figures[name]

    def shown(seconds: float) -> str:
        value = scale / seconds if inverse else scale * seconds
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"

    spread = sorted((figure.alone.low, figure.alone.high), reverse=inverse)
    together = shown(figure.together.median) if figure.together else "-"
    suggested = "" if estimate is None else shown(1 / estimate if inverse else estimate)
    return title, shown(figure.alone.median), " to ".join(map(shown, spread)), together, suggested
