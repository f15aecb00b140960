"""Checkpoints of a training measurement: written every n steps, resumed by the next attempt.

    checkpoints = open_checkpoints(trainer, feed, measurement, context, task)    # all ranks
    history = checkpoints.resume() or TrainingHistory()
    if checkpoints.due(history.steps):
        blocked_seconds = checkpoints.after_step(history)             # the history is the same on all ranks here
    checkpoints.close()
    figures = checkpoints.figures()

They are in <run>/checkpoints/<cell key>-r<repeat>, shared by all attempts at a repeat (on a cluster, a folder visible
to all nodes). A checkpoint holds weights and optimizer by the names of the plain model, the history, the state of the
data and the random generators. The same number of ranks resumes bit-identically; another number, or another strategy of
none, ddp and fsdp, within rounding: copy the folder to the other cell's. ZeRO writes its own files and needs the same
number of ranks.

For custom training loops, `save`, `latest` and `load` need only a folder and, with several ranks, the default process
group:

    load(found, state) if (found := latest(folder)) else None
    save(folder, state, step=step, progress={"epoch": 3})
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from configs.common.printable import plural
from configs.plans.job import Measurement
from configs.records.record import Figure
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.prompts.tokens import tokenizer_path
from engine.rank.agreement import raise_on_all_ranks
from engine.rank.failures import log_line
from engine.training.checkpoints.files import (
    EXPORT,
    Checkpoint,
    FoundCheckpoint,
    newest_whole,
    read_checkpoint_progress,
    steps_in,
)
from engine.training.checkpoints.saving import Saver, load, own_group
from engine.training.checkpoints.staging import TensorState
from engine.training.task_types.common import exported_names
from engine.training.trainer import Task, Trainer, TrainingBatch, TrainingHistory

__all__ = ["Checkpoints", "OwnCheckpoints", "latest", "load", "open_checkpoints", "read_checkpoint_progress", "save"]

DEEPSPEED = "deepspeed"
_GROUP = "checkpoint_group"
_SAME = ("task", "data", "validation_data", "tokenizer", "global_batch_size", "sequence_length", "optimizer",
         "heldout_share")  # fmt: skip
"""Fields of the workload that a resuming run must share."""


@runtime_checkable
class OwnCheckpoints(Protocol):
    """A trainer whose library writes its own checkpoint files. All ranks call; the folder exists."""

    def save(self, folder: Path) -> None:
        """Write; return when this rank's files are written."""

    def restore(self, folder: Path) -> None:
        """Restore. Raises ValueError if another number of ranks wrote them."""


class ResumableFeed(Protocol):
    """Interface to the data required by checkpoints."""

    def step(self, number: int) -> list[TrainingBatch]:
        """Return this rank's micro-batches of a step, counted from 0."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the JSON-able position after this many steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position. Raises ValueError for other data."""


