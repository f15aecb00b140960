"""Memory that this process may take, by the machine and by the control groups around it.

    host_memory_available()      # bytes that are free
    host_memory_total()          # bytes, free or not

A batch system limits a job by a control group (cgroups(7)), whose limit the machine's own figure does not show.
"""

import os
import sys
from pathlib import Path

from configs.common.system.proc import read_fields

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def host_memory_available(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the least of MemAvailable and what each control group around this process leaves, in bytes."""
    said = read_fields("/proc/meminfo").get("MemAvailable", "").split()  # in kB
    free = int(said[0]) * 1024 if said else sys.maxsize
    left = (_left(*group) for group in _groups_around(groups, membership))
    return max(0, min([free, *(each for each in left if each is not None)]))


def host_memory_total(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the least of the machine's RAM and the limits of the control groups around this process, in bytes."""
    limits = (_allowed(limit) for limit, _, _ in _groups_around(groups, membership))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(each for each in limits if each is not None)])


def _groups_around(groups: Path, membership: Path) -> list[tuple[Path, Path, Path]]:
    """Return each group's files of its limit, its usage and its statistics, of both versions of control groups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit, used = (
            (groups, "memory.max", "memory.current")
            if not controllers
            else (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = top / path.strip("/")
        for each in [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]:
            found.append((each / limit, each / used, each / "memory.stat"))
    return found


def _allowed(limit: Path) -> int | None:
    """Return a group's limit in bytes; None: there is none, or no such controller here."""
    try:
        said = limit.read_text().strip()
    except OSError:
        return None
    return int(said) if said.isdecimal() else None  # "max"


def _left(limit: Path, used: Path, statistics: Path) -> int | None:
    """Return the bytes that a group may still take; its page cache can be given up. None: no limit."""
    allowed = _allowed(limit)
    if allowed is None:
        return None
    try:
        taken = int(used.read_text())
        fields = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return None
    cached = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return allowed - taken + cached
