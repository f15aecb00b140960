"""Bind a rank to cores: those near its GPU where it has one, else its share of the job's.

    devices = devices_of_ranks(place, job.target)    # the GPUs of this node's ranks, as the driver lists them
    bind(place, job.cell.cores_per_rank, devices)    # cores, memory and, of a divided GPU, the rank's slice

It runs before torch is imported, because threads inherit the cores of the process that starts them, and CUDA reads its
variables once. What was done is in the rank's `place` and in its record.
"""

import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.targets.resources import Resources
    from engine.planner.accelerators import LocalAccelerator
    from engine.rank.processes import RankPlace

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call set_mempolicy(2), which the C library does not wrap."""
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_MASK_BITS = 1024


def devices_of_ranks(place: "RankPlace", target: "Resources") -> "Sequence[LocalAccelerator]":
    """Return the GPUs of this node's ranks, by local rank; none if they are fewer, or CPUs are asked for."""
    from engine.planner.accelerators import local_accelerators

    found = () if target.device == "cpu" else local_accelerators()
    return found[: place.local_world_size] if len(found) >= place.local_world_size else ()


def bind(
    place: "RankPlace", cores_per_rank: int, devices: "Sequence[LocalAccelerator]" = (), root: Path = Path("/")
) -> None:
    """Pin this rank to its cores, and prefer the memory of their NUMA node.

    devices: the GPUs of the node's ranks; none: ranks without GPUs share out the job's cores in order. Ranks with GPUs
    of one NUMA node share out its cores. If there are fewer cores than ranks need, they use them together.
    """
    from engine.planner.accelerators import DEVICE_ORDER, numa_node

    os.environ.update({name: value for name, value in DEVICE_ORDER.items() if devices and name not in os.environ})
    places = [numa_node(device.pci, root) for device in devices]
    near = places[place.local_rank] if places else None
    cores, position, count = place.allowed, place.local_rank, place.local_world_size
    if near is not None and set(place.allowed) & near[1]:
        cores = [core for core in place.allowed if core in near[1]]
        neighbours = [rank for rank, other in enumerate(places) if other is not None and other[0] == near[0]]
        position, count = neighbours.index(place.local_rank), len(neighbours)
        place.numa_node = near[0]
    if count * cores_per_rank <= len(cores):
        cores = cores[position * cores_per_rank : (position + 1) * cores_per_rank]
    elif count > 1:
        place.cores_shared = True
    if cores != place.allowed:
        place.cores = cores
        os.sched_setaffinity(0, cores)
    if place.numa_node is not None:
        place.numa_memory = prefer_memory_of(place.numa_node)
    if devices and devices[place.local_rank].is_slice:
        # A process sees one slice only, whichever is first in its list (MIG User Guide, "CUDA Visible Devices").
        os.environ["CUDA_VISIBLE_DEVICES"] = str(devices[place.local_rank].uuid)
        place.own_device_only = True
    place.threads = threads(os.environ, cores_per_rank)


def threads(environment: Mapping[str, str], cores_per_rank: int) -> int:
    """Return the threads of a rank: OMP_NUM_THREADS, else one for each of its cores. Raises ValueError."""
    wanted = environment.get("OMP_NUM_THREADS") or str(cores_per_rank)
    first = wanted.split(",")[0].strip()
    if not (first.isascii() and first.isdigit() and int(first)):
        raise ValueError(f"OMP_NUM_THREADS: got {wanted}, expected a number of threads; unset it for one per core")
    return int(first)


def prefer_memory_of(node: int) -> bool:
    """Ask the kernel for memory of a NUMA node first. Returns whether it agreed; containers may forbid the call."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not 0 <= node < _MASK_BITS:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(_MASK_BITS)) == 0)
