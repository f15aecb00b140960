"""Training whose ranks are killed: does it end as if nothing had happened? python -m benchmarks.training.faults

For DDP and FSDP2 a run that nobody disturbs, and then `--cases` runs in each of which a rank is killed (SIGKILL) at a
moment drawn over the whole run, so that it also meets checkpoints that are being written. The next attempt, which the
retries of a study ask for, goes on from the last whole checkpoint. All goes the way of a study: job folders, the local
launcher, torchrun, records. Losses and gradient norms of all steps must be those of the undisturbed run to the last
bit; with another number of ranks they must be so within float32's rounding. Prints a Markdown table; exit code 1 where
any row is wrong.

    python -m benchmarks.training.faults --cases 20
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from configs.plans.job import Measurement, Progress
from configs.plans.packing import Launch
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan
from configs.records.record import Record, Status
from configs.spec.cell import Cell
from configs.spec.study import StudySpec
from tasks.campaign.launches.jobs import run_job, write_job
from tasks.campaign.retries import Retries
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_models import planned_model
from tasks.planning.study_plan import make_plan

ROUNDING = 1e-5
"""Relative difference of losses that sums over another number of ranks may make in these few steps, in float32."""
STEPS, EVERY = 40, 4
_LOOK_SECONDS = 0.002
_STUDY = {
    "study": "training_faults",
    "models": [{"id": "synthetic:llama-1m@0"}],
    "workload": {
        "kind": "train",
        "global_batch_size": 4,
        "sequence_length": 128,
        "steps": STEPS,
        "checkpoint_every": EVERY,
    },
    "experiments": {
        "ways": {
            "kind": "optimization",
            "baseline": {"dp": 2, "strategy": "ddp"},
            "variants": {
                "fsdp": {"strategy": "fsdp"},
                "none": {"dp": 1, "strategy": "none"},
                "ddp on 4": {"dp": 4, "strategy": "ddp"},
                "zero2": {"strategy": "zero2"},
            },
        }
    },
    "measuring": {"memory": False, "warmup": 1, "repeats": 1},
}


@dataclass
class Kill:
    """A rank and a moment: so many seconds after the checkpoint of a step (0: after the measurement's begin) was whole.

    while_writing: whether another checkpoint was being written then; None: it never came to it.
    """

    rank: int
    after_step: int
    delay_seconds: float
    while_writing: bool | None = None

    def watch(self, paths: JobPaths, checkpoints: Path, ranks: int, stop: threading.Event) -> None:
        """Wait for the moment, and kill."""
        while not stop.is_set():
            begun = [_progress(paths, rank) for rank in range(ranks)]
            under_measurement = all(progress is not None and progress.phase == "measurement" for progress in begun)
            if under_measurement and _newest_step(checkpoints) >= self.after_step:
                break
            time.sleep(_LOOK_SECONDS)
        if stop.wait(self.delay_seconds):
            return
        progress = _progress(paths, self.rank)
        assert progress is not None
        self.while_writing = any(checkpoints.glob(".step_*.unfinished"))
        with suppress(ProcessLookupError):
            os.kill(progress.pid, signal.SIGKILL)


def _nothing(*_: object) -> None:
    """Nobody is killed."""


def _newest_step(checkpoints: Path) -> int:
    """Of those that lie there; 0 where there are none."""
    return max((int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*")), default=0)


def _progress(paths: JobPaths, rank: int) -> Progress | None:
    try:
        return Progress.model_validate_json(paths.progress(rank).read_bytes().rstrip(b" \0"))
    except (OSError, ValueError):
        return None


@dataclass
class Curve:
    """What a measurement came to: its attempts, and what the last one tells of all steps."""

    attempts: list[Record]
    losses: np.ndarray
    norms: np.ndarray

    @property
    def last(self) -> Record:
        """The attempt that counts."""
        return self.attempts[-1]

    @property
    def resumed_from(self) -> int:
        """Step that the last attempt went on from; 0: it began anew."""
        return int(self.last.figures.get("resumed_from_step") or 0)


@dataclass
class Row:
    """A line of the table. `wrong`: what is not as it must be."""

    what: str
    cases: int = 0
    identical: int = 0
    while_writing: int = 0
    resumed_from: list[int] = field(default_factory=list)
    difference: float = 0.0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


Undisturbed = Callable[[Cell], Curve]
"""What a cell comes to when nobody kills; made when it is first asked for."""


class Campaign:
    """A run folder in which measurements are made and disturbed."""

    def __init__(self, folder: Path, seed: int) -> None:
        study = StudySpec.model_validate(_STUDY)
        self.run, self.cache = RunPaths(folder / "run"), folder / "cache"
        models = [planned_model(spec, place, self.cache, folder) for place, spec in enumerate(study.models)]
        self.plan: Plan = make_plan(study, models, copy_inputs(study, self.run, folder), self.run.inputs)
        self.random = random.Random(seed)
        self._repeats = 0

    def cell(self, strategy: str, ranks: int) -> Cell:
        """A cell of the study."""
        cells = self.plan.cells.values()
        return next(one for one in cells if (one.layout.strategy, one.layout.dp) == (strategy, ranks))

    def measurement(self, cell: Cell) -> Measurement:
        """A repeat that was not made yet: with checkpoints of its own."""
        self._repeats += 1
        return Measurement(cell=cell, repeat=self._repeats, attempt=1)

    def checkpoints(self, measurement: Measurement) -> Path:
        """Where those of a measurement lie."""
        return self.run.checkpoints / f"{measurement.cell.key}-r{measurement.repeat}"

    def make(
        self, measurement: Measurement, kill: Kill | None = None
    ) -> tuple[Record | None, tuple[Measurement, ...], Retries]:
        """One launch: its record, and which measures the retries ask for next."""
        retries = Retries()
        record, again = self._launch((measurement,), kill, retries)
        return record, again, retries

    def finish(self, measurement: Measurement, kill: Kill | None, between: Callable[[], None] = lambda: None) -> Curve:
        """All attempts at a measurement; the first one is disturbed. Raises RuntimeError where it does not come to
        an end."""
        retries, attempts = Retries(), []
        measurements: tuple[Measurement, ...] = (measurement,)
        while measurements:
            record, measurements = self._launch(measurements, kill, retries)
            attempts += [record] if record else []
            if measurements:
                between()
            kill = None
        if not attempts or attempts[-1].status is not Status.COMPLETED:
            raise RuntimeError(f"it ended {[(record.status, record.failure) for record in attempts]}")
        last = attempts[-1]
        with np.load(self.run.record(last.key, "timed", last.repeat, last.attempt).with_suffix(".npz")) as samples:
            return Curve(attempts, samples["0/loss"], samples["0/gradient_norm"])

    def _launch(
        self, measurements: tuple[Measurement, ...], kill: Kill | None, retries: Retries
    ) -> tuple[Record | None, tuple[Measurement, ...]]:
        job = write_job(Launch("timed", measurements), self.plan, self.run, self.cache)
        stop = threading.Event()
        watcher = threading.Thread(
            target=kill.watch if kill else _nothing,
            args=(self.run.job(job.name), self.checkpoints(measurements[0]), job.cell.layout.ranks, stop),
        )
        watcher.start()
        try:
            collected = run_job(job, self.run, lambda _: None)
        finally:
            stop.set()
            watcher.join()
        outcome = retries.after(collected, "timed", job.target)
        return (collected.records[0] if collected.records else None), outcome.again

    def drawn(self, ranks: int, interval_seconds: float, first: int = 0) -> Kill:
        """A rank and a moment, the same for the same seed. first: the checkpoint after which it is at the earliest."""
        number = self.random.randrange(first, STEPS // EVERY - 1)
        delay = self.random.uniform(0.0, interval_seconds if number else 2 * interval_seconds)
        return Kill(self.random.randrange(ranks), number * EVERY, delay)


def _interval_seconds(curve: Curve) -> float:
    """From checkpoint to checkpoint, about."""
    blocked = curve.last.figures.get("checkpoint_seconds")
    measurement = curve.last.figures["measurement_seconds"]
    assert isinstance(measurement, float)
    return min(1.0, measurement * EVERY / STEPS) if blocked is not None else 0.1


def killed(campaign: Campaign, cell: Cell, curve: Undisturbed, cases: int, what: str) -> Row:
    """A rank killed at a random moment, again and again."""
    undisturbed = curve(cell)
    row, began = Row(what), time.monotonic()
    for _ in range(cases):
        kill = campaign.drawn(cell.layout.ranks, _interval_seconds(undisturbed))
        _compare(row, undisturbed, kill, partial(campaign.finish, campaign.measurement(cell), kill))
    row.seconds = time.monotonic() - began
    return row


def torn(campaign: Campaign, cell: Cell, curve: Undisturbed, what: str) -> Row:
    """After the kill the newest checkpoint loses its last bytes: the one before is gone on from."""
    undisturbed = curve(cell)
    row, began = Row(what), time.monotonic()
    measurement, spoilt = campaign.measurement(cell), []
    kill = campaign.drawn(cell.layout.ranks, 0.0, first=3)

    def spoil() -> None:
        folder = max(campaign.checkpoints(measurement).glob("step_*"))
        path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.truncate(path, path.stat().st_size - 100)
        spoilt.append(int(folder.name.removeprefix("step_")))

    found = _compare(row, undisturbed, kill, lambda: campaign.finish(measurement, kill, spoil))
    if found and (not spoilt or found.resumed_from >= spoilt[0] or not found.last.figures["checkpoints_torn"]):
        row.wrong.append(f"it went on from step {found.resumed_from} although that of {spoilt} was torn")
    row.seconds = time.monotonic() - began
    return row


def resharded(campaign: Campaign, first: Cell, second: Cell, curve: Undisturbed, what: str) -> Row:
    """After the kill another cell goes on from what this one left."""
    undisturbed = curve(first)
    row, began = Row(what), time.monotonic()
    before, after = campaign.measurement(first), campaign.measurement(second)
    kill = campaign.drawn(first.layout.ranks, _interval_seconds(undisturbed), first=1)
    campaign.make(before, kill)
    shutil.copytree(campaign.checkpoints(before), campaign.checkpoints(after))
    _compare(row, undisturbed, kill, lambda: campaign.finish(after, None), rounding=ROUNDING)
    row.seconds = time.monotonic() - began
    return row


def _compare(
    row: Row, undisturbed: Curve, kill: Kill, make: Callable[[], Curve], rounding: float | None = None
) -> Curve | None:
    """Add a case to a row. rounding: how far losses may be away; None: not at all, nor may the norms."""
    row.cases += 1
    try:
        curve = make()
    except (RuntimeError, OSError, ValueError) as error:
        row.wrong.append(f"{type(error).__name__}: {error}")
        return None
    row.while_writing += kill.while_writing is True
    row.resumed_from.append(curve.resumed_from)
    same = np.array_equal(curve.losses, undisturbed.losses) and np.array_equal(curve.norms, undisturbed.norms)
    row.identical += same
    place = f"killed rank {kill.rank} {kill.delay_seconds:.3f} s after step {kill.after_step}"
    if curve.losses.shape != undisturbed.losses.shape:
        row.wrong.append(f"{place}: {len(curve.losses)} losses")
        return curve
    row.difference = max(row.difference, float(np.max(np.abs(curve.losses / undisturbed.losses - 1))))
    first = curve.attempts[0].failure
    if kill.while_writing is None:
        row.wrong.append(f"{place}: the run ended before")
    elif rounding is None and (len(curve.attempts) != 2 or first is None or first.kind != "SIGKILL"):
        row.wrong.append(f"{place}: {len(curve.attempts)} attempts, the first ended by {first}")
    if (rounding is None and not same) or row.difference > (rounding or 0.0):
        row.wrong.append(f"{place}: losses differ by up to {row.difference:.1e}")
    return curve


def table(rows: list[Row]) -> str:
    """Markdown, a line for each kind of case."""
    lines = [
        "| what | cases | identical to the bit | while a checkpoint was written | went on from step "
        "| largest difference of a loss | seconds | verdict |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        steps = row.resumed_from
        spread = f"{min(steps)} to {max(steps)}, median {statistics.median(steps):g}" if steps else "–"
        verdict = "; ".join(row.wrong) or "as it must be"
        lines.append(
            f"| {row.what} | {row.cases} | {row.identical} | {row.while_writing} | {spread} | {row.difference:.1e} "
            f"| {row.seconds:.0f} | {verdict} |"
        )
    return "\n".join(lines)


def campaign_rows(campaign: Campaign, cases: int, only: str, tell: Callable[[str], None]) -> list[Row]:
    """All rows whose names contain `only`."""
    undisturbed: dict[str, Curve] = {}

    def curve(cell: Cell) -> Curve:
        if cell.key not in undisturbed:
            undisturbed[cell.key] = campaign.finish(campaign.measurement(cell), None)
        return undisturbed[cell.key]

    one, four, zero = (campaign.cell(*which) for which in (("none", 1), ("ddp", 4), ("zero2", 2)))
    few = max(1, cases // 10)
    makes: dict[str, Callable[[str], Row]] = {}
    for strategy in ("ddp", "fsdp"):
        two = campaign.cell(strategy, 2)
        makes |= {
            f"{strategy}, a rank killed": partial(killed, campaign, two, curve, cases),
            f"{strategy}, the newest checkpoint torn": partial(torn, campaign, two, curve),
            f"{strategy} on 2, then 1 rank": partial(resharded, campaign, two, one, curve),
            f"1 rank, then {strategy} on 2": partial(resharded, campaign, one, two, curve),
        }
    makes["ddp on 4, a rank killed"] = partial(killed, campaign, four, curve, few)
    makes["zero2, a rank killed"] = partial(killed, campaign, zero, curve, few)
    rows = []
    for what, make in makes.items():
        if only in what:
            rows.append(make(what))
            tell(f"{what}: {'; '.join(rows[-1].wrong) or 'as it must be'} ({rows[-1].seconds:.0f} s)")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20, help="ranks killed, for each strategy")
    parser.add_argument("--seed", type=int, default=0, help="of moments and ranks")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--runs", type=Path, help="keep the run folder here")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rankwise-training-faults-") as scratch:
        campaign = Campaign((chosen.runs or Path(scratch)).absolute(), chosen.seed)
        rows = campaign_rows(campaign, chosen.cases, chosen.only, lambda line: print(line, flush=True))
    print(f"\n{table(rows)}")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
