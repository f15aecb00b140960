"""What a DeepSpeed step waits for: the calls into its communication backend, timed in the thread that makes them.

    remove = watch(deepspeed, exposed)
    ...
    remove()

All of the library's collectives go through one object (`deepspeed.comm.comm.cdb`). A call that blocks is waited for
from beginning to end; of one that does not, only the `wait` on its handle counts. Seconds spent in a collective hold
what a slower rank makes the others wait, too. On CUDA a call returns before the work is done, so that seconds mean
nothing there (`Exposed.known`), while bytes do.
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
    """A handle whose waiting is counted; everything else is the library's."""

    def __init__(self, handle: Any, exposed: Exposed) -> None:
        self._handle, self._exposed = handle, exposed

    def wait(self, *given: Any, **named: Any) -> Any:
        with self._exposed.waiting():
            return self._handle.wait(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def watch(deepspeed: Any, exposed: Exposed) -> Callable[[], None]:
    """Count into `exposed` from now on, until what is returned is called."""
    backend = deepspeed.comm.comm.cdb
    for name in _COLLECTIVES:
        if hasattr(backend, name):
            setattr(backend, name, _counted(getattr(backend, name), exposed))

    def remove() -> None:
        for name in _COLLECTIVES:
            vars(backend).pop(name, None)  # what the class defines is seen again

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
    """Of the largest argument: of an all-gather what comes out, of a reduce-scatter what goes in."""
    return max((_tensor_bytes(argument) for argument in arguments), default=0)


def _tensor_bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    if isinstance(argument, (list, tuple)):
        return sum(_tensor_bytes(one) for one in argument)
    return 0
