"""Cores that this process may use: those that it may run on, and what the control groups around it allow of them.

    usable_cores()               # 4 on a machine of 64, in a container with a CPU quota of 4.5

A container's CPU limit (`docker --cpus`, `limits.cpu` of Kubernetes) takes no core away: beyond the quota all threads
wait for the rest of each period, so that more of them measure the waiting.
"""

import os
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return how many ranks of a core each, or threads, can compute all the time; at least 1."""
    quota = quota_cores()
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def quota_cores(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the least CPU quota of the control groups around this process, in cores; None: there is none.

    Both versions: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files and
    https://docs.kernel.org/scheduler/sched-bwc.html.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = groups / "cpu" if controllers else groups
        folder = top / path.strip("/")
        for each in [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]:
            quota = _quota(each)
            found += [] if quota is None else [quota]
    return min(found, default=None)


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None  # "max", or no such controller here
