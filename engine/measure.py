"""What Linux says of this process and this machine: CPU time, memory, storage, and the environment.

Readers of /proc (proc(5)) without state; each says its unit. What cannot be read is None.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.planner.local import cpu_model

if TYPE_CHECKING:
    import torch

RECORDED_PREFIXES = ("NCCL_", "CUDA_", "OMP_", "MKL_", "GLOO_", "TORCH_", "PYTORCH_", "MALLOC_", "KMP_")
HIDDEN = "(hidden)"
# A whole word at the end of a part, so that TOKENIZERS_PARALLELISM is none.
_SECRET = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE)


class StorageBytes(NamedTuple):
    """Bytes that this process caused to be fetched from, and sent to, storage since it began."""

    read: int
    written: int


def process_cpu_seconds() -> float:
    """CPU seconds, user and system, of all threads of this process; children not counted."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_busy_seconds(cores: Iterable[int]) -> float | None:
    """CPU seconds since boot during which the given cores worked for anybody, stolen time included.

    A virtual machine's stolen time was wanted here and used by others, so it counts as busy. The kernel
    counts in ticks (usually 10 ms).
    """
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    found = 0
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, *fields = line.split()
        if name in wanted:
            found += 1
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") if found == len(wanted) else None


def resident_memory_bytes() -> int | None:
    """Memory of this process that is in RAM now (VmRSS)."""
    return _status_bytes("VmRSS")


def peak_memory_bytes() -> int | None:
    """The most memory of this process that was in RAM since it began or the peak was reset (VmHWM)."""
    return _status_bytes("VmHWM")


def reset_peak_memory() -> None:
    """Let the peak begin anew at what is resident now (writing 5 to /proc/self/clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def take_peak(device: "torch.device") -> int | None:
    """The peak so far, in bytes: of the device's memory on a GPU, else of this process. It begins anew."""
    if device.type == "cuda":
        import torch

        peak = int(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    host_peak = peak_memory_bytes()
    reset_peak_memory()
    return host_peak


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def storage_bytes() -> StorageBytes | None:
    """What this process moved to and from storage; the page cache's hits are not in it."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # some containers do not allow it
        return None
    fields = dict(line.split(": ", 1) for line in lines)
    return StorageBytes(read=int(fields["read_bytes"]), written=int(fields["write_bytes"]))


def machine_memory_bytes() -> int:
    """RAM of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_secret(name: str) -> bool:
    """Whether a variable's name looks like that of a secret."""
    return _SECRET.search(name) is not None


def variables_in_force(names: Iterable[str]) -> dict[str, str]:
    """Environment variables that can change a measurement, and the named ones; secrets' values hidden."""
    chosen = {name for name in os.environ if name.startswith(RECORDED_PREFIXES)} | (set(names) & set(os.environ))
    return {name: HIDDEN if is_secret(name) else os.environ[name] for name in sorted(chosen)}


def version_of(distribution: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(variable_names: Iterable[str], cores: int) -> dict[str, Any]:
    """Machine, versions and settings, as kept in a record. `cores` is how many this job may use.

    The code's commit comes from the launcher, which has git and time for it, through the environment.
    """
    dirty = os.environ.get("RANKWISE_DIRTY")
    return {
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "platform": platform.platform(),
        "kernel": platform.release(),
        "cpu_model": cpu_model(),
        "cores": cores,
        "memory_bytes": machine_memory_bytes(),
        "hostname": socket.gethostname(),
        "commit": os.environ.get("RANKWISE_COMMIT"),
        "dirty": None if dirty is None else dirty == "1",
        "variables": variables_in_force(variable_names),
    }
