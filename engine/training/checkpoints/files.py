"""Checkpoints as folders: whole or not there, told apart from torn ones, the last few kept. No torch here.

<folder>/step_00000120/           a whole checkpoint, by the steps that were done when it was made
    checkpoint.json               the manifest: step, ranks, what was trained, size and CRC-32 of every other file
    progress.json                 what the loop knows: losses so far, the state of the data
    .metadata  __<rank>_0.distcp  tensors (torch.distributed.checkpoint)
<folder>/.step_00000130.unfinished/     being written, or left by a process that was killed

A checkpoint is written under its unfinished name, flushed to disk, and renamed when all ranks are done; the rename is
the moment in which it begins to exist. What a disk did to it later is found by size and checksum when it is looked
for:

    found = newest_whole(folder)          # found.checkpoint, and found.torn: lines on those that were passed over
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from configs.base import Frozen, content_hash, utc_now, write_atomically

MANIFEST = "checkpoint.json"
PROGRESS = "progress.json"
EXPORT = "export"
"""Of the progress: what a Hugging Face folder needs beside the weights."""
_PIECE_BYTES = 4 << 20
_STEP = re.compile(r"step_(\d+)")


class StoredFile(Frozen):
    """What a file was when it was written."""

    size_bytes: int
    crc32: int


class Checkpoint(Frozen):
    """The manifest. `fingerprint`: by field name what was trained on what; another run must have the same."""

    format: str = Field(description="torch, or deepspeed for ZeRO's own files")
    step: int
    ranks: int
    made_at: str
    fingerprint: dict[str, Any]
    files: dict[str, StoredFile]

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint of a folder, its manifest, and what is wrong with each newer one."""

    folder: Path | None
    checkpoint: Checkpoint | None
    torn: tuple[str, ...] = ()


def step_folder(folder: Path, step: int) -> Path:
    """Where the whole checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Where it lies while it is written."""
    return folder / f".step_{step:08d}.unfinished"


def steps_in(folder: Path) -> list[int]:
    """Steps that there are checkpoints of, whole or torn, in order."""
    if not folder.is_dir():
        return []
    found = [_STEP.fullmatch(path.name) for path in folder.iterdir()]
    return sorted(int(match[1]) for match in found if match)


def stored_file(path: Path) -> StoredFile:
    """Size and checksum of a file. CRC-32 finds what disks and crashes do, at a fraction of the cost of a hash."""
    size, crc = 0, 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return StoredFile(size_bytes=size, crc32=crc)


def write_progress(unfinished: Path, progress: Mapping[str, Any]) -> StoredFile:
    """Leave what the loop knows. Floats come back as the very same ones, infinities included."""
    path = unfinished / PROGRESS
    write_atomically(path, json.dumps(progress))
    return stored_file(path)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What the loop knew."""
    progress: dict[str, Any] = json.loads((checkpoint / PROGRESS).read_bytes())
    return progress


def publish(
    folder: Path,
    step: int,
    files: Mapping[str, StoredFile],
    *,
    ranks: int,
    fingerprint: Mapping[str, Any],
    format: str = "torch",
) -> Checkpoint:
    """Make the unfinished checkpoint of a step a whole one. One rank calls it, when all files are on disk.

    Raises OSError, also where it does not see what another node has written.
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
    flush_folder(unfinished)
    if whole.exists():  # torn, or it would have been gone on from
        shutil.rmtree(whole)
    unfinished.rename(whole)
    flush_folder(folder)
    return manifest


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The manifest of a checkpoint whose files are all as they were written. Raises ValueError saying what is not."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        told = content.pop("hash")
        manifest = Checkpoint.model_validate(content)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ValidationError) as error:
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


def newest_whole(folder: Path) -> Found:
    """The newest checkpoint that can be believed; every file of it is read for that."""
    torn: list[str] = []
    for step in reversed(steps_in(folder)):
        try:
            return Found(step_folder(folder, step), read_checkpoint(step_folder(folder, step)), tuple(torn))
        except ValueError as error:
            torn.append(str(error))
    return Found(None, None, tuple(torn))


def forget_older(folder: Path, newest_step: int, kept: int) -> None:
    """Remove all but the last `kept` of those up to a step that is whole: the others serve nobody any more."""
    for step in [step for step in steps_in(folder) if step <= newest_step][:-kept]:
        shutil.rmtree(step_folder(folder, step), ignore_errors=True)


def forget_unfinished(folder: Path) -> None:
    """Remove what processes that are gone had begun to write."""
    for path in folder.glob(".step_*.unfinished"):
        shutil.rmtree(path, ignore_errors=True)
