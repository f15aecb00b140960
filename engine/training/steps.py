"""The steps of one measurement: data, forward, backward, optimizer, each timed; evaluation, checkpoints, live streams.

    run = Run(workload, options, context, task, trainer, feed, validation, checkpoints, live)
    train(run)                                      # run.history, run.columns

The only measurement overhead in a step are clock readings: losses stay on their rank until a checkpoint, a decision or
the end needs them, and are then summed over ranks in one collective. A step ends when its loss and gradient norm are
available on this rank. Checkpoint blocking, evaluation and live streams are outside of `step_seconds`; only checkpoints
count as training time.

On a GPU phases are measured by CUDA events, read at the end of the step.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.prompts.decoded import synchroniser
from engine.training.bounds import PROFILE_WARMUP_STEPS, RECENT_STEPS, StepBudget, TrainingProgress
from engine.training.checkpoints.measurement import Checkpoints
from engine.training.data.feed import Feed
from engine.training.data.validation import evaluate
from engine.training.live import LiveStreams
from engine.training.marks import Mark, between, mark
from engine.training.network import NetworkBytes, network_bytes
from engine.training.schedule import learning_rate
from engine.training.trainer import (
    Exposed,
    StepEnd,
    Task,
    Trainer,
    TrainerOptions,
    TrainingBatch,
    TrainingHistory,
    check_finite,
    reduce_losses,
)

LOG_SECONDS = 20.0
PHASES = ("data", "forward", "backward", "optimizer")


@dataclass
class StepColumns:
    """Seconds of each step of this attempt, warm-up included; phases exclude waiting for communication."""

    step: list[float] = field(default_factory=list)
    checkpoint: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})


@dataclass
class Counters:
    """Bytes sent at the start or end of measuring: payload of this rank, and the whole node's network."""

    payload_bytes: int
    network: NetworkBytes | None


@dataclass
class TrainingRun:
    """One measurement's training. `history` is settled for so many steps as it has losses; `unsettled` are those since.

    tokens: computed by this rank in measured steps. step_tokens: by all replicas in the latest step, if all have the
    same number.
    """

    workload: TrainWorkload
    options: TrainerOptions
    context: Context
    task: Task
    trainer: Trainer
    feed: Feed
    validation: list[TrainingBatch]
    checkpoints: Checkpoints
    live: LiveStreams
    history: TrainingHistory = field(default_factory=TrainingHistory)
    columns: StepColumns = field(default_factory=StepColumns)
    unreduced: list[float] = field(default_factory=list)
    tokens: int = 0
    step_tokens: int = 0
    loss_scale: float | None = None
    evaluation_seconds: float = 0.0
    resumed_from: int = 0
    before: Counters | None = None
    after: Counters | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the model, including earlier attempts."""
        return self.history.steps + len(self.unreduced)

    @property
    def here(self) -> int:
        """Steps of this attempt."""
        return len(self.columns.step)

    @property
    def warmup(self) -> int:
        """Steps of this attempt before measuring."""
        return min(self.context.job.measuring.warmup, self.here)


class Stopwatch:
    """Seconds of a step's phases, and the time spent waiting for other ranks."""

    def __init__(self, exposed: Exposed, device: torch.device) -> None:
        self.exposed = exposed
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, Mark, float, int]] = []

    def begin(self) -> None:
        """Start a step."""
        self._laps = []
        self.lap("")

    def lap(self, phase: str) -> None:
        """Assign the time since the last call to this phase."""
        self._laps.append((phase, mark(self._on_gpu), self.exposed.seconds, len(self.exposed.pending)))

    def read(self) -> tuple[dict[str, float], float]:
        """Return seconds by phase without waiting, and total waiting seconds; the device must be synchronised."""
        seconds, total, waits = dict.fromkeys(PHASES, 0.0), 0.0, self.exposed.settle()
        _, last, known, settled = self._laps[0]
        for phase, now, waiting, pending in self._laps[1:]:
            waited = waiting - known + sum(waits[settled:pending])
            seconds[phase] += between(last, now) - waited
            total += waited
            last, known, settled = now, waiting, pending
        return seconds, total


