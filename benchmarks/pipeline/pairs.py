"""A study run by two checkouts in turn: wall time, phases, and whether the repeats are as independent as before.

    compare(Path("../before"), Path("configs/studies/quickstart.yaml"), pairs=5, runs=Path("/tmp/pairs"))

Each checkout runs its own file of the study with its own interpreter (`.venv/bin/rankwise`). Pairs alternate in their
order, so that drift of the machine and its load hits both alike.
"""

import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipeline.phases import Cell, Phases, cells_of, phases_of, print_phases
from reports.numbers.statistics import Estimate, estimate

SIDES = ("before", "after")


@dataclass(frozen=True)
class Run:
    """One run of the study by one checkout."""

    wall_seconds: float
    phases: Phases
    cells: dict[str, Cell]


def compare(before: Path, after: Path, study: Path, pairs: int, runs: Path, ready: Callable[[], None]) -> None:
    """Run the pairs and print. study: relative to a checkout; ready: called before each run. Raises RuntimeError."""
    checkouts = {"before": before, "after": after}
    found: dict[str, list[Run]] = {side: [] for side in SIDES}
    for pair in range(pairs):
        for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
            ready()
            run = _run(checkouts[side], study, runs / f"{side}-{pair}")
            found[side].append(run)
            print(f"pair {pair}  {side:<6} {run.wall_seconds:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    print_comparison(found["before"], found["after"])


def _run(checkout: Path, study: Path, runs: Path) -> Run:
    runs.mkdir(parents=True)
    command = [str(checkout.absolute() / ".venv" / "bin" / "rankwise"), "run", str(study)]
    command += ["--runs", str(runs.absolute()), "--no-calibrate"]
    log = runs / "run.log"
    began = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(command, cwd=checkout, stdout=output, stderr=subprocess.STDOUT).returncode
    wall = time.monotonic() - began
    folders = [path.parent for path in runs.glob("*/plan.json")]
    if code != 0 or len(folders) != 1:
        raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{log.read_text()}")
    return Run(wall, phases_of(folders[0], wall), cells_of(folders[0]))


def print_comparison(before: Sequence[Run], after: Sequence[Run]) -> None:
    """Medians and intervals, phases, and each cell's median and variance between launches."""
    print()
    for side, runs in zip(SIDES, (before, after), strict=True):
        print(f"{side:<7} wall {_text(estimate(run.wall_seconds for run in runs))} s")
    walls = [late.wall_seconds / early.wall_seconds for early, late in zip(before, after, strict=True)]
    costs = [late.phases.overhead / early.phases.overhead for early, late in zip(before, after, strict=True)]
    print(f"ratio of wall times, after to before, by pair: {_text(estimate(walls))}")
    print(f"ratio of start-up and idle, by pair: {_text(estimate(costs))}")
    print("Parentheses: 95 % confidence interval. Brackets: minimum and maximum of fewer than six pairs.\n")
    print_phases((side, _median_phases(runs)) for side, runs in zip(SIDES, (before, after), strict=True))
    print()
    _print_cells([run.cells for run in before], [run.cells for run in after])


def _text(found: Estimate | None) -> str:
    assert found is not None
    low, high = found.interval or (found.low, found.high)
    left, right = "()" if found.interval else "[]"
    return f"{found.median:.3g} {left}{low:.3g} to {high:.3g}{right}"


def _median_phases(runs: Sequence[Run]) -> Phases:
    phases = [run.phases for run in runs]
    return Phases(
        max(found.launches for found in phases),
        statistics.median(found.start_up for found in phases),
        statistics.median(found.measuring for found in phases),
        statistics.median(found.idle for found in phases),
        statistics.median(found.rest for found in phases if found.rest is not None),
    )


def _print_cells(before: Sequence[dict[str, Cell]], after: Sequence[dict[str, Cell]]) -> None:
    labels = [label for label in before[0] if label in after[0]]
    print("A pass: median over all launches, ms. Spread: standard deviation between the launches of a run, % of it")
    print(
        f"{'cell':<78} {'before':>8} {'after':>8} {'ratio':>6} {'spread':>7} {'after':>6} {'peak MiB':>9} {'after':>7}"
    )
    ratios, variances = [], []
    for label in labels:
        sides = [[run[label] for run in runs if label in run] for runs in (before, after)]
        medians = [_median(cells) for cells in sides]
        spreads = [_spread(cells) for cells in sides]
        peaks = [_peak(cells) for cells in sides]
        if medians[0] is None or medians[1] is None:
            continue
        ratios.append(medians[1] / medians[0])
        if spreads[0] and spreads[1]:
            variances.append((spreads[1] / spreads[0]) ** 2)
        row = f"{label:<78} {1000 * medians[0]:>8.2f} {1000 * medians[1]:>8.2f} {ratios[-1]:>6.3f} "
        row += " ".join(f"{100 * spread:>6.1f}%" if spread is not None else f"{'':>7}" for spread in spreads)
        print(row + "  " + " ".join(f"{peak / 2**20:>8.1f}" if peak is not None else f"{'':>8}" for peak in peaks))
    print(f"\nmedian pass, after to before, over {len(ratios)} cells: {_text(estimate(ratios))}")
    if variances:
        print(f"variance between launches, after to before, over {len(variances)} cells: {_text(estimate(variances))}")
    print(_sameness(before, after, labels))


def _median(cells: Sequence[Cell]) -> float | None:
    values = [seconds for cell in cells for seconds in cell.pass_seconds.values()]
    return statistics.median(values) if values else None


def _spread(cells: Sequence[Cell]) -> float | None:
    """Standard deviation of a pass's logarithm between the launches of one run, pooled over the runs."""
    groups = [[math.log(seconds) for seconds in cell.pass_seconds.values()] for cell in cells]
    groups = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    return math.sqrt(sum(statistics.variance(g) * (len(g) - 1) for g in groups) / degrees) if degrees else None


def _peak(cells: Sequence[Cell]) -> float | None:
    peaks = [cell.peak_memory_bytes for cell in cells if cell.peak_memory_bytes is not None]
    return statistics.median(peaks) if peaks else None


def _sameness(before: Sequence[dict[str, Cell]], after: Sequence[dict[str, Cell]], labels: Sequence[str]) -> str:
    """What of the records is equal to the bit, and what is not."""
    pairs = [(early[label], late[label]) for early, late in zip(before, after, strict=True) for label in labels]
    answered = [(early, late) for early, late in pairs if any(early.answers.values())]
    same = sum(early.answers == late.answers for early, late in answered)
    names = sum(early.figures == late.figures for early, late in pairs)
    repeats = sum(set(early.pass_seconds) == set(late.pass_seconds) for early, late in pairs)
    failures = sum(cell.failures for pair in pairs for cell in pair)
    only = len(before[0].keys() ^ after[0].keys())
    return (
        f"of {len(pairs)} cells of all pairs: same repeats {repeats}, same names of figures {names}; answers (tokens "
        f"and logits) equal to the bit {same} of {len(answered)}; {failures} failures; {only} cells in one alone"
    )
