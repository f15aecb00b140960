"""Measure exposed communication of a step where it computes, and the bytes sent.

    exposed = Exposed.of(options, device)
    ddp.register_comm_hook(None, BucketHook(exposed, group).hand_over)
    time_collectives(model, exposed, replicated)    # FSDP2
    remove = time_stream_waits(exposed)             # FSDP2 and DeepSpeed on a GPU

DDP sums buckets of gradients during the backward pass. After the last bucket no computation is left, so the rest of the
backward pass is exposed (with the copy out of the buckets, microseconds). FSDP2 on a CPU gathers weights and reduces
gradients in the compute thread: all of it is exposed. On a GPU it does so in streams of its own, and what is exposed is
the time that the computing stream waits for their events; CUDA events before and after each wait tell it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule

from engine.parallel.transports import all_gather_single, reduce_scatter_single
from engine.training.marks import Mark, mark
from engine.training.trainer import Exposed


class BucketHook:
    """DDP's all-reduce of a bucket, recorded. It does not divide: losses are weighted by their shares of the step."""

    def __init__(self, exposed: Exposed, group: Any) -> None:
        self._exposed, self._group = exposed, group
        self._handed_over: Mark | None = None

    def hand_over(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        self._exposed.bytes += buffer.nbytes
        self._exposed.calls += 1
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        self._handed_over = mark(self._exposed.stream is not None, self._exposed.stream)
        return future.then(_first)

    def backward_ended(self) -> None:
        """Count the time since the last bucket, if this backward pass had any."""
        if self._handed_over is not None:
            self._exposed.waited(self._handed_over)
        self._handed_over = None


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


class _Gather:
    """FSDP2's all-gather, timed."""

    def __init__(self, exposed: Exposed) -> None:
        self._exposed = exposed

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._exposed.bytes += output_tensor.nbytes
        self._exposed.calls += 1
        with self._exposed.waiting():
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Gather):
    """FSDP2's reduce-scatter, timed; over several nodes also the sum of shards between them."""

    def __init__(self, exposed: Exposed) -> None:
        super().__init__(exposed)
        self._ended: Mark = 0.0

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._exposed.bytes += input_tensor.nbytes
        self._exposed.calls += 1
        with self._exposed.waiting():
            work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._ended = mark(False)
        return work

    def summed(self, shard: Tensor) -> None:
        """Record the sum between replicas, which FSDP2 runs after its reduce-scatter."""
        self._exposed.bytes += shard.nbytes
        self._exposed.calls += 1
        if self._exposed.stream is None:  # a GPU does it in a stream of its own
            self._exposed.waited(self._ended)


def time_collectives(model: nn.Module, exposed: Exposed, replicated: bool) -> None:
    """Time the collectives of every module wrapped by `fully_shard`. replicated: shards are summed over replicas
    (hybrid sharding).
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        scatter = _Scatter(exposed)
        module.set_custom_all_gather(_Gather(exposed))  # type: ignore[arg-type]  # its methods are what counts
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        if replicated:
            module.set_all_reduce_hook(scatter.summed)


def time_stream_waits(exposed: Exposed) -> Callable[[], None]:
    """Record every wait of the computing stream for another stream, until the returned function is called; on a CPU
    there are none. The libraries wait by `wait_event` of torch's class, directly or through `wait_stream`.
    """
    if exposed.stream is None:
        return lambda: None
    streams: Any = torch.cuda.Stream
    own = streams.wait_event

    def wait_event(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        with exposed.waiting(stream):
            own(stream, event)

    def remove() -> None:
        streams.wait_event = own

    streams.wait_event = wait_event
    return remove
