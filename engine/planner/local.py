"""The local machine for the planner: measured if calibrated, else estimated from the kernel's data.

    here = local_machine(cache)
    machine = here.while_busy(ranks=2)         # Machine with this many ranks computing
    here.calibration, here.advice              # None and a sentence where nothing was measured

Where there are accelerators, each rank has one: `local_devices(target)`. Imports no torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from configs.common.system.cores import usable_cores
from configs.common.system.memory import host_memory_total
from configs.common.system.proc import read_fields
from configs.common.system.versions import version_of
from configs.hardware.calibration import Calibration, Fingerprint, LinkTransport, calibration_path, read_calibration
from configs.hardware.catalog import accelerator
from configs.hardware.hardware import Accelerator, Link, Machine, NumberFormat, OperatorRates
from configs.spec.cell import Cell
from configs.targets.resources import Resources
from configs.workloads import descriptor_of
from configs.workloads.prompted import PromptedWorkload
from engine.planner.accelerators import LocalAccelerator, device_text, local_accelerators

REMEDY = "`rankwise doctor --calibrate` measures it in a quarter of a minute"
_OPERATOR_SECONDS = 5e-6
"""Least time of a PyTorch operator on a server core: measured by this project's calibration, 2026-11."""
_CORE_BYTES_PER_SECOND = 10e9
"""Assumption: between what one core alone reads (30e9 here) and its share when all read."""
_DEFAULT_HERTZ = 2.5e9
_LOOPBACK = Link(name="loopback, assumed", latency_seconds=1e-3, bytes_per_second=1e9)
"""gloo between processes of one machine: 1 to 2 ms per small all-reduce, measured by this project, 2026-11."""
_SHARED_MEMORY = Link(name="shared memory, assumed", latency_seconds=25e-6, bytes_per_second=5e9)
"""Our own communicator between processes of one machine: 50 us per small sum of two ranks between operators, 9e9 B/s,
measured by this project's calibration, 2026-11."""


@dataclass(frozen=True)
class LocalMachine:
    """Data of this machine. `calibration` is None if the figures are an estimate."""

    fingerprint: Fingerprint
    calibration: Calibration | None
    estimate: Machine

    def while_busy(
        self, ranks: int, cores_per_rank: int = 1, transport: LinkTransport = "gloo", computing: int | None = None
    ) -> Machine:
        """Return the machine with this many ranks, connected by `transport`; `computing` at once (None: all)."""
        busy = ranks * cores_per_rank
        if self.calibration is None:
            inside = _SHARED_MEMORY if transport == "shared memory" and busy <= self.fingerprint.cores else _LOOPBACK
            return with_cores(_linked(self.estimate, inside), cores_per_rank)
        at_once = None if computing is None else computing * cores_per_rank
        return with_cores(_with_allowed_memory(self.calibration.to_machine(busy, transport, at_once)), cores_per_rank)

    def while_running(self, cell: Cell) -> Machine:
        """Return the machine as a cell's ranks have it, on one node or on nodes that are parts of it."""
        return self.while_busy(cell.layout.ranks, cell.cores_per_rank, transport_of(cell), computing_ranks(cell))

    @property
    def advice(self) -> str | None:
        """How to get better figures; None if they are measured."""
        return None if self.calibration else f"speeds are a rough estimate from the CPU's flags; {REMEDY}"


def transport_of(cell: Cell) -> LinkTransport:
    """What connects a cell's ranks on the CPUs of one machine: our own engine shares memory, torch's groups do not."""
    return "shared memory" if cell.engine == "rankwise" and not descriptor_of(cell.workload).trains else "gloo"


