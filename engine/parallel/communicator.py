"""Collectives and messages among a group of ranks, over any transport.

    communicators = open_communicators(grid, device, backend, timeout_seconds)
    communicators.tensor.all_reduce(hidden)                # in place

A group of one rank does nothing. A rank that ended or exceeds the time limit raises PeerLostError with rank and host;
the group is unusable afterwards. `listener`, if set, receives every operation with its times, for profiling. All calls
come from one thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.common.failure_kinds import says_no_memory
from engine.parallel import flight_recorder as flight
from engine.parallel.grid import Grid
from engine.parallel.opening import Ranks, connect
from engine.parallel.peers import Blame, PeerLostError
from engine.parallel.shared_memory import WaitError
from engine.parallel.transports import Transport

__all__ = ["CommunicationEvent", "Communicator", "Communicators", "PeerLostError", "open_communicators"]


@dataclass(frozen=True, slots=True)
class CommunicationEvent:
    """One operation of this rank; `began` and `ended` are seconds of time.perf_counter."""

    operation: str
    ranks: tuple[int, ...]
    sequence: int
    size_bytes: int
    began: float
    ended: float


Listener = Callable[[CommunicationEvent], None]


class Communicator:
    """One rank's end of a group. `index` is its position in `ranks`, which are global."""

    def __init__(
        self, ranks: tuple[int, ...], index: int, transport: Transport | None = None, blame: Blame | None = None
    ) -> None:
        assert (transport is None) == (len(ranks) == 1)
        self.ranks = ranks
        self.size = len(ranks)
        self.index = index
        self.transport = "none" if transport is None else transport.name
        self.listener: Listener | None = None
        self._way = transport
        self._blame = blame
        self._sequence = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; every rank gets the same bits. Returns the tensor."""
        if self._way is None:
            return tensor
        if tensor.is_contiguous():
            self._timed("all_reduce", tensor.nbytes, self._way.all_reduce, tensor)
            return tensor
        dense = tensor.contiguous()
        self._timed("all_reduce", dense.nbytes, self._way.all_reduce, dense)
        return tensor.copy_(dense)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather every rank's tensor, of the same shape on all: [size, *shape]."""
        if self._way is None:
            return tensor[None]
        whole = tensor.new_empty((self.size, *tensor.shape))
        self._timed("all_gather", whole.nbytes, self._way.all_gather, tensor.contiguous(), whole)
        return whole

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reduce [size, *shape] over the ranks and return part tensor[index]: [*shape]."""
        assert tensor.shape[0] == self.size, f"one part for each of {self.size} ranks, not {tensor.shape[0]}"
        if self._way is None:
            return tensor[0]
        part = tensor.new_empty(tensor.shape[1:])
        self._timed("reduce_scatter", tensor.nbytes, self._way.reduce_scatter, tensor.contiguous(), part)
        return part

    def broadcast(self, tensor: torch.Tensor, source_index: int) -> torch.Tensor:
        """Broadcast the values of the rank at `source_index`, in place. Returns the tensor."""
        if self._way is None:
            return tensor
        if tensor.is_contiguous():
            self._timed("broadcast", tensor.nbytes, self._way.broadcast, tensor, source_index)
            return tensor
        dense = tensor.contiguous()
        self._timed("broadcast", dense.nbytes, self._way.broadcast, dense, source_index)
        return tensor.copy_(dense)

    def send(self, tensor: torch.Tensor, to_index: int) -> None:
        """Send to the rank at `to_index`; returns when the tensor may be changed again."""
        assert self._way is not None and to_index != self.index, "a rank does not send to itself"
        self._timed("send", tensor.nbytes, self._way.send, tensor.contiguous(), to_index)

    def receive(self, tensor: torch.Tensor, source_index: int) -> torch.Tensor:
        """Receive the next tensor from the rank at `source_index`, in place; both know its shape and type."""
        assert self._way is not None and source_index != self.index, "a rank does not receive from itself"
        if tensor.is_contiguous():
            self._timed("receive", tensor.nbytes, self._way.receive, tensor, source_index)
            return tensor
        dense = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._timed("receive", dense.nbytes, self._way.receive, dense, source_index)
        return tensor.copy_(dense)

    def barrier(self) -> None:
        """Return when all ranks have arrived."""
        if self._way is not None:
            self._timed("barrier", 0, self._way.barrier)

    def repeat(self, operations: Callable[[], None], size_bytes: int) -> None:
        """Run operations of this group recorded elsewhere, as one; transport errors are translated as usual."""
        self._timed("recorded operations", size_bytes, operations)

    def close(self) -> None:
        """Release all resources; may be called again."""
        if self._way is not None:
            self._way.close()

    def _timed(self, operation: str, size_bytes: int, call: Callable[..., None], *arguments: object) -> None:
        self._sequence += 1
        began = time.perf_counter()
        entry = flight.record_start(operation, self.ranks, self._sequence, size_bytes, began)
        try:
            call(*arguments)
        except WaitError as error:
            raise self._lost(operation, self.ranks[error.index], error.silent) from None
        except RuntimeError as error:
            silent = connection_failed(error)
            if silent is None:
                raise
            raise self._lost(operation, None, silent) from error
        ended = time.perf_counter()
        entry[-1] = ended
        if self.listener is not None:
            self.listener(CommunicationEvent(operation, self.ranks, self._sequence, size_bytes, began, ended))

    def _lost(self, operation: str, suspect: int | None, silent: bool) -> PeerLostError:
        assert self._blame is not None
        return self._blame.find(f"{operation} number {self._sequence}", self.ranks, suspect, silent)


_CLOSED = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "socket error",
)
_SILENT = ("timed out", "timeout")


def connection_failed(error: RuntimeError) -> bool | None:
    """Return whether torch reports a silent peer (True) or a closed connection (False); None: another error."""
    text = str(error).lower()
    if says_no_memory(text):  # NCCL raises the same class for it
        return None
    if any(words in text for words in _CLOSED):
        return False
    silent = any(words in text for words in _SILENT)
    distributed = type(error).__module__ == "torch.distributed" or type(error).__name__.startswith("Dist")
    return True if silent else False if distributed else None


@dataclass(frozen=True)
class Communicators:
    """The groups of this rank. Groups of the same ranks share one Communicator."""

    tensor: Communicator
    pipeline: Communicator
    data: Communicator
    world: Communicator

    def close(self) -> None:
        """Close all groups."""
        for communicator in (self.tensor, self.pipeline, self.data, self.world):
            communicator.close()


def choose_backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for tensors on this device. Raises RuntimeError if torch has none."""
    import torch.distributed as dist

    if device.type == "cuda" and dist.is_nccl_available():
        return "nccl"
    if dist.is_gloo_available():
        return "gloo"
    if dist.is_mpi_available():
        return "mpi"
    raise RuntimeError("this build of torch has no backend for several ranks; install one with gloo")


def open_communicators(
    grid: Grid, device: torch.device, backend: str | None, timeout_seconds: float, transport: str = "auto"
) -> Communicators:
    """Open this rank's groups in the grid; all ranks call it at the same point.

    With more than one rank, the default process group must exist, on `backend`. `transport` other than auto is required
    for every group: ValueError if it is not possible.
    """
    axes = ("tensor", "pipeline", "data")
    everybody = tuple(range(grid.world_size))
    all_groups = [group for axis in axes for group in grid.groups(axis)] + [everybody]
    groups = [group for group in dict.fromkeys(all_groups) if len(group) > 1]
    found: dict[Ranks, Communicator] = {(grid.rank,): Communicator((grid.rank,), 0)}
    if groups:
        assert backend is not None, "several ranks have a backend"
        ways, blame = connect(groups, grid.rank, device, backend, timeout_seconds, transport)
        found |= {ranks: Communicator(ranks, ranks.index(grid.rank), way, blame) for ranks, way in ways.items()}
    return Communicators(found[grid.tensor_ranks], found[grid.pipeline_ranks], found[grid.data_ranks], found[everybody])
