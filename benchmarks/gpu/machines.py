"""This machine for the planner, from the catalog.

before(bench)                                               # what a study would be predicted with
"""

import os

import torch

from benchmarks.gpu.bench import Bench
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Accelerator, Machine
from engine.planner.local import estimated_machine, this_fingerprint


def before(bench: Bench) -> Machine:
    """Return the machine by the device's name. Raises ValueError for a device that the catalog lacks."""
    if bench.device.type != "cuda":
        return estimated_machine(this_fingerprint())
    return machine_with(accelerator(torch.cuda.get_device_name(bench.device)))


def machine_with(device: Accelerator) -> Machine:
    """Return this host with one such device."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(name="this machine", accelerator=device, accelerators=1, host_memory_bytes=memory)
