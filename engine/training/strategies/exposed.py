"""Measure exposed communication of a step in the compute thread, and the bytes sent.

    exposed = Exposed(known=device.type == "cpu")
    ddp.register_comm_hook(None, BucketHook(exposed, group).hand_over)
    time_collectives(model, exposed)                # FSDP2

DDP sums buckets of gradients during the backward pass. After the last bucket no computation is left, so the rest of the
backward pass is exposed (with the copy out of the buckets, microseconds). FSDP2 on a CPU gathers weights and reduces
gradients in the compute thread: all of it is exposed. On a GPU streams wait instead of threads; bytes are counted and
seconds are unknown.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule

from engine.training.trainer import Exposed


class BucketHook:
    """DDP's all-reduce of a bucket, recorded. It does not divide: losses are weighted by their shares of the step."""

    def __init__(self, exposed: Exposed, group: Any) -> None:
        self._exposed, self._group = exposed, group
        self._handed_over: float | None = None

    def hand_over(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        self._exposed.bytes += buffer.nbytes
        self._exposed.calls += 1
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Any] = work.get_future()
        self._handed_over = perf_counter()
        return future.then(_first)

    def backward_ended(self) -> None:
        """Count the time since the last bucket, if this backward pass had any."""
        if self._handed_over is not None:
            self._exposed.seconds += perf_counter() - self._handed_over
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
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Gather):
    """FSDP2's reduce-scatter, timed; over several nodes also the sum of shards between them."""

    def __init__(self, exposed: Exposed) -> None:
        super().__init__(exposed)
        self._ended = 0.0

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._exposed.bytes += input_tensor.nbytes
        self._exposed.calls += 1
        with self._exposed.waiting():
            work = dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._ended = perf_counter()
        return work

    def summed(self, shard: Tensor) -> None:
        """Record the sum between replicas, which FSDP2 runs after its reduce-scatter."""
        self._exposed.bytes += shard.nbytes
        self._exposed.calls += 1
        self._exposed.seconds += perf_counter() - self._ended


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