class Checkpoints:
    """Checkpoints of one measurement; without a `saver` every call returns at once."""

    def __init__(
        self,
        trainer: Trainer,
        feed: ResumableFeed,
        context: Context,
        every: int | None = None,
        saver: Saver | None = None,
        export: dict[str, Any] | None = None,
        last: int | None = None,
    ) -> None:
        """last: step after which too few are left to measure; later checkpoints are not resumed from."""
        self._trainer, self._feed, self._context = trainer, feed, context
        self._every, self._saver, self._export, self._last = every, saver, export, last
        self._blocked_seconds = 0.0
        self._resumed_from: int | None = None
        self._torn: tuple[str, ...] = ()

    def due(self, steps_done: int) -> bool:
        """Return whether a checkpoint is due after this many steps."""
        return self._saver is not None and self._every is not None and steps_done % self._every == 0

    def resume(self) -> TrainingHistory | None:
        """Restore trainer and data from the newest complete checkpoint; None if there is none.

        Raises ValueError, on all ranks, for a checkpoint of another model, data or workload.
        """
        if self._saver is None:
            return None
        found = self._agreed(self._saver.folder)
        self._torn = found.torn
        if found.folder is None or found.checkpoint is None:
            return None
        # Agreed on before the trainer is asked: it may wait in a collective for a rank that sees no files.
        progress = raise_on_all_ranks(lambda: self._progress_of(found), self._context)
        raise_on_all_ranks(lambda: self._restore(found), self._context)
        history = TrainingHistory(**progress["history"])
        history.evaluations = [(int(step), sums) for step, sums in history.evaluations]
        self._resumed_from = history.steps
        if self._context.rank == 0:
            log_line(f"goes on from {found.folder}, {plural(history.steps, 'step')} done")
        return history

    def _agreed(self, folder: Path) -> FoundCheckpoint:
        """Return rank 0's finding on all ranks, because nodes may see a shared disk differently for a while."""
        found: list[Any] = [None]
        if self._context.rank == 0:
            found = [newest_whole(folder, self._last)]
            late = [step for step in steps_in(folder) if self._last is not None and step > self._last]
            if late:
                log_line(f"checkpoint of step {late[-1]}: skipped, it leaves no step to measure after the warm-up")
            for line in found[0].torn:
                log_line(f"a checkpoint is torn and passed over: {line}")
        assert self._saver is not None
        if self._saver.group is not None:
            dist.broadcast_object_list(found, group=self._saver.group, group_src=0)
        agreed: FoundCheckpoint = found[0]
        return agreed

    def _progress_of(self, found: FoundCheckpoint) -> dict[str, Any]:
        """Return the loop's state. Raises ValueError or OSError if this rank cannot resume from the checkpoint."""
        assert self._saver is not None and found.folder is not None and found.checkpoint is not None
        _check(found.checkpoint, found.folder, self._saver, self._trainer)
        progress = read_checkpoint_progress(found.folder)
        self._feed.load_state_dict(progress["feed"])
        return progress

    def _restore(self, found: FoundCheckpoint) -> None:
        assert self._saver is not None and found.folder is not None and found.checkpoint is not None
        if found.checkpoint.format == DEEPSPEED and isinstance(self._trainer, OwnCheckpoints):
            self._trainer.restore(found.folder)
        else:
            if self._context.job.cell.layout.strategy == "ddp" and self._saver.ranks > 2:
                self._arrange_buckets(found.checkpoint.step)
            state = self._trainer.state()
            load(found.folder, state)
            self._trainer.load(state)

    def _arrange_buckets(self, step: int) -> None:
        """Run a discarded step: its changes are overwritten by the restore.

        DistributedDataParallel rebuilds its buckets after its first step, and a gradient's position in a bucket
        determines the summation order over more than two ranks. Steps after a resume must use the same order as without
        an interruption.
        """
        batches = self._feed.step(step)
        for number, batch in enumerate(batches):
            self._trainer.backward(self._trainer.forward(batch), batch, last=number == len(batches) - 1)
        self._trainer.step(0.0)

    def after_step(self, history: TrainingHistory) -> float:
        """Begin a checkpoint. Returns the seconds that training was blocked."""
        assert self._saver is not None
        progress = {
            "history": _as_it_is(history),
            "feed": self._feed.state_dict(history.steps),
            EXPORT: self._export,
        }
        if isinstance(self._trainer, OwnCheckpoints):
            seconds = self._saver.save_with(self._trainer.save, history.steps, progress, DEEPSPEED)
        else:
            seconds = self._saver.save(self._trainer.state, history.steps, progress)
        self._blocked_seconds += seconds
        return seconds

    def close(self) -> None:
        """Wait for a checkpoint in progress."""
        if self._saver is not None:
            self._blocked_seconds += self._saver.wait()

    def figures(self) -> dict[str, Figure]:
        """Return figures of this attempt, after `close`.

        `checkpoint_seconds`: blocked time; background writing is separate.

        checkpoint_bytes: of the last one, known to rank 0.
        """
        if self._saver is None:
            return {}
        return {
            "resumed_from_step": self._resumed_from,
            "checkpoints_written": self._saver.count,
            "checkpoint_seconds": self._blocked_seconds,
            "checkpoint_writing_seconds": self._saver.writing_seconds,
            "checkpoint_bytes": self._saver.written.size_bytes if self._saver.written else None,
            "checkpoint_failures": len(self._saver.failures),
            "checkpoints_torn": len(self._torn),
        }


