"""Select the least-loaded accelerator that no other run has locked.

    claim = claim_device(None)          # or "cuda:1", "cpu"
    claim.device                        # torch.device("cuda", 2); torch.device("cpu") on a machine without GPUs
    claim.release()

A claim is a kernel lock on a file per device, so that concurrent runs get different devices, and a killed run leaves no
lock behind. A device requested by name is always granted, and marked as taken for others.
"""

import fcntl
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from configs.common.system.lock_files import open_lock_file
from engine.planner.accelerators import device_text, local_accelerators

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VisibleDevice:
    """One visible GPU: its local index, its global name, free bytes."""

    index: int
    uuid: str
    free_bytes: int


class Claim:
    """A device, and the lock that keeps it for this process while this exists and is not `released`.

    `lock` is None without a lock.
    """

    def __init__(self, device: torch.device, lock: int | None = None) -> None:
        self.device = device
        self._lock = lock
        self.released = False

    def release(self) -> None:
        """Release the device; may be called again."""
        self.released = True
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        # As of an orchestrator whose `initialize` has failed: nobody could release the device any more.
        self.release()


def claim_device(wanted: str | None, accelerators: Sequence[VisibleDevice] | None = None) -> Claim:
    """Return the wanted device, or an idle one. `accelerators` are the candidates (None: all visible).

    Raises ValueError if the wanted one does not exist, or all are locked by other runs.
    """
    found = list(visible_accelerators() if accelerators is None else accelerators)
    if wanted is not None:
        return _claim_named(wanted, found)
    if not found:
        listed = local_accelerators() if accelerators is None else ()
        if listed:
            raise ValueError(
                f"device: this machine has {device_text(listed)}, but torch {torch.__version__} finds no GPU. Install "
                "the build of torch for them, or use device='cpu'"
            )
        return Claim(torch.device("cpu"))
    for accelerator in sorted(found, key=lambda one: (-one.free_bytes, one.index)):
        lock = _lock(accelerator, fcntl.LOCK_EX)
        if lock is not None:
            return Claim(torch.device("cuda", accelerator.index), lock)
    raise ValueError(
        f"device: all {len(found)} accelerators are taken by other runs; wait for one to end, or name the one to "
        "share, such as device='cuda:0'"
    )


def visible_accelerators() -> list[VisibleDevice]:
    """Return the GPUs visible to torch, with their free memory; creates no context on them."""
    if not torch.cuda.is_available():
        return []
    free = _free_bytes_by_uuid()
    found = []
    for index in range(torch.cuda.device_count()):
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".replace("GPU-GPU-", "GPU-")
        # A device with unknown memory comes last, but can be selected.
        found.append(VisibleDevice(index, uuid, free.get(uuid, 0)))
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
        with suppress(ValueError):  # "[N/A]" if the driver does not report it
            free[uuid.strip()] = int(mebibytes) << 20
    return free


def _claim_named(wanted: str, found: list[VisibleDevice]) -> Claim:
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


def _lock(accelerator: VisibleDevice, way: int) -> int | None:
    """A descriptor that holds the device's lock; None where another process has it."""
    descriptor = open_lock_file(f"device-{accelerator.uuid}")
    try:
        fcntl.flock(descriptor, way | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
