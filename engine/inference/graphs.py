"""Decode steps on a GPU as CUDA graphs: one launch a token instead of hundreds.

    hidden = static_decode(shard, cache, inputs, padding)     # the first call records, later ones repeat
    hidden = static_paged_step(shard, cache, inputs, sequences, positions)

A graph repeats the same kernels on the same addresses. Therefore the inputs, the positions and the padding are in
buffers that are overwritten before each step, and keys and values are written at a position by index. Our kernels for
GPUs read what is visible; without them, attention covers the whole capacity with a mask. Only the recording needs a
GPU. A listener of the communicator receives the operations of the recording, not of its repetitions.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from engine.inference.cache import CacheStep, GpuStep, KeyValueCache
from engine.inference.paged import PagedCache

_WARM_UP_STEPS = 2
RECORDED_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 32))
"""Tokens of the steps of a paged cache that are recorded: answers alone, or with a piece of a prompt."""
MAX_RECORDED_TOKENS = RECORDED_SIZES[-1]
"""A larger step keeps a GPU busy for longer than its kernels take to launch."""


class StepModel(Protocol):
    """What is recorded: the layers of a stage (`engine.inference.model.Shard`)."""

    first: bool
    config: ModelConfig
    stream_dtype: torch.dtype
    device: torch.device

    def compute(self, inputs: Tensor, step: CacheStep | GpuStep, last_only: bool) -> Tensor:
        """Hidden states of the layers; on the last stage of the last position alone where `last_only`."""


class StaticStep:
    """One decode step of `batch` sequences over static buffers, recorded if the device supports it."""

    def __init__(self, shard: StepModel, batch: int, padded: bool) -> None:
        self._shard, self._batch = shard, batch
        device = shard.device
        if shard.first:
            self._inputs = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        else:
            self._inputs = torch.zeros((batch, 1, shard.config.hidden), dtype=shard.stream_dtype, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._padding = torch.zeros(batch, dtype=torch.int64, device=device) if padded else None
        self._given: Tensor | None = None
        self._recorded: Recorded | None = None

    def __call__(self, cache: KeyValueCache, inputs: Tensor, padding: Tensor | None) -> Tensor:
        """Return hidden states [batch, 1, hidden]; on a GPU they are valid until the next call.

        Always pass the same cache.
        """
        self._inputs.copy_(inputs)
        self._position.fill_(cache.length)
        if self._padding is not None and padding is not None and padding is not self._given:
            self._padding.copy_(padding)
            self._given = padding
        if self._shard.device.type != "cuda":
            return self._compute(cache)
        if self._recorded is None:
            self._recorded = Recorded(lambda: self._compute(cache))
        return self._recorded.replay()

    def _compute(self, cache: KeyValueCache) -> Tensor:
        step = cache.static_step(self._batch, self._position, self._padding)
        return self._shard.compute(self._inputs, step, last_only=True)


class StaticPagedStep:
    """One step of `count` tokens of any sequences of a paged cache over static buffers, recorded on a GPU."""

    def __init__(self, shard: StepModel, cache: PagedCache, count: int) -> None:
        self._shard, self._cache, device = shard, cache, shard.device
        if shard.first:
            self._inputs = torch.zeros((1, count), dtype=torch.int64, device=device)
        else:
            self._inputs = torch.zeros((1, count, shard.config.hidden), dtype=shard.stream_dtype, device=device)
        self._sequences = torch.zeros(count, dtype=torch.int32, device=device)
        self._positions = torch.zeros(count, dtype=torch.int32, device=device)
        self._recorded: Recorded | None = None

    def __call__(self, inputs: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states [1, count, hidden] of up to `count` tokens; on a GPU valid until the next call.

        Buffers that are left over repeat the last token: they compute and keep the same once more.
        """
        given, room = inputs.shape[1], self._inputs.shape[1]
        for buffer, values, axis in (
            (self._inputs, inputs, 1),
            (self._sequences, sequences, 0),
            (self._positions, positions, 0),
        ):
            buffer.narrow(axis, 0, given).copy_(values, non_blocking=True)
            if given < room:
                buffer.narrow(axis, given, room - given).copy_(buffer.narrow(axis, given - 1, 1))
        if self._shard.device.type != "cuda":
            return self._compute()
        if self._recorded is None:
            self._recorded = Recorded(self._compute)
        return self._recorded.replay()

    def _compute(self) -> Tensor:
        step = self._cache.static_step(self._sequences, self._positions)
        return self._shard.compute(self._inputs, step, last_only=False)


class Recorded:
    """A computation as a CUDA graph."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        """Record after warm-up steps on a separate stream, in which libraries choose kernels and connect.

        All write the same positions, so that the cache is the same as after one step.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's calls: NCCL's watchdog asks for events from a thread of its own meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = compute()

    def replay(self) -> Tensor:
        """Return the result, valid until the next call."""
        self._graph.replay()
        return self._output


def static_decode(shard: StepModel, cache: KeyValueCache, inputs: Tensor, padding: Tensor | None) -> Tensor:
    """Hidden states [batch, 1, hidden] of one more position; the cache's length is the caller's to move."""
    key = (inputs.shape[0], padding is not None)
    step = cache.static_steps.get(key)
    if step is None:
        step = cache.static_steps[key] = StaticStep(shard, *key)
        # Masked positions have weight zero, but zero times NaN would be NaN.
        cache.store[..., cache.length :, :] = 0
    hidden: Tensor = step(cache, inputs, padding)
    return hidden


def static_paged_step(
    shard: StepModel, cache: PagedCache, inputs: Tensor, sequences: Tensor, positions: Tensor
) -> Tensor:
    """Hidden states [1, tokens, hidden] of new tokens of any sequences, at most MAX_RECORDED_TOKENS.

    inputs [1, tokens] or [1, tokens, hidden] on the device; sequences and positions int32 on any. Few sizes are
    recorded, and a step takes the next larger one, so that its time is nearly that of its own.
    """
    count = inputs.shape[1]
    size = next(one for one in RECORDED_SIZES if one >= count)
    step = cache.static_steps.get(size)
    if step is None:
        step = cache.static_steps[size] = StaticPagedStep(shard, cache, size)
    return step(inputs, sequences, positions)[:, :count]
