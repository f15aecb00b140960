"""Decode steps on a GPU as CUDA graphs: one launch a token instead of about a hundred.

    hidden = static_decode(shard, cache, inputs, padding)     # the first call records, later ones repeat

A graph repeats the same kernels on the same addresses. Therefore the inputs, the position and the padding are in
buffers that are overwritten before each step; keys and values are written at the position by index, and attention
covers the whole capacity with a mask. Only the recording needs a GPU. A listener of the communicator receives the
operations of the recording, not of its repetitions.
"""

from typing import Protocol

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from engine.inference.cache import CacheStep, KeyValueCache

_WARM_UP_STEPS = 2


class StepModel(Protocol):
    """What is recorded: the layers of a stage (`engine.inference.model.Shard`)."""

    first: bool
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def compute(self, inputs: Tensor, step: CacheStep, last_only: bool) -> Tensor:
        """Hidden states of the layers; on the last stage of the last position alone where `last_only`."""


class StaticStep:
    """One decode step of `batch` sequences over static buffers, recorded if the device supports it."""

    def __init__(self, shard: StepModel, batch: int, padded: bool) -> None:
        self._shard, self._batch = shard, batch
        device = shard.device
        if shard.first:
            self._inputs = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        else:
            self._inputs = torch.zeros((batch, 1, shard.config.hidden), dtype=shard.dtype, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._padding = torch.zeros(batch, dtype=torch.int64, device=device) if padded else None
        self._given: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

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
        if self._graph is None:
            self._record(cache)
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        return self._output

    def _compute(self, cache: KeyValueCache) -> Tensor:
        step = cache.static_step(self._batch, self._position, self._padding)
        return self._shard.compute(self._inputs, step, last_only=True)

    def _record(self, cache: KeyValueCache) -> None:
        """Record after warm-up steps on a separate stream, in which libraries choose kernels and connect.

        All write the same position, so that the cache is the same as after one step.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                self._compute(cache)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's calls: NCCL's watchdog asks for events from a thread of its own meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = self._compute(cache)


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
