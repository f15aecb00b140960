"""Training loop of a recipe: epochs of a split loader in global batches, with bounds, evaluation and checkpoints.

    loop = Loop(recipe's parts ...)
    history = loop.run()

It is the loop of `engine.training.steps` without measurements, built on Trainer, `StepBudget` and `Saver`. All
processes make the same calls.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.common.printable import plural
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.rank.agreement import total
from engine.training.bounds import RECENT_STEPS, StepBudget, TrainingProgress
from engine.training.checkpoints.files import newest_whole
from engine.training.checkpoints.measurement import latest, read_checkpoint_progress
from engine.training.checkpoints.saving import Saver, load, own_group
from engine.training.recipes.loaders import SharedLoader
from engine.training.trainer import Task, Trainer, TrainingBatch, TrainingHistory, check_finite, reduce_losses


@dataclass(frozen=True)
class CheckpointRules:
    """Folder, interval in steps, and number of checkpoints to keep."""

    folder: Path
    every: int
    kept: int


@dataclass
class DataPosition:
    """Position in the data. examples: of this epoch, completed by all processes together."""

    epoch: int = 0
    examples: int = 0


@dataclass
class Loop:
    """One training run. accumulation: batches of this process in a step; batch_of: extracts a batch from a loader's
    item.

    judged: the value compared with a target loss, at the end of the last epoch.
    """

    context: Context
    workload: TrainWorkload
    task: Task
    trainer: Trainer
    data: SharedLoader
    validation: SharedLoader | None
    batch_of: Callable[[Any], dict[str, Any]]
    accumulation: int
    rate: float
    saving: CheckpointRules | None
    say: Callable[[str], None]
    place: DataPosition = field(default_factory=DataPosition)
    history: TrainingHistory = field(default_factory=TrainingHistory)
    unreduced: list[float] = field(default_factory=list)
    saver: Saver | None = None
    saved: int | None = None
    judged: float | None = None

    @property
    def steps(self) -> int:
        """Completed steps, including earlier attempts."""
        return self.history.steps + len(self.unreduced)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch; an incomplete last step is dropped."""
        return self.data.batches // self.accumulation

    def run(self) -> TrainingHistory:
        """Train until the bounds, resuming from the last checkpoint if there is one."""
        self._resume()
        bounds, here = StepBudget(self.workload, self.context), 0
        steps = self._groups()
        while not bounds.reached(TrainingProgress(self.steps, here, self.history.trained_seconds, 0.0, self.judged)):
            began = time.perf_counter()
            self._step(next(steps))
            here += 1
            self.history.trained_seconds += time.perf_counter() - began
            if self.place.examples == 0 or self.steps == self.workload.steps:
                self._end_epoch()
            if self._due():
                self._save()
        self.reduce_losses()
        self._evaluate()
        self._save()
        if self.saver is not None:
            self.saver.wait()
        return self.history

    def _groups(self) -> Iterator[list[TrainingBatch]]:
        """Yield the batches of each step; the place is the one after the step."""
        size = self.workload.global_batch_size
        while True:
            if self.place.examples // size >= self.steps_per_epoch:
                # Of the processes that made the checkpoint this epoch had one step more: its last batches were padded.
                self.place = DataPosition(self.place.epoch + 1, 0)
            self.data.begin(self.place.epoch, self.place.examples)
            batches = iter(self.data)
            for step in range(self.place.examples // size, self.steps_per_epoch):
                made = [self.batch_of(raw) for raw in islice(batches, self.accumulation)]
                last = step == self.steps_per_epoch - 1
                self.place = (
                    DataPosition(self.place.epoch + 1, 0) if last else DataPosition(self.place.epoch, (step + 1) * size)
                )
                yield self._shared(made)

    def _shared(self, made: list[dict[str, Any]]) -> list[TrainingBatch]:
        """Share of a batch in a step: every example has equal weight."""
        counts = [len(inputs["targets"]) for inputs in made]
        whole = sum(counts) * self.context.world_size
        return [TrainingBatch(inputs, count / whole, count, count) for inputs, count in zip(made, counts, strict=True)]

    def _step(self, batches: list[TrainingBatch]) -> None:
        own = 0.0
        losses = []
        for number, batch in enumerate(batches):
            loss = self.trainer.forward(batch)
            self.trainer.backward(loss, batch, last=number == len(batches) - 1)
            losses.append(loss.detach() * batch.share)
        end = self.trainer.step(self.rate)
        own = float(torch.stack(losses).sum())
        check_finite(self.steps, own, end, "the optimizer's lr", self.context.job.cell.dtype)
        self.unreduced.append(own)
        self.history.norms.append(end.norm)
        self.history.skipped += not end.applied

    def reduce_losses(self) -> None:
        """Make the losses of the latest steps those of the global batch, on all processes."""
        reduce_losses(self.history, self.unreduced, self.context)

    def _end_epoch(self) -> None:
        self.reduce_losses()
        self._evaluate()
        recent = self.history.losses[-self.steps_per_epoch :]
        line = f"epoch {self.place.epoch}, step {self.steps}: loss {sum(recent) / len(recent):.4f}"
        if self.validation is not None:
            sums = self.history.evaluations[-1][1]
            line += f", validation loss {sums['loss'] / sums['targets']:.4f}"
            if "correct" in sums:
                line += f", {100 * sums['correct'] / sums['targets']:.1f} % right"
        self.judged = self._judge()
        self.say(f"{line}, {self.history.trained_seconds:.0f} s")

    def _judge(self) -> float:
        """Return the value compared with a target loss: of the validation data, else the mean of the last steps."""
        if self.validation is not None:
            sums = self.history.evaluations[-1][1]
            return sums["loss"] / sums["targets"]
        recent = self.history.losses[-RECENT_STEPS:]
        return sum(recent) / len(recent)

    def _evaluate(self) -> None:
        if self.validation is None or (self.history.evaluations and self.history.evaluations[-1][0] == self.steps):
            return
        self._agree_on_buffers()
        names: list[str] = []
        summed, seen = torch.zeros(3, dtype=torch.float64), 0
        self.validation.begin(0)
        with self.trainer.evaluating():
            for raw in self.validation:
                inputs = self.batch_of(raw)
                count = len(inputs["targets"])
                # Parts are padded to be equal; duplicates count once.
                real = sum(not self.validation.is_filling(seen + number) for number in range(count))
                inputs["real"] = torch.tensor(real)
                sums = self.task.metrics(self.trainer.module, TrainingBatch(inputs, 0.0, count, count))
                names = list(sums)
                summed[: len(names)] += torch.stack([each.detach().double().cpu() for each in sums.values()])
                seen += count
        sums_of_all = total(summed, self.context).tolist()
        self.history.evaluations.append((self.steps, dict(zip(names, sums_of_all, strict=False))))

    def _agree_on_buffers(self) -> None:
        """Average buffers such as running means, which each process computes from its own examples."""
        if self.context.world_size == 1:
            return
        for buffer in self.task.model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= self.context.world_size
            else:
                dist.broadcast(buffer, 0)

    def _due(self) -> bool:
        return self.saving is not None and self.steps % self.saving.every == 0

    def _save(self) -> None:
        """Begin a checkpoint; no-op without checkpoints or if this step has one."""
        if self.saver is None or self.saved == self.steps:
            return
        began = time.perf_counter()
        self.reduce_losses()
        self._agree_on_buffers()
        progress = {
            "history": asdict(self.history),
            "place": asdict(self.place),
            "judged": self.judged,
            "global_batch_size": self.workload.global_batch_size,
            "order": self.data.order,
        }
        self.saver.save(self.trainer.state, self.steps, progress)
        self.saved = self.steps
        self.history.trained_seconds += time.perf_counter() - began

    def _resume(self) -> None:
        if self.saving is None:
            return
        group = own_group() if self.context.world_size > 1 else None
        self.saver = Saver(self.saving.folder, kept=self.saving.kept, group=group)
        found = newest_of_all(self.saving.folder, self.context.world_size)
        if found is None:
            return
        state, progress = self.trainer.state(), read_checkpoint_progress(found)
        _check_order(found, progress, self.data.order)
        load(found, state)
        self.trainer.load(state)
        self.history = TrainingHistory(**progress["history"])
        self.history.evaluations = [(int(step), sums) for step, sums in self.history.evaluations]
        self.place, self.judged = DataPosition(**progress["place"]), progress["judged"]
        size = self.workload.global_batch_size
        if self.place.examples % size:  # another global batch: restart the step at its beginning
            self.place.examples -= self.place.examples % size
        self.saved = self.history.steps
        self.say(f"goes on from {found}, {plural(self.history.steps, 'step')} done")


def _check_order(checkpoint: Path, progress: dict[str, Any], order: str) -> None:
    """Raise ValueError where the rest of an epoch would be that of another order: examples twice, and others never."""
    before = progress.get("order", order)
    if progress["place"]["examples"] and before != order:
        raise ValueError(
            f"checkpoints: {checkpoint} is in the middle of an epoch of {before}; got {order}, which would repeat some "
            "and skip others. Use the same data and seed, or another folder"
        )


def newest_of_all(folder: Path, world_size: int) -> Path | None:
    """Return the newest complete checkpoint of so many processes; a single one is alone whatever groups there are."""
    return latest(folder) if world_size > 1 else newest_whole(folder).folder


def checkpointed_batch(checkpoint: Path) -> int:
    """Return the global batch with which a recipe made a checkpoint. Raises ValueError if no recipe did."""
    progress = read_checkpoint_progress(checkpoint)
    if not {"history", "place", "judged", "global_batch_size"} <= progress.keys():
        raise ValueError(f"checkpoints: {checkpoint} was not made by a recipe; give each its own folder")
    return int(progress["global_batch_size"])
