"""Transports for groups of ranks, with one interface.

    GroupTransport     a torch.distributed group: gloo, NCCL, MPI
    SharedTransport    shared memory, for ranks of one host
    TwoLevelTransport  both: sums within each host through shared memory, between hosts through gloo

Tensors are contiguous, ranks are indices in the group. `Communicator` calls these methods and translates errors; they
raise WaitError if the awaited rank is known, else torch's errors.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.parallel.shared_memory import SharedMemory, WaitError

# torch 2.13 renamed them; 2.9 to 2.12, which images with a GPU have, know the old names only.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_NCCL = "nccl"
_RECORDABLE = ("none", _NCCL)
"""Transports whose operations are kernels of the device; "none": one rank."""


class Transport(Protocol):
    """Interface of all transports. `name` is recorded with every measurement."""

    name: str

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place."""

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Gather every rank's part into `whole` [size, *part.shape]."""

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Sum `whole` over the ranks and write whole[index] into `part`."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcast the source's values, in place."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Return when the tensor may be changed again."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive in place."""

    def barrier(self) -> None:
        """Return when all ranks have arrived."""

    def close(self) -> None:
        """Release all resources."""


def graph_obstacle(device: str, transport: str) -> str | None:
    """Return why decode steps are no CUDA graphs on a type of device, with sums over a transport; None: they are."""
    if device != "cuda":
        return f"the device is {device}"
    if transport not in _RECORDABLE:
        return f"sums over {transport} run on the host, which a graph cannot record"
    return None


_MOST_UNSENT = 8
"""Unreceived messages to one rank: a pipeline has at most as many active micro-batches as stages."""


class GroupTransport:
    """A group of torch.distributed; `ranks` are its global ranks."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self.name = str(dist.get_backend(group))
        self._group = group
        self._ranks = ranks
        self._device = device
        self._unsent: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See Transport."""
        dist.all_reduce(tensor, group=self._group)

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """See Transport. NCCL would gather for a list into a buffer of its own, and copy every part out of it."""
        if self.name == _NCCL:
            all_gather_single(whole.view(-1), part.view(-1), group=self._group)
        else:
            dist.all_gather(list(whole.unbind()), part, group=self._group)

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """See Transport. NCCL would copy a list into a buffer of its own first."""
        if self.name == _NCCL:
            reduce_scatter_single(part.view(-1), whole.view(-1), group=self._group)
        else:
            dist.reduce_scatter(part, list(whole.unbind()), group=self._group)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See Transport."""
        dist.broadcast(tensor, self._ranks[source], group=self._group)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """See Transport. A copy waits for its receiver, so that two ranks may send to each other at the same time."""
        unsent = self._unsent.setdefault(to, deque())
        if len(unsent) == _MOST_UNSENT:
            work, _ = unsent.popleft()
            work.wait()
        copy = tensor.clone()
        started = dist.isend(copy, self._ranks[to], group=self._group)
        assert started is not None, "this rank is in the group"
        unsent.append((started, copy))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See Transport."""
        dist.recv(tensor, self._ranks[source], group=self._group)

    def barrier(self) -> None:
        """See Transport. On a GPU the host waits as well."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            dist.barrier(group=self._group, device_ids=[self._device.index])
            torch.cuda.synchronize(self._device)
        else:
            dist.barrier(group=self._group)

    def close(self) -> None:
        """No-op: the group closes with the process group of all ranks."""


class SharedTransport(SharedMemory):
    """All ranks of the group are on this host."""

    name = "shared memory"


class TwoLevelTransport:
    """Several hosts. `hosts` are the indices of the group's ranks on each host, in rising order.

    Reductions and broadcasts run within each host first, then among the first rank of each host, then within each host
    again. Gathering and scattering use gloo among all ranks. `local` is None on a host with one rank, `between` on
    ranks that are not the first of their host.
    """

    name = "shared memory and gloo"

    def __init__(
        self,
        index: int,
        hosts: Sequence[Sequence[int]],
        local: SharedMemory | None,
        between: GroupTransport | None,
        whole: GroupTransport,
    ) -> None:
        self._hosts = hosts
        self._host = next(place for place, members in enumerate(hosts) if index in members)
        self._members = list(hosts[self._host])
        self._local = local
        self._between = between
        self._whole = whole

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See Transport."""
        if self._local is not None:
            self._on_host("all_reduce", tensor)
        if self._between is not None:
            self._between.all_reduce(tensor)
        if self._local is not None:
            self._on_host("broadcast", tensor, 0)

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """See Transport."""
        self._whole.all_gather(part, whole)

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """See Transport."""
        self._whole.reduce_scatter(whole, part)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See Transport."""
        home = next(place for place, members in enumerate(self._hosts) if source in members)
        if self._host == home and self._local is not None:
            self._on_host("broadcast", tensor, self._members.index(source))
        if self._between is not None:
            self._between.broadcast(tensor, home)
        if self._host != home and self._local is not None:
            self._on_host("broadcast", tensor, 0)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """See Transport."""
        if to in self._members:
            self._on_host("send", tensor, self._members.index(to))
        else:
            self._whole.send(tensor, to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See Transport."""
        if source in self._members:
            self._on_host("receive", tensor, self._members.index(source))
        else:
            self._whole.receive(tensor, source)

    def barrier(self) -> None:
        """See Transport."""
        if self._local is not None:
            self._on_host("barrier")
        if self._between is not None:
            self._between.barrier()
        if self._local is not None:
            self._on_host("barrier")

    def close(self) -> None:
        """Release the memory."""
        if self._local is not None:
            self._local.close()

    def _on_host(self, name: str, *arguments: object) -> None:
        """Run an operation of the shared memory; a missing rank is named by its index in the whole group."""
        try:
            getattr(self._local, name)(*arguments)
        except WaitError as error:
            raise WaitError(self._members[error.index], error.silent) from None
