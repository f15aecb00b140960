"""What our training costs beside what it could cost: python -m benchmarks.training.bench [--quick]

| row | held against |
| --- | --- |
| DDP on two ranks, one core each, accumulation 8 | two processes side by side that know nothing of each other |
| our step: none, DDP, FSDP2 | a plain PyTorch loop of the same model and strategy |
| an asynchronous checkpoint every 10 steps | none |

Ours is measured in measurements of the real worker (a job folder, torchrun, parts). The plain loop and the processes
alone make their steps in turn with ours, in the same processes (`benchmarks.training.side_by_side`), so that both meet
the same second; with and without checkpoints measurements take turns instead: with, without, without, with, and so on.
A measurement, or a pair of them, counts with its ratio of mean steps, wall time of the slowest rank; a row with the
median of these and its 95 % interval. Met or missed where the interval lies on one side of the bar, else undecided.
About a quarter of an hour on two cores, which should have nothing else to do. The exit code is 0 where all bars are
met, 1 where one is missed, 2 where one is undecided.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from configs.common.base import write_atomically
from configs.common.execution import Layout, Strategy
from configs.hardware.architectures import ARCHITECTURES
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from reports.numbers.statistics import Ratio, paired_ratio

Partner = Literal["bare", "apart", "no checkpoints"]
Verdict = Literal["met", "missed", "undecided"]
_LAUNCH_SECONDS = 600


@dataclass(frozen=True)
class Row:
    """A comparison. bar: the most that ours may take of the other's time. pairs: in each launch."""

    name: str
    partner: Partner
    strategy: Strategy
    bar: float
    model: str = "llama-4m"
    ranks: int = 2
    micro_batch: int = 2
    accumulation: int = 1
    length: int = 256
    warmup: int = 2
    steps: int = 6
    checkpoint_every: int | None = None
    pairs: int = 12
    launches: int = 2

    @property
    def cell(self) -> Cell:
        """Ours."""
        work = TrainWorkload(
            global_batch_size=self.micro_batch * self.accumulation * self.ranks,
            micro_batch_size=self.micro_batch,
            sequence_length=self.length,
            steps=self.warmup + self.steps,
            checkpoint_every=self.checkpoint_every,
            checkpoints_kept=1,
        )
        return Cell(model=self.identity, workload=work, layout=Layout(dp=self.ranks, strategy=self.strategy))

    @property
    def by_measurements(self) -> bool:
        """Whether measurements take turns, not steps."""
        return self.partner == "no checkpoints"

    @property
    def identity(self) -> str:
        return f"synthetic:{self.model}@0"


_APART = Row(
    "DDP, accumulation 8, against two alone", "apart", "ddp", 1 / 0.97,  # 97 % of the throughput
    model="llama-1m", micro_batch=4, accumulation=8, steps=3, pairs=16,
)  # fmt: skip
ROWS = (
    _APART,
    Row("our step, one rank", "bare", "none", 1.02, ranks=1),
    Row("our step, DDP", "bare", "ddp", 1.02),
    Row("our step, FSDP2", "bare", "fsdp", 1.02),
    # The measured steps begin after one checkpoint and end with the third: all that two of them cost is among them.
    Row("checkpoint every 10 steps", "no checkpoints", "ddp", 1.05, warmup=10, steps=20, checkpoint_every=10, pairs=18),
)


def quick(row: Row) -> Row:
    """Small, to see that everything runs; its figures mean nothing."""
    return replace(row, model="llama-1m", length=32, micro_batch=1, pairs=2, launches=1, steps=min(row.steps, 8))


def is_theirs(row: Row, number: int) -> bool:
    """Where measurements take turns: of each four the second and the third."""
    return row.by_measurements and number % 4 in (1, 2)


def measurements_of(row: Row) -> tuple[Measurement, ...]:
    """All measurements of a launch, in their order."""
    cell = row.cell
    other = cell.model_copy(update={"workload": cell.workload.model_copy(update={"checkpoint_every": None})})
    return tuple(
        Measurement(cell=other if is_theirs(row, number) else cell, repeat=number, attempt=1)
        for number in range(row.pairs * (2 if row.by_measurements else 1))
    )


def write_job(row: Row, folder: Path) -> JobPaths:
    """The job folder of a launch, model and all."""
    paths = JobPaths(folder / "jobs" / "job")
    paths.folder.mkdir(parents=True)
    manifest = ModelManifest(
        identity=row.identity, source="synthetic", folder="", files={}, config=ARCHITECTURES[row.model]
    )
    write_atomically(folder / "manifest.json", manifest.model_dump_json())
    job = Job(
        name="job",
        study="bench-training",
        measuring_pass="timed",
        measuring=Measuring(warmup=row.warmup),
        measurements=measurements_of(row),
        ranks_per_node=row.ranks,
        timeout_seconds=_LAUNCH_SECONDS,
        manifest=str(folder / "manifest.json"),
        inputs=str(folder),
        cache=str(folder / "cache"),
    )
    write_atomically(paths.job, job.model_dump_json())
    return paths


