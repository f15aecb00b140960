"""Convert torch's profiler events to plain events, classified as communication or compute.

    events = read_events(profiler.profiler.kineto_results.events(), region_began_nanoseconds)

Names as torch 2.13 gives them: on CPUs an operator `c10d::allreduce_` on the requesting thread, and an annotation
`gloo:all_reduce` on gloo's thread; on GPUs kernels `ncclDevKernel_AllReduce_...`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

REGION = "profiled region"
"""The annotation around the work whose time is split."""

NATIVE = "rankwise::"
"""Prefix of the annotations around our compiled kernels, which the profiler does not record."""

_COMMUNICATION = ("c10d::", "gloo:", "mpi:", "_c10d_functional::", "deepspeed::inference_all_reduce")
_EXECUTED = ("gloo:", "mpi:")
_WAITING = ("wait_tensor",)
_WRAPPED = "_c10d_functional::"
"""Operators around the requests of `c10d::`: of functional collectives, which DTensors use."""
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_DTYPE_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short int": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class ProfilerEvent:
    """An interval on one thread, or on the device. Seconds since the region began.

    `kind` is the profiler's: cpu_op, user_annotation, kernel, gpu_memcpy... `size_bytes`: tensors passed to a
    communication event, None if unknown.
    """

    name: str
    kind: str
    thread: int
    began: float
    ended: float
    size_bytes: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether it ran on the GPU."""
        return self.kind in _DEVICE_KINDS

    @property
    def is_communication(self) -> bool:
        """Whether it is communication, including waiting for another rank."""
        if self.on_device:
            return self.kind == "kernel" and self.name.startswith("nccl")
        return self.name.startswith(_COMMUNICATION)

    @property
    def is_executed(self) -> bool:
        """Whether a backend executed it, on its own thread or on the device; else it is a request."""
        return self.is_communication and (self.on_device or self.name.startswith(_EXECUTED))

    @property
    def is_requested(self) -> bool:
        """Whether a thread asks for a collective: not an operator around such a request."""
        return self.is_communication and not self.is_executed and not self.name.startswith(_WRAPPED)

    @property
    def is_waiting(self) -> bool:
        """Whether it only waits for an earlier request."""
        return self.name.endswith(_WAITING)

    @property
    def is_compute(self) -> bool:
        """Whether it is compute: an operator, a native kernel, or any activity of the device."""
        if self.is_communication:
            return False
        return self.on_device or self.kind == "cpu_op" or self.name.startswith(NATIVE)


def read_events(kineto: Iterable[Any], region_began_nanoseconds: int) -> list[ProfilerEvent]:
    """Return the profiler's events (`_KinetoEvent`) of compute or communication, without the region itself."""
    found = []
    for item in kineto:
        event = ProfilerEvent(
            item.name(),
            item.activity_type(),
            item.device_resource_id(),
            (item.start_ns() - region_began_nanoseconds) * 1e-9,
            (item.end_ns() - region_began_nanoseconds) * 1e-9,
        )
        if event.is_communication:
            size = _size_bytes(item.shapes(), item.dtypes())
            found.append(ProfilerEvent(event.name, event.kind, event.thread, event.began, event.ended, size))
        elif event.is_compute:
            found.append(event)
    return found


def _size_bytes(shapes: list[list[int]], dtypes: list[str]) -> int | None:
    """Return the bytes of the tensors among the inputs; None if none is named (a list of tensors is not)."""
    sizes = [
        prod(shape) * _DTYPE_BYTES[dtype]
        for shape, dtype in zip(shapes, dtypes, strict=False)
        if shape and dtype in _DTYPE_BYTES
    ]
    return sum(sizes) if sizes else None
