"""Save and load the state of ranks through torch.distributed.checkpoint.

    saver = Saver(folder, kept=2, group=own_group())     # all ranks; own_group: gloo, beside the training's
    blocked_seconds = saver.save(state, step, progress)  # all ranks; continues in the background
    saver.wait()
    load(checkpoint, state)                              # in place, whatever the number of ranks that saved it

Training is blocked only for one copy of the state into reserved memory. A thread then writes: the ranks agree on the
distribution over a separate gloo group, so that it does not interfere with the training's collectives; each writes and
flushes its file; rank 0 writes the manifest and renames. A replicated tensor is copied and written by one rank. At most
one checkpoint is in progress: the next one waits, and the wait counts as blocked.

If writing fails (a full disk), training continues, the failure is logged and counted, and the previous checkpoint
stays. Values and tensor metadata are pickled: read only trusted checkpoints.
"""

import pickle
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from configs.common.files.flushing import flush_all
from engine.rank.failures import log_line, one_line
from engine.training.checkpoints.files import (
    PROGRESS,
    Checkpoint,
    StoredFile,
    forget_older,
    forget_unfinished,
    publish_checkpoint,
    step_folder,
    stored_file,
    unfinished_folder,
    write_progress,
)
from engine.training.checkpoints.staging import Staging, TensorState, is_value, leaves, shared_out, values_of
from engine.training.checkpoints.streams import DirectFiles

_VALUES, _RANDOM = "values", "random"
"""Parts of a checkpoint besides the state: all that is no tensor, and the random generators."""
GROUP_SECONDS = 1800.0
"""Time-out for another rank's slow disk; a rank that has ended aborts the wait at once."""


def own_group() -> dist.ProcessGroup | None:
    """Open a group of all ranks for checkpoints only; every rank calls it. None for a single process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_SECONDS))
    return group


@dataclass(frozen=True)
class _Written:
    """A written file in a rank's write results."""

    name: str
    file: StoredFile


