"""Memory that this process may still take, by the machine and by the control groups around it.

    host_memory_available()      # bytes

A batch system limits a job by a control group (cgroups(7)), whose limit the machine's own figure does not show.
"""

import sys
from pathlib import Path

from configs.common.system.proc import read_fields

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def host_memory_available(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the least of MemAvailable and what each control group around this process leaves, in bytes."""
    said = read_fields("/proc/meminfo").get("MemAvailable", "").split()  # in kB
    free = int(said[0]) * 1024 if said else sys.maxsize
    return max(0, min([free, *_left_by_groups(groups, membership)]))


def _left_by_groups(groups: Path, membership: Path) -> list[int]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, limit, used = (
            (groups, "memory.max", "memory.current")
            if not controllers
            else (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = top / path.strip("/")
        for each in [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]:
            left = _left(each / limit, each / used, each / "memory.stat")
            found += [] if left is None else [left]
    return found


def _left(limit: Path, used: Path, statistics: Path) -> int | None:
    """Return the bytes that a group may still take; its page cache can be given up. None: no limit."""
    try:
        allowed, taken = limit.read_text().strip(), int(used.read_text())
        fields = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not allowed.isdecimal():
        return None  # "max"
    cached = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return int(allowed) - taken + cached