def _as_it_is(history: TrainingHistory) -> dict[str, Any]:
    """Return a copy that training does not modify."""
    values = {field.name: getattr(history, field.name) for field in fields(history)}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


def open_checkpoints(
    trainer: Trainer, feed: ResumableFeed, measurement: Measurement, context: Context, task: Task
) -> Checkpoints:
    """Open a measurement's checkpoints as configured by its workload; none in passes that do not train to the end.

    All ranks call it. Raises OSError, on all of them, for a folder that cannot be created.
    """
    workload = measurement.cell.workload
    assert isinstance(workload, TrainWorkload)
    if workload.checkpoint_every is None or context.measuring_pass != "timed":
        return Checkpoints(trainer, feed, context)
    if _GROUP not in context.kept:
        context.kept[_GROUP] = own_group()
    saver = Saver(
        _folder(measurement, context),
        kept=workload.checkpoints_kept,
        group=context.kept[_GROUP],
        background=workload.checkpoint_mode == "async",
        fingerprint=training_fingerprint(measurement, context),
    )
    last = None if workload.steps is None else workload.steps - context.job.measuring.warmup - 1
    export = _for_export(task, workload, context)
    return Checkpoints(trainer, feed, context, workload.checkpoint_every, saver, export, last)


def _for_export(task: Task, workload: TrainWorkload, context: Context) -> dict[str, Any]:
    """Return the data that turns the weights into a Hugging Face folder, wherever the checkpoint is copied."""
    tokenizer = tokenizer_path(context, workload.tokenizer)
    return {
        "config": task.config,
        "names": exported_names(task.model),
        "tokenizer": str(tokenizer) if tokenizer else None,
    }


def _folder(measurement: Measurement, context: Context) -> Path:
    """Return the folder shared by all attempts at a repeat and all jobs of the run."""
    told = context.job.checkpoints
    base = Path(told) if told is not None else context.paths.folder / "checkpoints"
    return base / f"{measurement.cell.key}-r{measurement.repeat}"


def training_fingerprint(measurement: Measurement, context: Context) -> dict[str, Any]:
    """Return, by dotted field, the values that a resuming run must share."""
    workload = measurement.cell.workload.model_dump(mode="json", include=set(_SAME))
    return {
        "model": measurement.cell.model,
        "measuring.seed": context.job.measuring.seed,
        **{f"workload.{name}": workload[name] for name in _SAME},
    }


def _check(checkpoint: Checkpoint, folder: Path, saver: Saver, trainer: Trainer) -> None:
    """Raise ValueError if the run cannot resume from the checkpoint."""
    for field, value in saver.fingerprint.items():
        there = checkpoint.fingerprint.get(field)
        if there != value:
            raise ValueError(
                f"{field}: {value!r} does not go on from {folder}, which was made with {there!r}; "
                "use the same, or remove the folder to begin anew"
            )
    if checkpoint.format != DEEPSPEED:
        return  # valid for all of torch's strategies; ZeRO raises itself when its state is requested
    if not isinstance(trainer, OwnCheckpoints):
        raise ValueError(f"layout.strategy: {folder} was written by ZeRO; go on with zero1, zero2 or zero3")
    if checkpoint.ranks != saver.ranks:
        raise ValueError(
            f"layout.dp: {folder} was made by {plural(checkpoint.ranks, 'rank')} of ZeRO; go on with as many"
        )


def save(
    folder: Path,
    state: TensorState,
    *,
    step: int,
    progress: Mapping[str, Any] | None = None,
    kept: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path | None:
    """Save synchronously, from all ranks; return the new checkpoint, or None if writing failed (which is logged).

    state: nested dictionaries of DTensors, of tensors replicated on all ranks, and of small values. group: of the
    ranks; none: all. For background checkpoints use a `Saver` with a separate group (`own_group`).
    """
    everybody = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    saver = Saver(Path(folder), kept=kept, group=group or everybody, background=False)
    saver.save(lambda: state, step, progress or {})
    return None if saver.failures else saver.whole(step)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, found by rank 0 for all ranks; None if there is none."""
    found = [newest_whole(Path(folder)).folder if _rank() == 0 else None]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found)
    return found[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
