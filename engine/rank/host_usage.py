"""Linux statistics of this process and machine: CPU time, memory, storage, and the environment.

Stateless readers of /proc (proc(5)); each documents its unit. Unavailable values are None.
"""

import os
import platform
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.common.secrets import shown_value
from configs.common.system.proc import read_fields
from configs.common.system.versions import version_of
from engine.planner.local import cpu_model

if TYPE_CHECKING:
    import torch

RECORDED_PREFIXES = (
    *("NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE", "RCCL_", "HIP_", "ROCR_", "HSA_", "TRITON_"),
    *("OMP_", "MKL_", "GLOO_", "TORCH_", "PYTORCH_", "MALLOC_", "KMP_"),
)
"""Of variables that libraries read and that can change a measurement; of NVIDIA_*, most are a container's."""
_CLEAR_REFS = Path("/proc/self/clear_refs")
_peaks = {"cannot be reset": False}


class StorageBytes(NamedTuple):
    """Bytes that this process read from and wrote to storage since its start."""

    read: int
    written: int


def process_cpu_seconds() -> float:
    """Return CPU seconds, user and system, of all threads of this process, without children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_busy_seconds(cores: Iterable[int]) -> float | None:
    """Return CPU seconds since boot during which the given cores were busy, stolen time included.

    A virtual machine's stolen time was requested here and used by others, so it counts as busy. The kernel counts in
    ticks (usually 10 ms).
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
    """Return this process's memory in RAM (VmRSS)."""
    return _status_bytes("VmRSS")


def peak_memory_bytes() -> int | None:
    """Return the peak of this process's memory in RAM since its start or the last reset (VmHWM).

    None where a reset was tried in vain: it would be the peak of something else.
    """
    return None if _peaks["cannot be reset"] else _status_bytes("VmHWM")


def reset_peak_memory() -> None:
    """Reset the peak to the current resident memory (writes 5 to /proc/self/clear_refs), where the kernel lets it.

    It does not in sandboxes (gVisor), without CONFIG_PROC_PAGE_MONITOR, and for a Python with capabilities of its own
    (`setcap cap_perfmon`), whose files in /proc are root's.
    """
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        _peaks["cannot be reset"] = True


def take_peak(device: "torch.device") -> int | None:
    """Return the peak so far, in bytes, and reset it: of the device's memory on a GPU, else of this process."""
    if device.type == "cuda":
        import torch

        peak = int(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    host_peak = peak_memory_bytes()
    reset_peak_memory()
    return host_peak


def _status_bytes(name: str) -> int | None:
    field = read_fields("/proc/self/status").get(name)
    return int(field.split()[0]) * 1024 if field else None


def storage_bytes() -> StorageBytes | None:
    """What this process moved to and from storage; the page cache's hits are not in it."""
    fields = read_fields("/proc/self/io")
    return StorageBytes(read=int(fields["read_bytes"]), written=int(fields["write_bytes"])) if fields else None


def machine_memory_bytes() -> int:
    """Return the machine's RAM."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def variables_in_force(names: Iterable[str]) -> dict[str, str]:
    """Return environment variables that can change a measurement, and the named ones; secrets are hidden."""
    chosen = {name for name in os.environ if name.startswith(RECORDED_PREFIXES)} | (set(names) & set(os.environ))
    return {name: shown_value(name, os.environ[name]) for name in sorted(chosen)}


def measured_environment(variable_names: Iterable[str], cores: int) -> dict[str, Any]:
    """Return machine, versions and settings for a record. `cores`: number that this job may use.

    The launcher passes the code's commit through the environment.
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
