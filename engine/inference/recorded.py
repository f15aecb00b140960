"""Decode steps on a CPU as recorded calls of C: one call a token instead of about a hundred from Python.

    chosen = decode_step(shard, cache, inputs, padding)       # the first calls record and compare, later ones repeat

A step of a small model is bound by Python: with 4 layers and 8 MB of weights, it takes three times as long as the
products. So a step is recorded (`engine.kernels.program`) and then replayed over the same memory: the inputs are in a
buffer that is overwritten before each step, and `KeyValueCache.step` updates position-dependent data in place.

A recording is verified first. For two further steps it runs beside the ordinary step, over memory filled with NaN, and
its results, including new keys and values, must be bit-identical on all ranks of the group. A step that uses operators
of torch, or all-reduces outside of shared memory, is never replayed.
"""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from engine.inference.cache import CacheStep, KernelStep, KeyValueCache
from engine.kernels.program import KernelProgram, Recording
from engine.parallel.shared_memory import raise_for
from engine.parallel.transports import SharedTransport

if TYPE_CHECKING:
    from engine.inference.model import Shard

DecodePath = Literal["recorded", "steps"]

_CHECKED_STEPS = 2
STEPS_BEFORE_TRUST = 2 + _CHECKED_STEPS
"""One step loads the libraries, one is recorded, and the rest are comparisons."""


class RecordedStep:
    """The decode steps of the first `batch` sequences of one cache on this stage."""

    def __init__(self, shard: "Shard", cache: KeyValueCache, batch: int) -> None:
        self._shard, self._cache, self._batch = shard, cache, batch
        if shard.first:
            self._inputs = torch.zeros((batch, 1), dtype=torch.int64)
        else:
            self._inputs = torch.zeros((batch, 1, shard.config.hidden), dtype=shard.dtype)
        self._program: KernelProgram | None = None
        self._output = self._inputs
        self._is_warm, self._left_to_check = False, _CHECKED_STEPS
        self.refusals: set[str] = set()
        if shard.group.transport not in ("none", SharedTransport.name):
            self.refusals.add(f"sums over {shard.group.transport}")

    @property
    def is_trusted(self) -> bool:
        """Whether steps are replayed from the recording."""
        return self._program is not None and self._left_to_check == 0

    def __call__(self, inputs: Tensor, padding: Tensor | None) -> Tensor:
        """See `decode_step`."""
        self._inputs.copy_(inputs)
        step = self._cache.step(self._batch, 1, padding)
        # A listener of the group must receive each all-reduce.
        if self.is_trusted and self._shard.group.listener is None:
            self._repeat()
            output = self._output
        else:
            output = self._prove(step)
        self._cache.length += 1
        return output

    def _prove(self, step: CacheStep | KernelStep) -> Tensor:
        """Run an ordinary step, and beside it the recording, or a comparison with it."""
        if self.refusals or self.is_trusted or self._shard.weights.memory_mapped:
            return compute_step(self._shard, self._inputs, step)
        if not self._is_warm:
            # A step loads the libraries of all kernels, so they are patched after it.
            self._is_warm = True
            return compute_step(self._shard, self._inputs, step)
        return self._record(step) if self._program is None else self._compare(step)

    def _record(self, step: CacheStep | KernelStep) -> Tensor:
        with Recording() as recording:
            output = compute_step(self._shard, self._inputs, step)
        self.refusals |= recording.refusals
        if self._agreed(not self.refusals, "another rank's step is not recorded"):
            self._program, self._output = recording.program(), output
        return output

    def _compare(self, step: CacheStep | KernelStep) -> Tensor:
        """Run the recorded step first, over memory cleared of other steps, then the ordinary one."""
        assert self._program is not None
        slot = self._cache.store[:, :, : self._batch, :, self._cache.length]
        slot.fill_(float("nan"))
        self._program.poison()
        self._repeat()
        repeated, written = self._output.clone(), slot.clone()
        output = compute_step(self._shard, self._inputs, step)
        same = _same_bits(repeated, output) and _same_bits(written, slot)
        if self._agreed(same, "the recorded step gives other bits than the ordinary one"):
            self._left_to_check -= 1
        else:
            self._program = None
        return output

    def _agreed(self, fine: bool, otherwise: str) -> bool:
        """Return whether all ranks of the group agree; if not, none of them tries again."""
        group = self._shard.group
        if group.size > 1:
            fine = int(group.all_reduce(torch.tensor([int(fine)]))) == group.size
        if not fine and not self.refusals:
            self.refusals.add(otherwise)
        return fine

    def _repeat(self) -> None:
        group = self._shard.group
        if group.size == 1:
            self._run()
        else:
            group.repeat(self._run, self._output.nbytes)

    def _run(self) -> None:
        assert self._program is not None
        failed = self._program.run()
        if failed is not None:
            name, code = failed
            if name in ("embed_rows", "add_rows"):
                raise IndexError("a token is outside the vocabulary")
            raise_for(code)


def compute_step(shard: "Shard", inputs: Tensor, step: CacheStep | KernelStep) -> Tensor:
    """Compute one more position on this stage: token ids [batch] on the last stage, else hidden states."""
    hidden = shard.compute(inputs, step, last_only=shard.last)
    return shard.greedy(shard.head(hidden)[:, -1]) if shard.last else hidden


def decode_step(shard: "Shard", cache: KeyValueCache, inputs: Tensor, padding: Tensor | None) -> Tensor:
    """Compute one more position of each sequence: token ids [batch] on the last stage, else hidden states [batch, 1,
    hidden].

    inputs: token ids [batch, 1] on the first stage, else the hidden states of the previous stage. The cache appends the
    new position. The result is valid until the next call. Call it in inference mode, which costs 5 us to enter.
    """
    assert torch.is_inference_mode_enabled()
    batch = inputs.shape[0]
    step = cache.recordings.get(batch)
    if step is None:
        step = cache.recordings[batch] = RecordedStep(shard, cache, batch)
    return step(inputs, padding)


def path_of(cache: KeyValueCache) -> DecodePath:
    """Return the current path of a cache's decode steps."""
    steps = list(cache.recordings.values())
    return "recorded" if steps and all(step.is_trusted for step in steps) else "steps"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
