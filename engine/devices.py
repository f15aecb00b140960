"""Which accelerator a process takes when it was not told: the idlest that no other run has taken.

    claim = claim_device(None)          # or "cuda:1", "cpu"
    claim.device                        # torch.device("cuda", 2); torch.device("cpu") where there is no GPU
    claim.release()

A claim is a lock of the kernel's on a file for each device, so that runs which start at the same moment take
different ones, and a run that dies leaves nothing behind. A device that was asked for by name is given in any case;
it is marked as taken, so that others stay away.
"""

import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accelerator:
    """One GPU that this process sees: its number here, the name that all processes know it by, bytes free."""

    index: int
    uuid: str
    free_bytes: int


class Claim:
    """A device, and the lock that keeps it for this process. `lock` is None where nothing is locked."""

    def __init__(self, device: torch.device, lock: int | None = None) -> None:
        self.device = device
        self._lock = lock

    def release(self) -> None:
        """Let others have the device; another time does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def claim_device(wanted: str | None, accelerators: Sequence[Accelerator] | None = None) -> Claim:
    """The wanted device, or an idle one. `accelerators` are those to choose from (None: all that are seen).

    Raises ValueError where the wanted one is not there, or all are taken by other runs.
    """
    found = list(visible_accelerators() if accelerators is None else accelerators)
    if wanted is not None:
        return _claim_named(wanted, found)
    if not found:
        return Claim(torch.device("cpu"))
    for accelerator in sorted(found, key=lambda one: (-one.free_bytes, one.index)):
        lock = _lock(accelerator, fcntl.LOCK_EX)
        if lock is not None:
            return Claim(torch.device("cuda", accelerator.index), lock)
    raise ValueError(
        f"device: all {len(found)} accelerators are taken by other runs; wait for one to end, or name the one to "
        "share, such as device='cuda:0'"
    )


def visible_accelerators() -> list[Accelerator]:
    """The GPUs that torch sees, with their free memory; asking makes no context on them."""
    if not torch.cuda.is_available():
        return []
    free = _free_bytes_by_uuid()
    found = []
    for index in range(torch.cuda.device_count()):
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".replace("GPU-GPU-", "GPU-")
        # A device whose memory nobody tells of comes last, but can be had.
        found.append(Accelerator(index, uuid, free.get(uuid, 0)))
    return found


def _free_bytes_by_uuid() -> dict[str, int]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    query = [command, "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    free = {}
    for line in lines:
        uuid, _, mebibytes = line.partition(",")
        with suppress(ValueError):  # "[N/A]" where the driver does not tell
            free[uuid.strip()] = int(mebibytes) << 20
    return free


def _claim_named(wanted: str, found: list[Accelerator]) -> Claim:
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"device: {wanted!r} is not a device of torch; use cpu or cuda:0, or leave it out") from None
    if device.type != "cuda":
        return Claim(device)
    index = device.index or 0
    accelerator = next((one for one in found if one.index == index), None)
    if accelerator is None:
        here = ", ".join(f"cuda:{one.index}" for one in found) or "no GPU is; use cpu"
        raise ValueError(f"device: {wanted} is not here; there is: {here}")
    lock = _lock(accelerator, fcntl.LOCK_SH)
    if lock is None:
        _log.warning("device %s is taken by another run and will be shared with it", wanted)
    return Claim(torch.device("cuda", index), lock)


def _lock(accelerator: Accelerator, way: int) -> int | None:
    """A descriptor that holds the device's lock; None where another process has it."""
    path = _lock_folder() / f"rankwise-device-{accelerator.uuid}.lock"
    # Reading is enough for a lock, and all that another user's file allows.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, way | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _lock_folder() -> Path:
    """RANKWISE_LOCKS names it, as for the launcher's locks; else the machine's usual place."""
    named = os.environ.get("RANKWISE_LOCKS")
    folders = [Path(named)] if named else [Path("/run/lock"), Path(tempfile.gettempdir())]
    for folder in folders:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError(f"{' and '.join(map(str, folders))} cannot be written: no place for the machine's locks")
