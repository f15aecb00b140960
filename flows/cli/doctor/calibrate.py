"""`rankwise doctor --calibrate`: calibrate this machine; `rankwise run` does it once on first use.

    rankwise doctor --calibrate [--json]

A separate process measures (`engine.tools.calibrate`, which needs torch) while holding the machine lock, so a
calibration and a study never disturb each other. The figures are saved in `<cache>/calibration/`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.printable import significant
from configs.hardware.calibration import Calibration, calibration_path, read_calibration
from configs.plans.plan import Plan
from configs.targets.target import LocalTarget
from engine.planner.local import estimated_machine, this_fingerprint
from flows.cli.tables import print_table
from flows.folders import cache_folder

SECONDS = 15
"""Approximate duration on two idle cores."""
_LIMIT_SECONDS = 420.0
_PATIENCE_SECONDS = 600.0
_RUN_PATIENCE_SECONDS = 30.0
_OFF = "0"

CalibrationRow = tuple[str, str, str, str, str]


class CalibrationError(ValueError):
    """The machine could not be calibrated; the message has the reason."""


def calibrate_command(as_json: bool) -> int:
    """Measure, save and print. Returns the exit code."""
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


def calibrate_now(cache: Path, patience_seconds: float, quick: bool = False, again: bool = True) -> Calibration:
    """Measure this machine once its lock is free and save the figures. Raises CalibrationError.

    again: also where another process has calibrated it, perhaps while this one waited.
    """
    from slurm.launcher.machine_lock import launch_lock, machine_holder

    deadline = time.monotonic() + patience_seconds
    with launch_lock(give_up=lambda: time.monotonic() > deadline) as mine:
        if not again and (known := read_calibration(calibration_path(cache, this_fingerprint()))) is not None:
            return known
        if not mine:
            raise CalibrationError(
                f"machine lock: held for {patience_seconds:.0f} s by {machine_holder()}. Try again later"
            )
        with tempfile.TemporaryDirectory(prefix="rankwise-") as folder:
            calibration = _measured(Path(folder) / "calibration.json", quick)
        # Before the next one has the lock, who looks whether it is there.
        path = calibration_path(cache, calibration.fingerprint)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, calibration.model_dump_json(indent=1))
        except OSError as error:
            raise CalibrationError(f"{path}: {error.strerror or error}; figures not saved") from error
    return calibration


def ensure_calibration(plan: Plan, say: Callable[[str], None]) -> bool:
    """Calibrate this machine before a run if it has no calibration and the study has cells to predict.

    Failures are printed as a warning and do not stop the run. RANKWISE_CALIBRATE=0 disables it.
    """
    local = {target.name for target in plan.targets if isinstance(target, LocalTarget)}
    predicted = any(cell.model is not None and cell.target in local for cell in plan.cells.values())
    if os.environ.get("RANKWISE_CALIBRATE") == _OFF or not predicted:
        return False
    cache = cache_folder()
    if read_calibration(calibration_path(cache, this_fingerprint())) is not None:
        return False
    say(
        f"calibrating this machine, about {SECONDS} s, a minute where bfloat16 is emulated "
        "(once; repeat with `rankwise doctor --calibrate`)"
    )
    try:
        calibration = calibrate_now(cache, _RUN_PATIENCE_SECONDS, again=False)
    except CalibrationError as error:
        say(f"warning: machine not calibrated, so predictions are rough: {error}")
        return False
    if calibration.disturbed:
        say(f"warning: {_disturbance(calibration)}")
    return True


def _measured(target: Path, quick: bool) -> Calibration:
    command = [sys.executable, "-m", "engine.tools.calibrate", str(target), *["--quick"] * quick]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # do not import a folder named `engine` in the working directory
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CalibrationError(f"calibration: time-out after {_LIMIT_SECONDS:.0f} s") from error
    calibration = read_calibration(target) if done.returncode == 0 else None
    if calibration is None:
        said = done.stderr.strip().splitlines()
        raise CalibrationError(f"calibration failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return calibration


def print_calibration(calibration: Calibration) -> None:
    """Print the measured figures beside the estimates from the CPU's flags."""
    print(f"{calibration.fingerprint}: one core, alone and with {calibration.ranks} busy")
    title: CalibrationRow = ("", "alone", "range", "all busy", "from CPU flags")
    print_table(title, _rows(calibration))
    for link in calibration.links:
        loop, rate = (
            _microseconds(link.seconds[min(link.seconds)]),
            f"{significant(link.bytes_per_second / 1e9, 2)} GB/s",
        )
        print(
            f"sum over {link.ranks} ranks ({link.transport}): {loop} in a tight loop, "
            f"{_microseconds(link.sum_seconds)} after work; large ones {rate}; "
            f"a message after work: {_microseconds(link.message_seconds)}"
        )
    print(
        f"memory of a process without its model: {calibration.framework_bytes / 2**20:.0f} MiB, "
        f"{calibration.training_framework_bytes / 2**20:.0f} MiB in training"
    )
    print(f"took {calibration.took_seconds:.0f} s")
    if calibration.disturbed:
        print(f"warning: {_disturbance(calibration)}")


def _disturbance(calibration: Calibration) -> str:
    return (
        f"other processes used {calibration.others_cpu_share:.0%} of the CPU, so the figures are too slow; "
        "repeat `rankwise doctor --calibrate` when the machine is idle"
    )


def _rows(calibration: Calibration) -> list[CalibrationRow]:
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
) -> CalibrationRow:
    """Return a table row of seconds, or of a rate; the estimate is in the unit of the rate before scaling."""
    figure = calibration.figures[name]

    def shown(seconds: float) -> str:
        value = scale / seconds if inverse else scale * seconds
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"

    spread = sorted((figure.alone.low, figure.alone.high), reverse=inverse)
    together = shown(figure.together.median) if figure.together else "-"
    suggested = "" if estimate is None else shown(1 / estimate if inverse else estimate)
    return title, shown(figure.alone.median), " to ".join(map(shown, spread)), together, suggested


def _microseconds(seconds: float) -> str:
    return f"{significant(seconds * 1e6)} us"