def train(run: TrainingRun) -> None:
    """All steps of the measurement. Raises FloatingPointError for a loss or a norm that is no number."""
    context, columns, history = run.context, run.columns, run.history
    bounds, watch = StepBudget(run.workload, context), Stopwatch(run.trainer.exposed, context.device)
    synchronise = synchroniser(context.device)
    run.resumed_from = history.steps
    if history.steps and _evaluation_due(run):
        evaluate_now(run)  # a checkpoint is made before the evaluation of its step
    measured_seconds, loss = 0.0, _last_loss(run) if run.validation else _recent_loss(run)
    said, said_step = time.perf_counter(), run.steps
    context.barrier()
    while _unmeasured(run) or not bounds.reached(
        TrainingProgress(run.steps, run.here, history.trained_seconds, measured_seconds, loss)
    ):
        number, profiled = run.steps, context.profiling and run.here == PROFILE_WARMUP_STEPS
        if run.here == context.job.measuring.warmup:
            run.before = _counters(run)
        rate = learning_rate(run.workload, number)
        began = time.perf_counter()
        with context.profiled() if profiled else nullcontext():
            own_loss, end = one_step(run, number, rate, watch)
        synchronise()
        now = time.perf_counter()
        _keep(run, number, own_loss, end, now - began, watch)
        history.trained_seconds += now - began  # before a checkpoint, which keeps it
        blocked = _checkpoint(run)
        columns.checkpoint.append(blocked)
        history.trained_seconds += blocked
        if run.here > context.job.measuring.warmup:
            measured_seconds += now - began
        if run.live.wants:
            _tell(run, number, rate)
        loss = _judged(run, loss)
        if now - said >= LOG_SECONDS:
            pace = (run.steps - said_step) * run.step_tokens / (now - said)
            print(f"step {run.steps}: loss {_own_mean(run):.4f}, {pace:.0f} tokens/s over all ranks", flush=True)
            said, said_step = now, run.steps
    run.after = _counters(run)
    reduce_latest_losses(run)


def _unmeasured(run: TrainingRun) -> bool:
    """Whether a timed run still lacks a step after its warm-up, without which its record would hold no measurement."""
    if run.context.measuring_pass != "timed" or run.here > run.context.job.measuring.warmup:
        return False
    return run.workload.steps is None or run.steps < run.workload.steps


def one_step(run: TrainingRun, number: int, rate: float, watch: Stopwatch) -> tuple[float, StepEnd]:
    """One optimizer step: this rank's share of the global batch's mean loss, and how the step ended."""
    trainer, losses = run.trainer, []
    watch.begin()
    batches = run.feed.step(number)
    watch.lap("data")
    last = len(batches) - 1
    for place, batch in enumerate(batches):
        loss = trainer.forward(batch)
        watch.lap("forward")
        trainer.backward(loss, batch, last=place == last)
        losses.append(loss.detach())
        watch.lap("backward")
    end = trainer.step(rate)
    own = torch.stack(losses).tolist() if last else [losses[0].item()]
    watch.lap("optimizer")
    tokens = sum(batch.tokens for batch in batches)
    run.step_tokens = tokens * run.options.dp
    if run.here >= run.context.job.measuring.warmup:
        run.tokens += tokens
    return sum(value * batch.share for value, batch in zip(own, batches, strict=True)), end


def _keep(run: TrainingRun, number: int, own_loss: float, end: StepEnd, seconds: float, watch: Stopwatch) -> None:
    """Note a step that is over."""
    check_finite(number, own_loss, end, "workload.learning_rate", run.options.dtype)
    run.unreduced.append(own_loss)
    run.history.norms.append(end.norm)
    run.history.skipped += not end.applied
    run.loss_scale = end.loss_scale
    phases, waited = watch.read()
    for phase, spent in phases.items():
        run.columns.phases[phase].append(spent)
    run.columns.exposed.append(waited)
    run.columns.step.append(seconds)


