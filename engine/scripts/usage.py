"""Processor time and peak memory of a rank that still runs.

seconds, peak_bytes = usage(pid, with_children=True)      # None: not known
"""

from contextlib import suppress

import psutil

from configs.common.system.proc import read_fields


def usage(pid: int, with_children: bool = False) -> tuple[float | None, int | None]:
    """(seconds, bytes) of a process so far; None where they cannot be read.

    with_children: of all processes that it started, too, as the kernel reports them of a rank that ends by itself: the
    sum of the times, the largest of the peaks. The program may be a child of what was started, as it is of a shell
    script. Children are looked for in all of /proc, so not at each look.
    """
    processes = [pid]
    if with_children:
        with suppress(psutil.Error):
            processes += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    seconds: list[float] = []
    peaks: list[int] = []
    for each in processes:
        with suppress(OSError, ValueError, psutil.Error):
            text = read_fields(f"/proc/{each}/status").get("VmHWM")
            seconds.append(sum(psutil.Process(each).cpu_times()[:4]))
            if text:
                peaks.append(int(text.split()[0]) * 1024)
    return sum(seconds) if seconds else None, max(peaks, default=None)


def own_seconds(pid: int) -> float | None:
    """Processor time of a process so far, without that of any other; None where it cannot be read."""
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return None
