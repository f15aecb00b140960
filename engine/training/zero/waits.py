"""Measure exposed communication of a DeepSpeed step: calls of its communication backend, timed in the calling thread.

    remove = record_waits(deepspeed, exposed)
    ...
    remove()

All of the library's collectives go through one object (`deepspeed.comm.comm.cdb`). A blocking call counts completely;
of a non-blocking one only the `wait` on its handle counts. Seconds in a collective include waiting for slower ranks. On
a GPU what counts is the time that the computing stream waits: of calls in that stream here, of other streams by
`engine.training.strategies.exposed.time_stream_waits`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from engine.training.trainer import Exposed

_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class _Handle:
    """A handle whose waiting is counted; all other attributes are the library's."""

    def __init__(self, handle: Any, exposed: Exposed) -> None:
        self._handle, self._exposed = handle, exposed

    def wait(self, *given: Any, **named: Any) -> Any:
        with self._exposed.waiting():
            return self._handle.wait(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def record_waits(deepspeed: Any, exposed: Exposed) -> Callable[[], None]:
    """Record into `exposed` until the returned function is called."""
    backend = deepspeed.comm.comm.cdb
    for name in _COLLECTIVES:
        if hasattr(backend, name):
            setattr(backend, name, _counted(getattr(backend, name), exposed))

    def remove() -> None:
        for name in _COLLECTIVES:
            vars(backend).pop(name, None)  # the class's definition is visible again

    return remove


def _counted(call: Callable[..., Any], exposed: Exposed) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        exposed.calls += 1
        exposed.bytes += _payload_bytes([*given, *named.values()])
        with exposed.waiting():
            handle = call(*given, **named)
        return handle if handle is None or not hasattr(handle, "wait") else _Handle(handle, exposed)

    return counted


def _payload_bytes(arguments: Iterable[Any]) -> int:
    """Return the bytes of the largest argument: the output of an all-gather, the input of a reduce-scatter."""
    return max((_tensor_bytes(argument) for argument in arguments), default=0)


def _tensor_bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    if isinstance(argument, (list, tuple)):
        return sum(_tensor_bytes(one) for one in argument)
    return 0