def computing_ranks(cell: Cell) -> int:
    """Return how many ranks of a cell compute at once: stages of a pipeline with one micro-batch take turns."""
    work, stages = cell.workload, cell.layout.pp
    if not isinstance(work, PromptedWorkload):
        return cell.layout.ranks
    pieces = -(-work.batch_size // work.in_micro_batches(stages))
    return cell.layout.ranks // stages * min(stages, pieces)


def local_machine(cache: Path) -> LocalMachine:
    """Return this machine, with its calibration if the cache holds one."""
    fingerprint = this_fingerprint()
    calibration = read_calibration(calibration_path(cache, fingerprint))
    return LocalMachine(fingerprint, calibration, estimated_machine(fingerprint))


@lru_cache(maxsize=1)
def this_fingerprint() -> Fingerprint:
    """Return CPU, cores that this process may use, and torch's version (looked up, not imported)."""
    return Fingerprint(cpu_model=cpu_model(), cores=len(os.sched_getaffinity(0)), torch=version_of("torch"))


def cpu_model() -> str | None:
    """Return the processor's name from the kernel; None if it gives none."""
    return _cpu_field("model name", "Model", "cpu model")


def hardware_fingerprint(environment: dict[str, object]) -> Fingerprint | None:
    """Return the fingerprint of a record's environment; None if incomplete."""
    model, cores, torch = (environment.get(name) for name in ("cpu_model", "cores", "torch"))
    if not isinstance(cores, int) or not isinstance(model, str) or not isinstance(torch, str):
        return None
    return Fingerprint(cpu_model=model, cores=cores, torch=torch)


def estimated_machine(fingerprint: Fingerprint) -> Machine:
    """Estimate a machine from the CPU's flags and clock: peak FLOP/s, and typical memory bandwidth.

    FLOP a cycle of a core in float32: two fused multiply-adds of a vector unit's width, half that on AMD's first cores
    with AVX-512. bfloat16 with its own instructions: twice that, in AMX tiles 16 times (Intel, Intrinsics Guide; AMD,
    Software Optimization Guide for Zen 4).
    """
    flags = set((_cpu_field("flags", "Features") or "").split())
    wide = "avx512f" in flags and "AMD" not in (_cpu_field("vendor_id") or "")
    cycle = 64 if wide else 32 if flags & {"avx2", "avx512f"} else 16 if "asimd" in flags else 8
    hertz = _clock_hertz()
    peak: dict[NumberFormat, float] = {"float32": cycle * hertz}
    if "amx_bf16" in flags:
        peak["bfloat16"] = 16 * cycle * hertz
    elif flags & {"avx512_bf16", "bf16"}:
        peak["bfloat16"] = 2 * cycle * hertz
    memory = host_memory_total()
    accelerator = Accelerator(
        name="this-cpu",
        title=f"a core of {fingerprint.cpu_model or 'this CPU'}",
        kind="cpu",
        memory_bytes=memory // fingerprint.cores,
        bytes_per_second=_CORE_BYTES_PER_SECOND,
        peak_flops=peak,
        link=_LOOPBACK,
        kernel_seconds=_OPERATOR_SECONDS,
        source=f"rough estimate: {cycle} FLOP a cycle at {hertz / 1e9:.1f} GHz, not measured",
    )
    return Machine(
        name="this machine",
        accelerator=accelerator,
        accelerators=fingerprint.cores,
        inside=_LOOPBACK,
        host_memory_bytes=memory,
    )


def _linked(machine: Machine, inside: Link) -> Machine:
    accelerator = machine.accelerator.model_copy(update={"link": inside})
    return machine.model_copy(update={"accelerator": accelerator, "inside": inside})


def _with_allowed_memory(machine: Machine) -> Machine:
    """Return the machine with no more memory than this process may take: another one may have calibrated it."""
    whole, allowed = machine.host_memory_bytes, host_memory_total()
    if whole is None or whole <= allowed:
        return machine
    share = machine.accelerator.memory_bytes * allowed // whole
    accelerator = machine.accelerator.model_copy(update={"memory_bytes": share})
    return machine.model_copy(update={"accelerator": accelerator, "host_memory_bytes": allowed})


def with_cores(machine: Machine, cores: int) -> Machine:
    """Return the machine with ranks of this many cores, if known by the core: work scales, issuing does not.

    A product on k cores is assumed k times as fast; operators between products are as fast as on one.
    """
    if cores == 1 or machine.accelerator.kind != "cpu":
        return machine
    one = machine.accelerator
    many = one.model_copy(
        update={
            "title": f"{cores} cores: {one.title}",
            "memory_bytes": one.memory_bytes * cores,
            "bytes_per_second": one.bytes_per_second * cores,
            "peak_flops": {number: rate * cores for number, rate in one.peak_flops.items()},
            "operators": one.operators and _scaled(one.operators, cores),
            "source": f"{one.source}; {cores} cores a rank taken for {cores} times as fast in products",
        }
    )
    return machine.model_copy(update={"accelerator": many, "accelerators": max(1, machine.accelerators // cores)})


def _scaled(rates: OperatorRates, cores: int) -> OperatorRates:
    """Scale work that threads share; work issued by one thread is unchanged."""

    def shared(seconds: dict[NumberFormat, float]) -> dict[NumberFormat, float]:
        return {number: value / cores for number, value in seconds.items()}

    def rows_shared(table: dict[NumberFormat, dict[int, float]]) -> dict[NumberFormat, dict[int, float]]:
        return {number: {rows: value / cores for rows, value in row.items()} for number, row in table.items()}

    def faster(rate: dict[NumberFormat, float]) -> dict[NumberFormat, float]:
        return {number: value * cores for number, value in rate.items()}

    return rates.model_copy(
        update={
            "linear": rows_shared(rates.linear),
            "linear_cached": rows_shared(rates.linear_cached),
            "attention_flops": faster(rates.attention_flops),
            "context_bytes_per_second": faster(rates.context_bytes_per_second),
            "element_seconds": shared(rates.element_seconds),
            "training_flops": faster(rates.training_flops),
            "training_element_seconds": shared(rates.training_element_seconds),
            "logit_seconds": rates.logit_seconds / cores,
            "parameter_seconds": rates.parameter_seconds / cores,
        }
    )


def local_devices(target: Resources) -> tuple[LocalAccelerator, ...]:
    """Return the accelerators that ranks of a target on this machine compute on; none: they compute on cores."""
    return () if target.device == "cpu" else local_accelerators({**os.environ, **target.env})


def local_ranks(target: Resources, cores_per_rank: int) -> int:
    """Return how many ranks this machine holds for a target: one for each device, or as many as its cores allow."""
    held = len(local_devices(target)) or usable_cores() // cores_per_rank
    return min(held, target.max_ranks or held)


def machine_of_devices(devices: Sequence[LocalAccelerator], ranks: int, host_memory_bytes: int | None) -> Machine:
    """Return this machine with an accelerator for each rank, from the catalog, with the memory that the driver names.

    Ranks of different devices wait for the slowest and are cut alike: each counts as that one, with the least memory.
    Raises ValueError for more ranks than devices, and for a device that the catalog does not have.
    """
    if ranks > len(devices):
        raise ValueError(f"{ranks} ranks, but this machine has {device_text(devices)}, one for each rank")
    used = devices[: max(1, ranks)]  # as ranks take them
    known = [accelerator(one.name) for one in used]
    memory = [one.memory_bytes or each.memory_bytes for one, each in zip(used, known, strict=True)]
    slowest = min(known, key=lambda each: (each.flops("float16"), each.bytes_per_second))
    device = slowest.model_copy(update={"memory_bytes": min(memory)})
    return Machine(
        name="this machine",
        accelerator=device,
        accelerators=len(devices),
        host_memory_bytes=host_memory_bytes,
    )


def _clock_hertz() -> float:
    """Return the kernel's maximum clock, else the current one."""
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        text = _cpu_field("cpu MHz")
        return float(text) * 1e6 if text else _DEFAULT_HERTZ


def _cpu_field(*names: str) -> str | None:
    """A field of the first processor in /proc/cpuinfo, under the first of its names that is there."""
    fields = read_fields("/proc/cpuinfo")
    return next((fields[name] for name in names if fields.get(name)), None)
