"""Checkpoints of a training visit: made every so many steps, gone on from by the next attempt.

    checkpoints = open_checkpoints(trainer, feed, visit, context, task)    # all ranks
    history = checkpoints.resume() or History()
    if checkpoints.due(history.steps):
        blocked_seconds = checkpoints.after_step(history)             # the history is the same on all ranks here
    checkpoints.close()
    figures = checkpoints.figures()

They lie in <run>/checkpoints/<cell key>-r<repeat>, which all attempts at a repeat share (on a cluster it is a folder
that all nodes see). A checkpoint holds weights and optimizer by the names of the plain model, the history, the state
of the data and the random generators. The same number of ranks goes on bit by bit; another number, or another of
none, ddp and fsdp, within rounding: copy the folder to the other cell's. ZeRO writes its own files and goes on with
as many ranks as made them.

For training loops of one's own `save`, `latest` and `load` need no more than a folder and, with several ranks, the
default process group:

    load(found, state) if (found := latest(folder)) else None
    save(folder, state, step=step, progress={"epoch": 3})
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from configs.job import Visit
from configs.record import Figure
from configs.training import TrainWorkload
from engine.agreement import together
from engine.context import Context
from engine.failures import log_line
from engine.tokens import tokenizer_path
from engine.training.checkpoints.files import EXPORT, Checkpoint, Found, newest_whole, read_progress
from engine.training.checkpoints.saving import Saver, load, own_group
from engine.training.checkpoints.staging import State
from engine.training.trainer import Batch, History, Task, Trainer

__all__ = ["Checkpoints", "OwnCheckpoints", "latest", "load", "open_checkpoints", "read_progress", "save"]

TORCH, DEEPSPEED = "torch", "deepspeed"
_GROUP = "checkpoint_group"
_SAME = ("task", "data", "validation_data", "tokenizer", "global_batch_size", "sequence_length", "optimizer",
         "heldout_share")  # fmt: skip
"""Fields of the workload that a run must share with the one that it goes on with."""


@runtime_checkable
class OwnCheckpoints(Protocol):
    """A trainer whose library keeps checkpoints in files of its own. All ranks call; the folder is there."""

    def save(self, folder: Path) -> None:
        """Write; return when this rank's files are written."""

    def restore(self, folder: Path) -> None:
        """Take up. Raises ValueError where another number of ranks wrote them."""


class Feed(Protocol):
    """What checkpoints ask of the data."""

    def step(self, number: int) -> list[Batch]:
        """Micro-batches of this rank in a step, counted from 0."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """JSON-able: where it is when so many steps are done."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there. Raises ValueError for other data."""