def launch(row: Row, paths: JobPaths) -> None:
    """Make all measurements. Raises RuntimeError with the end of what a rank said that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(row.ranks), "--max-restarts", "0"]
    command += ["--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--local-addr", "127.0.0.1"]
    command += ["--master-port", str(port), "--log-dir", str(paths.folder / "torchrun")]
    if row.by_measurements:
        command += ["-m", "engine.worker", str(paths.job)]
    else:
        command += ["-m", "benchmarks.training.side_by_side", row.partner, str(paths.job)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LAUNCH_SECONDS)
    if ended.returncode:
        logs = [paths.rank_log(rank) for rank in range(row.ranks)]
        said = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs if log.is_file())
        raise RuntimeError(f"{row.name}: the launch failed\n{said or ended.stderr[-2000:]}")


def read_columns(measurement: Measurement, row: Row, paths: JobPaths, column: str) -> list[np.ndarray]:
    """Seconds of each measured step, what checkpoints held up included, by rank."""
    found = []
    for rank in range(row.ranks):
        with np.load(paths.samples(measurement.name, rank)) as samples:
            found.append(samples[column] + samples.get("checkpoint_seconds", 0.0))
    return found


def synchronous_step_seconds(ranks: list[np.ndarray]) -> float:
    """Mean seconds of a step of ranks that wait for each other: the slowest's; their sums differ by the last wait."""
    return max(float(seconds.mean()) for seconds in ranks)


def independent_step_seconds(ranks: list[np.ndarray]) -> float:
    """Mean seconds of a step of ranks that stand apart: their common pace."""
    return len(ranks) / sum(1 / float(seconds.mean()) for seconds in ranks)


def both_sides(row: Row, paths: JobPaths) -> list[tuple[float, float]]:
    """Of each pair of a launch the mean seconds of a step, ours and theirs."""
    measurements = measurements_of(row)
    if not row.by_measurements:
        other = independent_step_seconds if row.partner == "apart" else synchronous_step_seconds
        return [
            (synchronous_step_seconds(read_columns(measurement, row, paths, "step_seconds")),
             other(read_columns(measurement, row, paths, "partner_seconds")))
            for measurement in measurements
        ]  # fmt: skip
    found: list[tuple[float, float]] = []
    for pair in zip(measurements[::2], measurements[1::2], strict=True):
        ours, theirs = sorted(pair, key=lambda measurement: is_theirs(row, measurement.repeat))
        found.append(
            (synchronous_step_seconds(read_columns(ours, row, paths, "step_seconds")),
             synchronous_step_seconds(read_columns(theirs, row, paths, "step_seconds")))
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class RowResult:
    """What a row came to. ratio: ours over theirs; seconds: medians of a step."""

    row: Row
    ratio: Ratio
    ours_seconds: float
    theirs_seconds: float

    @property
    def verdict(self) -> Verdict:
        """By the interval; without one nothing is decided."""
        if self.ratio.interval is None:
            return "undecided"
        low, high = self.ratio.interval
        return "met" if high <= self.row.bar else "missed" if low > self.row.bar else "undecided"


def measure(row: Row, folder: Path) -> RowResult:
    """All launches of a row."""
    pairs: list[tuple[float, float]] = []
    for number in range(row.launches):
        paths = write_job(row, folder / f"launch-{number}")
        launch(row, paths)
        pairs += both_sides(row, paths)
    ours, theirs = ({place: pair[side] for place, pair in enumerate(pairs)} for side in (0, 1))
    ratio = paired_ratio(ours, theirs)
    assert ratio is not None, "every pair has both"
    return RowResult(row, ratio, *(float(np.median(list(side.values()))) for side in (ours, theirs)))


def line(found: RowResult) -> str:
    """A row of the table."""
    ratio, bar = found.ratio, found.row.bar
    text: Callable[[float], str] = lambda value: f"{value:.4f}"  # noqa: E731
    if found.row.partner == "apart":  # a bar on throughput
        text = lambda value: f"{1 / value:.4f}"  # noqa: E731
    bounds = "none" if ratio.interval is None else " to ".join(sorted(map(text, ratio.interval)))
    seconds = f"{found.ours_seconds * 1000:.1f} | {found.theirs_seconds * 1000:.1f}"
    return (
        f"| {found.row.name} | {seconds} | {text(ratio.value)} | {bounds} | {ratio.count} | {text(bar)} | "
        f"{found.verdict} |"
    )


def main(arguments: list[str]) -> int:
    """Measure, print a line as each row ends; 0 met, 1 missed, 2 undecided."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and few: to test the bench")
    parser.add_argument("--runs", type=Path, help="keep the job folders here")
    given = parser.parse_args(arguments)
    print("Time of a step, ours over theirs; of the first row throughput, ours over theirs\n")
    print("| | ours, ms | theirs, ms | ratio | 95 % interval | pairs | bar | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-training-") as scratch:
        for number, row in enumerate(ROWS):
            folder = (given.runs or Path(scratch)).absolute() / f"row-{number}"
            found = measure(quick(row) if given.quick else row, folder)
            print(line(found), flush=True)
            verdicts.append(found.verdict)
    return 1 if "missed" in verdicts else 2 if "undecided" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
