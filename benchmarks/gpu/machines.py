"""This machine for the planner: from the catalog, and with the rates measured here.

before(bench)                                               # what a study would be predicted with
after(bench, copy_bytes_per_second=3.0e12, product_flops=7.5e14, kernel_seconds=2e-6)
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
    return _machine(accelerator(torch.cuda.get_device_name(bench.device)))


def after(bench: Bench, copy_bytes_per_second: float, product_flops: float, kernel_seconds: float) -> Machine:
    """Return the machine with measured rates: bytes of a plain copy, bfloat16 FLOP/s of a large product, and the least
    time of an operator.
    """
    known = before(bench)
    device = known.accelerator.model_copy(
        update={
            "bytes_per_second": copy_bytes_per_second,
            "peak_flops": {**known.accelerator.peak_flops, "bfloat16": product_flops},
            "kernel_seconds": kernel_seconds,
            "measured": True,
            "operators": None,
            "source": "measured here by a plain copy, a matrix product and an empty kernel",
        }
    )
    return known.model_copy(update={"accelerator": device})


def _machine(device: Accelerator) -> Machine:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(name="this machine", accelerator=device, accelerators=1, host_memory_bytes=memory)