class Checkpoints:
    """Of one visit; without a `saver` there are none, and every call returns at once."""

    def __init__(
        self,
        trainer: Trainer,
        feed: Feed,
        context: Context,
        every: int | None = None,
        saver: Saver | None = None,
        export: dict[str, Any] | None = None,
    ) -> None:
        self._trainer, self._feed, self._context = trainer, feed, context
        self._every, self._saver, self._export = every, saver, export
        self._blocked_seconds = 0.0
        self._resumed_from: int | None = None
        self._torn: tuple[str, ...] = ()

    def due(self, steps_done: int) -> bool:
        """Whether a checkpoint is to be made after so many steps."""
        return self._saver is not None and self._every is not None and steps_done % self._every == 0

    def resume(self) -> History | None:
        """Bring trainer and data to the newest whole checkpoint; None where there is none.

        Raises ValueError, on all ranks, for a checkpoint of another model, data or workload.
        """
        if self._saver is None:
            return None
        found = self._agreed(self._saver.folder)
        self._torn = found.torn
        if found.folder is None or found.checkpoint is None:
            return None
        progress = together(lambda: self._take_up(found), self._context)
        history = History(**progress["history"])
        history.evaluations = [(int(step), sums) for step, sums in history.evaluations]
        self._resumed_from = history.steps
        if self._context.rank == 0:
            log_line(f"goes on from {found.folder}, {history.steps} steps done")
        return history

    def _agreed(self, folder: Path) -> Found:
        """What rank 0 finds, on all ranks: a disk that nodes share may show them different things for a while."""
        found: list[Any] = [None]
        if self._context.rank == 0:
            found = [newest_whole(folder)]
            for line in found[0].torn:
                log_line(f"a checkpoint is torn and passed over: {line}")
        assert self._saver is not None
        if self._saver.group is not None:
            dist.broadcast_object_list(found, group=self._saver.group, group_src=0)
        agreed: Found = found[0]
        return agreed

    def _take_up(self, found: Found) -> dict[str, Any]:
        assert self._saver is not None and found.folder is not None and found.checkpoint is not None
        _check(found.checkpoint, found.folder, self._saver, self._trainer)
        progress = read_progress(found.folder)
        self._feed.load_state_dict(progress["feed"])
        if found.checkpoint.format == DEEPSPEED and isinstance(self._trainer, OwnCheckpoints):
            self._trainer.restore(found.folder)
        else:
            if self._context.job.cell.layout.strategy == "ddp" and self._saver.ranks > 2:
                self._arrange_buckets(found.checkpoint.step)
            state = self._trainer.state()
            load(found.folder, state)
            self._trainer.load(state)
        return progress

    def _arrange_buckets(self, step: int) -> None:
        """Make a step that is forgotten: whatever it changes is loaded over.

        DistributedDataParallel orders its buckets anew after its first step, and where a gradient lies in a bucket
        decides in which order more than two ranks' are summed. All steps that come after a first one must find the
        order that they would have found without an interruption.
        """
        batches = self._feed.step(step)
        for number, batch in enumerate(batches):
            self._trainer.backward(self._trainer.forward(batch), batch, last=number == len(batches) - 1)
        self._trainer.step(0.0)

    def after_step(self, history: History) -> float:
        """Begin a checkpoint. Seconds that this kept the training."""
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
        """Wait for the one that is under way."""
        if self._saver is not None:
            self._blocked_seconds += self._saver.wait()

    def figures(self) -> dict[str, Figure]:
        """Of this attempt, after `close`. `checkpoint_seconds` blocked; what was written behind is told beside.

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


def _as_it_is(history: History) -> dict[str, Any]:
    """A copy that the training does not add to."""
    values = {field.name: getattr(history, field.name) for field in fields(history)}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


def open_checkpoints(trainer: Trainer, feed: Feed, visit: Visit, context: Context, task: Task) -> Checkpoints:
    """Checkpoints of a visit as its workload asks for them; none in passes that do not train to the end.

    All ranks call it. Raises OSError, on all of them, for a folder that cannot be made.
    """
    workload = visit.cell.workload
    assert isinstance(workload, TrainWorkload)
    if workload.checkpoint_every is None or context.measuring_pass != "timed":
        return Checkpoints(trainer, feed, context)
    if _GROUP not in context.kept:
        context.kept[_GROUP] = own_group()
    saver = Saver(
        _folder(visit, context),
        kept=workload.checkpoints_kept,
        group=context.kept[_GROUP],
        background=workload.checkpoint_mode == "async",
        fingerprint=fingerprint(visit, context),
    )
    return Checkpoints(trainer, feed, context, workload.checkpoint_every, saver, _for_export(task, workload, context))


def _for_export(task: Task, workload: TrainWorkload, context: Context) -> dict[str, Any]:
    """What makes a Hugging Face folder of the weights, wherever the checkpoint will be by then."""
    tokenizer = tokenizer_path(context, workload.tokenizer)
    return {
        "config": task.config,
        "names": [name for name, _ in task.model.named_parameters()],
        "tokenizer": str(tokenizer) if tokenizer else None,
    }


def _folder(visit: Visit, context: Context) -> Path:
    """Shared by all attempts at a repeat, by all jobs of the run."""
    told = context.job.checkpoints
    base = Path(told) if told is not None else context.paths.folder / "checkpoints"
    return base / f"{visit.cell.key}-r{visit.repeat}"


def fingerprint(visit: Visit, context: Context) -> dict[str, Any]:
    """By dotted field what a run must share with the one that it goes on with."""
    workload = visit.cell.workload.model_dump(mode="json", include=set(_SAME))
    return {
        "model": visit.cell.model,
        "measuring.seed": context.job.measuring.seed,
        **{f"workload.{name}": workload[name] for name in _SAME},
    }


def _check(checkpoint: Checkpoint, folder: Path, saver: Saver, trainer: Trainer) -> None:
    """Raises ValueError for what cannot be gone on from."""
    for field, value in saver.fingerprint.items():
        there = checkpoint.fingerprint.get(field)
        if there != value:
            raise ValueError(
                f"{field}: {value!r} does not go on from {folder}, which was made with {there!r}; "
                "use the same, or remove the folder to begin anew"
            )
    if checkpoint.format != DEEPSPEED:
        return  # for all strategies of torch's; ZeRO refuses by itself when it is asked for its state
    if not isinstance(trainer, OwnCheckpoints):
        raise ValueError(f"layout.strategy: {folder} was written by ZeRO; go on with zero1, zero2 or zero3")
    if checkpoint.ranks != saver.ranks:
        raise ValueError(f"layout.dp: {folder} was made by {checkpoint.ranks} ranks of ZeRO; go on with as many")


def save(
    folder: Path,
    state: State,
    *,
    step: int,
    progress: Mapping[str, Any] | None = None,
    kept: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path | None:
    """Save at once, from all ranks; the new checkpoint, or None where it could not be written (which is logged).

    state: nested dictionaries of DTensors, of tensors that all ranks hold alike, and of small values. group: of the
    ranks; none: all. For checkpoints behind the training use a `Saver` with a group of its own (`own_group`).
    """
    everybody = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    saver = Saver(Path(folder), kept=kept, group=group or everybody, background=False)
    saver.save(lambda: state, step, progress or {})
    return None if saver.failures else saver.whole(step)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, found by rank 0 for all ranks; None where there is none."""
    found = [newest_whole(Path(folder)).folder if _rank() == 0 else None]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found)
    return found[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
