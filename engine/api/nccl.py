"""Collectives for scripts: single calls, or batches with message sizes tuned to this group.

    communicator = NCCLCommunicator()                   # of this process's group, over any transport
    communicator.optimize_for_bandwidth()               # measures the best size; all ranks call it
    with communicator.batch_operations():
        for gradient in gradients:
            communicator.all_reduce(gradient)           # done when the block ends, in few collectives

Every collective has a fixed latency (gloo: a millisecond), regardless of the tensor's size; queued tensors of one kind
are copied into one buffer, sent at once, and copied back. It uses NCCL between GPUs, shared memory or gloo elsewhere:
it is `engine.parallel.communicator.Communicator` with a queue.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from engine.api.current_group import check_device, world_communicator
from engine.parallel.communicator import Communicator

_BUCKET_BYTES = 4 << 20
_PROBED_BYTES = tuple(1 << power for power in range(18, 25, 2))  # 256 KB to 16 MB
_PROBE_TIMES = 5
# The smallest buffer close to the best rate: larger ones only delay the first transfer.
_GOOD_SHARE = 0.9


@dataclass(frozen=True)
class _Waiting:
    """A queued operation; `result` is the tensor to fill, `source` is for broadcast only."""

    kind: Literal["all_reduce", "broadcast", "all_gather"]
    tensor: torch.Tensor
    result: torch.Tensor
    source: int = 0

    @property
    def group(self) -> tuple[object, ...]:
        """Key of operations that can be sent together."""
        return self.kind, self.source, self.tensor.dtype, self.tensor.device


class NCCLCommunicator:
    """This rank's end of a group. `collectives` counts collectives sent; `bucket_bytes` is the buffer size.

    Its calls raise ValueError for a tensor on a device that the group's transport cannot read.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator = world_communicator() if communicator is None else communicator
        self._waiting: list[_Waiting] | None = None
        self.collectives = 0
        self.bucket_bytes = _BUCKET_BYTES

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._communicator.size

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return self._communicator.index

    @property
    def transport(self) -> str:
        """Transport: nccl, gloo, shared memory, or none for one rank."""
        return self._communicator.transport

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; within a batch, at the end of the batch. Returns the tensor."""
        return self._do(_Waiting("all_reduce", tensor, tensor))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Broadcast the values of rank `source`, in place; within a batch, at the end of the batch.

        Returns the tensor. Raises ValueError for a rank that the group does not have.
        """
        if not 0 <= source < self.size:
            raise ValueError(f"source: {source} is not one of {self.size} ranks; ranks are numbered from 0")
        return self._do(_Waiting("broadcast", tensor, tensor, source))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, [size, *shape]; within a batch it is filled at the end of the batch."""
        return self._do(_Waiting("all_gather", tensor, tensor.new_empty((self.size, *tensor.shape))))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of [size, *shape], summed over the ranks; immediately, within a batch too.

        Raises ValueError for a tensor that has not one part for each rank.
        """
        if tensor.shape[:1] != (self.size,):
            raise ValueError(f"tensor: expected one part for each of {self.size} ranks, got shape {list(tensor.shape)}")
        check_device(self._communicator, tensor.device, "tensor")
        self.collectives += 1
        return self._communicator.reduce_scatter(tensor)

    def barrier(self) -> None:
        """Return when all ranks have arrived."""
        self._communicator.barrier()

    @contextmanager
    def batch_operations(self) -> Iterator["NCCLCommunicator"]:
        """Queue operations in the block and run them, combined, at its end; their tensors change then.

        All ranks request the same operations, in the same order. After an exception in the block none is run. Raises
        ValueError for a nested batch, and for a tensor that is already queued.
        """
        if self._waiting is not None:
            raise ValueError("batch_operations: a batch is open already; end it first")
        self._waiting = []
        try:
            yield self
            asked, self._waiting = self._waiting, None
        finally:
            self._waiting = None
        groups: dict[object, list[_Waiting]] = {}
        for operation in asked:
            groups.setdefault(operation.group, []).append(operation)
        for group in groups.values():
            for bucket in _buckets(group, self.bucket_bytes):
                self._send(bucket)

    def optimize_for_bandwidth(self) -> dict[int, float]:
        """Set the buffer to the smallest size that reaches 90 % of this group's best rate. All ranks call it.

        Returns the sizes tried (bytes) with the rate of an all-reduce, in GB/s of payload. For one rank: an empty dict.
        """
        if self.size == 1:
            return {}
        device = torch.device("cuda", torch.cuda.current_device()) if self.transport == "nccl" else torch.device("cpu")
        seconds = torch.tensor([self._probe(size, device) for size in _PROBED_BYTES], device=device)
        # Ranks must agree on the size, so they use the sum of their times.
        self._communicator.all_reduce(seconds)
        mean_seconds = (seconds / self.size).tolist()
        rates = {size: size / spent / 1e9 for size, spent in zip(_PROBED_BYTES, mean_seconds, strict=True)}
        best = max(rates.values())
        self.bucket_bytes = min(size for size, rate in rates.items() if rate >= _GOOD_SHARE * best)
        return rates

    def _probe(self, size_bytes: int, device: torch.device) -> float:
        """Return the seconds of one all-reduce, the best of several."""
        tensor = torch.zeros(size_bytes // 4, device=device)
        best = float("inf")
        for _ in range(_PROBE_TIMES):
            self._communicator.barrier()
            began = time.perf_counter()
            self._communicator.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    def _do(self, operation: _Waiting) -> torch.Tensor:
        check_device(self._communicator, operation.tensor.device, "tensor")
        if self._waiting is None:
            self._send([operation])
        elif any(_share_memory(operation.tensor, other.tensor) for other in self._waiting):
            raise ValueError(f"{operation.kind}: this tensor waits in the batch already; end the batch first")
        else:
            self._waiting.append(operation)
        return operation.result

    @torch.no_grad()  # parameters and their gradients are written in place
    def _send(self, bucket: Sequence[_Waiting]) -> None:
        """Run one collective for all of these operations of one group."""
        self.collectives += 1
        first = bucket[0]
        buffer = first.tensor if len(bucket) == 1 else torch.cat([one.tensor.reshape(-1) for one in bucket])
        if first.kind == "all_gather":
            buffer = self._communicator.all_gather(buffer)
        elif first.kind == "broadcast":
            self._communicator.broadcast(buffer, first.source)
        else:
            self._communicator.all_reduce(buffer)
        if len(bucket) == 1:
            if first.result is not buffer:
                first.result.copy_(buffer)
            return
        parts = torch.split(buffer, [one.tensor.numel() for one in bucket], dim=-1)
        for operation, part in zip(bucket, parts, strict=True):
            operation.result.copy_(part.reshape(operation.result.shape))


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both begin at the same address; empty tensors have none."""
    return bool(one.numel() and other.numel()) and one.data_ptr() == other.data_ptr()


def _buckets(operations: Sequence[_Waiting], max_bytes: int) -> Iterator[list[_Waiting]]:
    """Yield buckets in order, as many operations at a time as fit; a larger one goes alone."""
    bucket: list[_Waiting] = []
    size = 0
    for operation in operations:
        if bucket and size + operation.tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(operation)
        size += operation.tensor.nbytes
    if bucket:
        yield bucket