def reduce_latest_losses(run: TrainingRun) -> None:
    """Make the latest steps' losses those of the global batch, on all ranks; ranks of one replica hold the same."""
    reduce_losses(run.history, run.unreduced, run.context, copies=run.options.tp)


def _checkpoint(run: TrainingRun) -> float:
    """Seconds that a checkpoint held this rank up, if one is due after this step."""
    if not run.checkpoints.due(run.steps):
        return 0.0
    began, counted = time.perf_counter(), _counters(run)
    reduce_latest_losses(run)
    run.checkpoints.after_step(run.history)
    _leave_out(run, counted)
    return time.perf_counter() - began


def _judged(run: TrainingRun, loss: float | None) -> float | None:
    """What `target_loss` is compared with after this step: what was, unless there is something newer."""
    work, context = run.workload, run.context
    if context.measuring_pass != "timed":
        return None
    if run.validation:
        if _evaluation_due(run):
            evaluate_now(run)
            return _last_loss(run)
    elif work.target_loss is not None and run.steps % RECENT_STEPS == 0:
        reduce_latest_losses(run)
        return _recent_loss(run)
    return loss


def _recent_loss(run: TrainingRun) -> float | None:
    """Mean of the last RECENT_STEPS losses when `target_loss` was last compared with it; None: it never was."""
    end = run.history.steps - run.history.steps % RECENT_STEPS
    if run.workload.target_loss is None or end == 0:
        return None
    return sum(run.history.losses[end - RECENT_STEPS : end]) / RECENT_STEPS


def _evaluation_due(run: TrainingRun) -> bool:
    every = run.workload.evaluate_every
    timed = run.context.measuring_pass == "timed"
    return timed and bool(run.validation) and every is not None and run.steps % every == 0


def evaluate_now(run: TrainingRun) -> None:
    """Evaluate after the steps so far, unless that was done."""
    if not run.validation or (run.history.evaluations and run.history.evaluations[-1][0] == run.steps):
        return
    began, counted = time.perf_counter(), _counters(run)
    sums = evaluate(run.trainer, run.task, run.validation, run.context, run.options)
    _leave_out(run, counted)  # sharded weights were gathered for it, but not by a step
    if not math.isfinite(sums["loss"]):
        raise FloatingPointError(f"evaluation after step {run.steps}: the validation loss is {sums['loss']}")
    run.history.evaluations.append((run.steps, sums))
    run.evaluation_seconds += time.perf_counter() - began
    if run.live.wants:
        run.live.tell(step=run.steps, validation_loss=sums["loss"] / sums["targets"])


def _last_loss(run: TrainingRun) -> float | None:
    if not run.history.evaluations:
        return None
    sums = run.history.evaluations[-1][1]
    return sums["loss"] / sums["targets"]


def _tell(run: TrainingRun, number: int, rate: float) -> None:
    known: dict[str, Any] = {"exposed_seconds": run.columns.exposed[-1]} if run.trainer.exposed.known else {}
    run.live.tell(
        step=number + 1,
        seconds=run.columns.step[-1],
        tokens=run.step_tokens,
        loss=_own_mean(run),
        gradient_norm=run.history.norms[-1],
        learning_rate=rate,
        **known,
    )


def _own_mean(run: TrainingRun) -> float:
    """The latest loss as this rank sees it: the mean of its own sequences where all have as many targets."""
    return run.unreduced[-1] * run.options.dp if run.unreduced else run.history.losses[-1]


def _counters(run: TrainingRun) -> Counters:
    first = run.context.local_rank == 0
    return Counters(run.trainer.exposed.bytes, network_bytes() if first else None)


def _leave_out(run: TrainingRun, since: Counters) -> None:
    """Count what was sent since then as if it had been sent before the measured steps."""
    now = _counters(run)
    run.trainer.exposed.bytes = since.payload_bytes
    if run.before is None or run.after is not None:
        return
    if run.before.network is not None and since.network is not None and now.network is not None:
        run.before.network = run.before.network.plus(now.network.since(since.network))