class _Writer(FileSystemWriter):
    """Write under the unfinished name; finishing a checkpoint writes the manifest and renames."""

    def __init__(self, saver: "Saver", step: int, progress: Mapping[str, Any]) -> None:
        super().__init__(unfinished_folder(saver.folder, step), thread_count=1, overwrite=True, sync_files=False)
        self.fs = self._files = saver.files  # which flushes each to disk
        self._files.written.clear()
        self._saver, self._step, self._progress = saver, step, progress
        self.manifest: Checkpoint | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[Any] = list(super().write_data(plan, planner).wait())
        results += [_Written(path.name, file) for path, file in sorted(self._files.written.items())]
        if self._saver.rank == 0:
            results.append(_Written(PROGRESS, write_progress(Path(self.path), self._progress)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything: list[Any] = [result for of_rank in results for result in of_rank]
        files = {result.name: result.file for result in everything if isinstance(result, _Written)}
        super().finish(metadata, [[result for result in everything if not isinstance(result, _Written)]])
        files[".metadata"] = stored_file(Path(self.path) / ".metadata")
        self.manifest = self._saver.publish(self._step, files)


class Saver:
    """Saves into one folder; all ranks make the same calls. `written`: the last manifest, on rank 0.

    background: False: `save` returns when the checkpoint is complete. fingerprint: of the manifest. Raises OSError, on
    all ranks, for a folder that cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kept: int = 2,
        group: dist.ProcessGroup | None = None,
        background: bool = True,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        assert kept >= 1
        self.folder, self.kept, self.group, self.background = folder, kept, group, background
        self.fingerprint = dict(fingerprint or {})
        self.rank = dist.get_rank(group) if group else 0
        self.ranks = dist.get_world_size(group) if group else 1
        self.count = 0
        self.failures: list[str] = []
        self.written: Checkpoint | None = None
        self.writing_seconds = 0.0
        self.files = DirectFiles()
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._on_rank_0(self._prepare_folder)

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        forget_unfinished(self.folder)

    def save(self, state: Callable[[], TensorState], step: int, progress: Mapping[str, Any]) -> float:
        """Begin a checkpoint of the current state. Returns the seconds that the caller was blocked.

        progress: JSON-able; written in the background, so it must not change afterwards.
        Raises ValueError, on all ranks, for a state with tensors under a reserved name.
        """
        began = time.perf_counter()
        self.wait()
        whole = state()
        lost = [name for name in (_VALUES, _RANDOM) if any(not is_value(leaf) for _, leaf in leaves(whole.get(name)))]
        if lost:
            raise ValueError(f"state: {lost[0]!r} is a part of every checkpoint; give yours another name")
        mine = shared_out(whole, self.rank, self.ranks)
        mine[_RANDOM] = {f"rank_{self.rank}": _random_state()}
        if self.rank == 0:
            mine[_VALUES] = values_of(whole)
        if self.background:
            staged = self._staging.copied(mine)
            self._thread = threading.Thread(target=self._write, args=(staged, step, progress), daemon=True)
            self._thread.start()
        else:
            self._write(mine, step, progress)
        return time.perf_counter() - began

    def save_with(self, save: Callable[[Path], None], step: int, progress: Mapping[str, Any], format: str) -> float:
        """Make a checkpoint of files that `save(folder)` writes on all ranks. Blocks until it is complete."""
        began = time.perf_counter()
        self.wait()
        unfinished = unfinished_folder(self.folder, step)

        def published() -> None:
            flush_all(unfinished)
            paths = [path for path in sorted(unfinished.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(unfinished)): stored_file(path) for path in paths}
            files[PROGRESS] = write_progress(unfinished, progress)
            self.publish(step, files, format)

        with self._counted(step):
            self._on_rank_0(lambda: unfinished.mkdir())
            save(unfinished)
            self._on_rank_0(published)
        return time.perf_counter() - began

    def publish(self, step: int, files: Mapping[str, StoredFile], format: str = "torch") -> Checkpoint:
        """Publish the checkpoint on rank 0, when all files are written."""
        self.written = publish_checkpoint(
            self.folder, step, files, ranks=self.ranks, fingerprint=self.fingerprint, format=format
        )
        return self.written

    def whole(self, step: int) -> Path:
        """Return the folder of a step's complete checkpoint."""
        return step_folder(self.folder, step)

    def wait(self) -> float:
        """Wait until no checkpoint is in progress. Returns the seconds waited."""
        began = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return time.perf_counter() - began

    def _write(self, state: TensorState, step: int, progress: Mapping[str, Any]) -> None:
        with self._counted(step), _single_process_allowed(self.group), _without_zip_checksums():
            save_state(
                state,
                storage_writer=_Writer(self, step, progress),
                process_group=self.group,
                no_dist=self.group is None,
            )

    @contextmanager
    def _counted(self, step: int) -> Iterator[None]:
        """Count and log a failure inside: it costs the checkpoint, not the training."""
        began = time.perf_counter()
        try:
            yield
            self.count += 1
            if self.rank == self.ranks - 1:  # spares rank 0, which has other work
                forget_older(self.folder, step, self.kept)
        except (Exception, CheckpointException) as error:
            why = _first_cause(error)
            self.failures.append(why)
            log_line(f"the checkpoint of step {step} could not be written, the training goes on: {why}")
            if self.rank == 0:
                shutil.rmtree(unfinished_folder(self.folder, step), ignore_errors=True)
        finally:
            self.writing_seconds += time.perf_counter() - began

    def _on_rank_0(self, work: Callable[[], object]) -> None:
        """Run on rank 0; its exception is raised on all ranks."""
        problem: list[str | None] = [None]
        if self.rank == 0:
            try:
                work()
            except OSError as error:
                problem = [one_line(error)]
        if self.group:
            dist.broadcast_object_list(problem, group=self.group, group_src=0)
        if problem[0] is not None:
            raise OSError(problem[0])


@contextmanager
def _single_process_allowed(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Suppress torch's warning about saving without a process group, which is intended for one rank."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Disable zip checksums: the manifest covers the whole file, and torch's would take a fifth of the writing time."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _first_cause(error: BaseException) -> str:
    """Return the first cause of several ranks' errors, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {one_line(cause)}"
    return one_line(error)


def _random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def load(checkpoint: Path, state: TensorState) -> None:
    """Restore a state in place; each rank reads its part. Raises ValueError if it does not match.

    The state may come from any of torch's strategies on any number of ranks; only ranks that existed then get their
    random generators back.
    """
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {".".join(path): leaf for path, leaf in leaves(state) if not is_value(leaf)}
    place = f"{_RANDOM}.rank_{_rank()}"
    generators = {f"{place}.{name}": tensor for name, tensor in _random_state().items()}
    generators = {name: tensor for name, tensor in generators.items() if name in stored}
    wanted: TensorState = {**tensors, **generators, _VALUES: b""}
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ValueError(f"{checkpoint}: has no {missing[0]}; it is of another model or optimizer")
    try:
        with _single_process_allowed(None):
            load_state(wanted, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise ValueError(f"{checkpoint}: {_first_cause(error)}") from error
    _put_values(state, dict(pickle.loads(wanted[_VALUES])), checkpoint)
    for name, generator in generators.items():
        (torch.set_rng_state if name.endswith(".cpu") else torch.cuda.set_rng_state)(generator)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _put_values(state: TensorState, values: dict[str, Any], checkpoint: Path, path: tuple[str, ...] = ()) -> None:
    for key, value in state.items():
        here = (*path, str(key))
        name = ".".join(here)
        if isinstance(value, dict):
            _put_values(value, values, checkpoint, here)
        elif is_value(value):
            if name not in values:
                raise ValueError(f"{checkpoint}: has no {name}; it is of another model or optimizer")
            if isinstance(value, Tensor):
                value.detach().copy_(values[name])  # it may be a weight
            else:
                state[key] = values[name]


def read_tensors(checkpoint: Path, part: str) -> dict[str, Tensor]:
    """Read all tensors of a part of a state (`model`), unsharded, by name. Needs no process group."""
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(what.size, dtype=what.properties.dtype)
        for name, what in stored.items()
        if name.startswith(f"{part}.") and isinstance(what, TensorStorageMetadata)
    }
    wanted: TensorState = {**tensors, _VALUES: b""}
    with _single_process_allowed(None):
        load_state(wanted, storage_reader=reader, no_dist=True)
    numbers = {name: value for name, value in pickle.loads(wanted[_VALUES]) if isinstance(value, Tensor)}
    tensors |= {name: value for name, value in numbers.items() if name.startswith(f"{part}.")}
    return {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items()}
