"""Decode steps on a CPU as recorded calls of C: one call a token instead of some hundred from Python.

    chosen = decode_step(shard, cache, inputs, padding)       # the first calls record and compare, later ones repeat

A step of a small model is bound by Python: of 4 layers, 8 MB of weights, it takes three times as long as the products.
So a step is noted while it is made (`engine.kernels.program`) and then repeated over the same memory: the inputs lie in
a buffer that is overwritten before each step, what depends on the position lies where `KeyValueCache.step` puts it.

A recording is not believed. For two further steps it is made beside the ordinary one, over memory that was filled with
what is no number, and what it gives, the new keys and values included, must be the same bit by bit on all ranks of
the group. A step that computes with operators of torch, or whose sums do not go through shared memory, stays ordinary.
"""

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from engine.inference.cache import KernelStep, KeyValueCache, Step
from engine.kernels.program import Program, Recording
from engine.parallel.shared_memory import raise_for
from engine.parallel.transports import SharedTransport

if TYPE_CHECKING:
    from engine.inference.model import Shard

DecodePath = Literal["recorded", "steps"]

_CHECKED_STEPS = 2
STEPS_BEFORE_TRUST = 2 + _CHECKED_STEPS
"""One for the libraries to be loaded, one that is recorded, and the comparisons."""


class RecordedStep:
    """The decode steps of the first `batch` sequences of one cache on this stage."""

    def __init__(self, shard: "Shard", cache: KeyValueCache, batch: int) -> None:
        self._shard, self._cache, self._batch = shard, cache, batch
        if shard.first:
            self._inputs = torch.zeros((batch, 1), dtype=torch.int64)
        else:
            self._inputs = torch.zeros((batch, 1, shard.config.hidden), dtype=shard.dtype)
        self._program: Program | None = None
        self._output = self._inputs
        self._is_warm, self._left_to_check = False, _CHECKED_STEPS
        self.refusals: set[str] = set()
        if shard.group.transport not in ("none", SharedTransport.name):
            self.refusals.add(f"sums over {shard.group.transport}")

    @property
    def is_trusted(self) -> bool:
        """Whether steps are repeated from the recording."""
        return self._program is not None and self._left_to_check == 0

    def __call__(self, inputs: Tensor, padding: Tensor | None) -> Tensor:
        """See `decode_step`."""
        self._inputs.copy_(inputs)
        step = self._cache.step(self._batch, 1, padding)
        # Who listens to the group wants to hear of each sum.
        if self.is_trusted and self._shard.group.listener is None:
            self._repeat()
            output = self._output
        else:
            output = self._prove(step)
        self._cache.length += 1
        return output

    def _prove(self, step: Step | KernelStep) -> Tensor:
        """An ordinary step, and beside it whatever comes next: the recording, or a comparison with it."""
        if self.refusals or self.is_trusted or self._shard.weights.lent:
            return compute_step(self._shard, self._inputs, step)
        if not self._is_warm:
            # The libraries of all kernels are loaded after a step that was made.
            self._is_warm = True
            return compute_step(self._shard, self._inputs, step)
        return self._record(step) if self._program is None else self._compare(step)

    def _record(self, step: Step | KernelStep) -> Tensor:
        with Recording() as recording:
            output = compute_step(self._shard, self._inputs, step)
        self.refusals |= recording.refusals
        if self._agreed(not self.refusals, "another rank's step is not recorded"):
            self._program, self._output = recording.program(), output
        return output

    def _compare(self, step: Step | KernelStep) -> Tensor:
        """The recorded step first, over memory in which nothing is left of other steps, then the ordinary one."""
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
        """Whether it is fine on all ranks of the group; where it is not, none of them tries again."""
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


def compute_step(shard: "Shard", inputs: Tensor, step: Step | KernelStep) -> Tensor:
    """What this stage makes of one more position: token ids [batch] on the last stage, else hidden states."""
    hidden = shard.compute(inputs, step, last_only=shard.last)
    return shard.greedy(shard.head(hidden)[:, -1]) if shard.last else hidden


def decode_step(shard: "Shard", cache: KeyValueCache, inputs: Tensor, padding: Tensor | None) -> Tensor:
    """One more position of each sequence: token ids [batch] on the last stage, else hidden states [batch, 1, hidden].

    inputs: token ids [batch, 1] on the first stage, else the hidden states of the stage before. The cache takes up the
    new position. The outcome stays good until the next call. Called in inference mode, which costs 5 us to enter.
    """
    assert torch.is_inference_mode_enabled()
    batch = inputs.shape[0]
    step = cache.recordings.get(batch)
    if step is None:
        step = cache.recordings[batch] = RecordedStep(shard, cache, batch)
    return step(inputs, padding)


def path_of(cache: KeyValueCache) -> DecodePath:
    """How the decode steps of a cache are made by now."""
    steps = list(cache.recordings.values())
    return "recorded" if steps and all(step.is_trusted for step in steps) else "steps"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
