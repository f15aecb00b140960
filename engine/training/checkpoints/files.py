"""Checkpoint folders: atomic publication, detection of damaged ones, retention of the last few. No torch.

<folder>/step_00000120/           a whole checkpoint, by the steps that were done when it was made
    checkpoint.json               the manifest: step, ranks, what was trained, size and CRC-32 of every other file
    progress.json                 the loop's state: losses so far, position in the data
    .metadata  __<rank>_0.distcp  tensors (torch.distributed.checkpoint)
<folder>/.step_00000130.unfinished/     being written, or left by a process that was killed

A checkpoint is written under its unfinished name, flushed to disk, and renamed when all ranks are done; the rename
publishes it. Later damage is detected by size and checksum when checkpoints are searched:

    found = newest_whole(folder)          # found.checkpoint, and found.torn: a line on each skipped one
"""

import json
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from configs.common.base import Frozen, content_hash, utc_now, write_atomically
from configs.common.files.flushing import flush_file
from configs.common.files.reading import PLAN_BYTES, open_regular, read_bytes

MANIFEST = "checkpoint.json"
PROGRESS = "progress.json"
EXPORT = "export"
"""Key of the progress: data that a Hugging Face folder needs besides the weights."""
_PIECE_BYTES = 4 << 20
_STEP = re.compile(r"step_(\d+)")


class StoredFile(Frozen):
    """Size and checksum of a file when it was written."""

    size_bytes: int
    crc32: int


class Checkpoint(Frozen):
    """The manifest. `fingerprint`: by field name, the model and data; a resuming run must have the same."""

    format: str = Field(description="torch, or deepspeed for ZeRO's own files")
    step: int
    ranks: int
    made_at: str
    fingerprint: dict[str, Any]
    files: dict[str, StoredFile]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest complete checkpoint of a folder, its manifest, and the defect of each newer one."""

    folder: Path | None
    checkpoint: Checkpoint | None
    torn: tuple[str, ...] = ()


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of a step."""
    return folder / f"step_{step:08d}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint being written."""
    return folder / f".step_{step:08d}.unfinished"


def steps_in(folder: Path) -> list[int]:
    """Return the steps with checkpoints, complete or damaged, in order."""
    if not folder.is_dir():
        return []
    found = [_STEP.fullmatch(path.name) for path in folder.iterdir()]
    return sorted(int(match[1]) for match in found if match)


def stored_file(path: Path) -> StoredFile:
    """Return size and checksum of a file.

    CRC-32 detects disk errors and crashes at a fraction of the cost of a hash.
    """
    size, crc = 0, 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return StoredFile(size_bytes=size, crc32=crc)


def write_progress(unfinished: Path, progress: Mapping[str, Any]) -> StoredFile:
    """Write the loop's state. Floats round-trip exactly, infinities included."""
    path = unfinished / PROGRESS
    write_atomically(path, json.dumps(progress))
    return stored_file(path)


def read_checkpoint_progress(checkpoint: Path) -> dict[str, Any]:
    """Read the loop's state."""
    progress: dict[str, Any] = json.loads(read_bytes(checkpoint / PROGRESS, PLAN_BYTES))
    return progress


def publish_checkpoint(
    folder: Path,
    step: int,
    files: Mapping[str, StoredFile],
    *,
    ranks: int,
    fingerprint: Mapping[str, Any],
    format: str = "torch",
) -> Checkpoint:
    """Publish the unfinished checkpoint of a step. One rank calls it, when all files are on disk.

    Raises OSError, also if it does not see another node's files.
    """
    unfinished, whole = unfinished_folder(folder, step), step_folder(folder, step)
    unseen = [name for name in files if not (unfinished / name).exists()]
    if unseen:
        raise OSError(f"{unfinished / unseen[0]} is not seen here; checkpoints need a folder that all nodes share")
    manifest = Checkpoint(
        format=format, step=step, ranks=ranks, made_at=utc_now(), fingerprint=dict(fingerprint), files=dict(files)
    )
    content = manifest.model_dump(mode="json")
    write_atomically(unfinished / MANIFEST, json.dumps({**content, "hash": content_hash(content)}))
    flush_file(unfinished)
    if whole.exists():  # damaged, or too near the end to resume from
        shutil.rmtree(whole)
    unfinished.rename(whole)
    flush_file(folder)
    return manifest


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify the manifest of a checkpoint. Raises ValueError naming the files that differ."""
    try:
        content = json.loads(read_bytes(folder / MANIFEST, PLAN_BYTES))
        told = content.pop("hash")
        manifest = Checkpoint.model_validate(content)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError) as error:
        raise ValueError(f"{folder.name}: {MANIFEST} cannot be read ({type(error).__name__})") from error
    if content_hash(content) != told:
        raise ValueError(f"{folder.name}: {MANIFEST} was changed")
    for name, expected in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
            if size != expected.size_bytes:
                raise ValueError(f"{folder.name}: {name} has {size} bytes instead of {expected.size_bytes}")
            if stored_file(folder / name) != expected:
                raise ValueError(f"{folder.name}: {name} was changed")
        except OSError as error:
            raise ValueError(f"{folder.name}: {name}: {error.strerror}") from error
    return manifest


def newest_whole(folder: Path, last: int | None = None) -> FoundCheckpoint:
    """Return the newest valid checkpoint, of at most the step `last`; reads every file of it."""
    torn: list[str] = []
    for step in reversed([step for step in steps_in(folder) if last is None or step <= last]):
        try:
            return FoundCheckpoint(step_folder(folder, step), read_checkpoint(step_folder(folder, step)), tuple(torn))
        except ValueError as error:
            torn.append(str(error))
    return FoundCheckpoint(None, None, tuple(torn))


def forget_older(folder: Path, newest_step: int, kept: int) -> None:
    """Remove all but the last `kept` checkpoints up to a complete step."""
    for step in [step for step in steps_in(folder) if step <= newest_step][:-kept]:
        shutil.rmtree(step_folder(folder, step), ignore_errors=True)


def forget_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints of ended processes."""
    for path in folder.glob(".step_*.unfinished"):
        shutil.rmtree(path, ignore_errors=True)
