"""Whether `perf` or `nsys` can be run on this machine, asked before anything is submitted.

problem = why_not("perf")        # None: it can be
"""

import shutil
import subprocess
from pathlib import Path

_INSTALL = {
    "perf": "install linux-perf (Debian), linux-tools-generic (Ubuntu) or perf (Fedora, RHEL, Arch)",
    "nsys": "install Nsight Systems (package nsight-systems of NVIDIA's repositories, or with the CUDA toolkit)",
}
_PROBE_SECONDS = 20.0
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


def why_not(profiler: str) -> str | None:
    """What keeps a profiler from being used here, and what would help; None where nothing does."""
    if shutil.which(profiler) is None:
        return f"{profiler}: not found on PATH; {_INSTALL[profiler]}, or leave measuring.profiler out"
    return _perf_is_refused() if profiler == "perf" else None


def _perf_is_refused() -> str | None:
    """What the kernel says to counting the time of a process of our own: a container may forbid even that."""
    command = ["perf", "stat", "-x", ";", "-e", "task-clock", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"perf does not run here: {error}"
    if done.returncode == 0 and "<not" not in done.stderr:
        return None
    said = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
    level = f" (kernel.perf_event_paranoid is {_PARANOID.read_text().strip()})" if _PARANOID.exists() else ""
    return (
        f"perf: no permission to count events of a process{level}: {said}; allow perf_event_open (in a container: "
        "--cap-add PERFMON, or a seccomp profile with it), or leave measuring.profiler out"
    )
