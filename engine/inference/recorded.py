"""Decode steps on a CPU as recorded calls of C: one call a token instead of about a hundred from Python.

    chosen = decode_step(shard, cache, inputs, padding)       # the first calls record and compare, later ones repeat
    chosen = paged_decode_step(shard, cache, tokens, sequences, positions)

A step of a small model is bound by Python: with 4 layers and 8 MB of weights, it takes three times as long as the
products. So a step is recorded (`engine.kernels.program`) and then replayed over the same memory: the inputs are in a
buffer that is overwritten before each step, and the `step` of a cache updates position-dependent data in place.

A recording is verified first. For two further steps it runs beside the ordinary step, over memory filled with NaN, and
its results, including new keys and values, must be bit-identical on all ranks of the group. A step that uses operators
of torch, or all-reduces outside of shared memory, is never replayed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from engine.inference.cache import CacheStep, GpuStep, KernelStep, KeyValueCache
from engine.inference.paged import PagedCache, PagedStep
from engine.kernels.program import KernelProgram, Recording
from engine.parallel.shared_memory import raise_for
from engine.parallel.transports import SharedTransport

if TYPE_CHECKING:
    from engine.inference.model import Shard

RecordableStep = CacheStep | GpuStep | KernelStep | PagedStep
DecodePath = Literal["recorded", "steps"]

_CHECKED_STEPS = 2
STEPS_BEFORE_TRUST = 2 + _CHECKED_STEPS
"""One step loads the libraries, one is recorded, and the rest are comparisons."""


class Slots(Protocol):
    """Where a step writes its new keys and values."""

    def fill(self, value: float) -> None:
        """Overwrite them."""

    def read(self) -> Tensor:
        """Return a copy."""


@dataclass(frozen=True)
class _ContiguousSlots:
    """One position of the first rows of a cache."""

    slots: Tensor

    def fill(self, value: float) -> None:
        self.slots.fill_(value)

    def read(self) -> Tensor:
        return self.slots.clone()


@dataclass(frozen=True)
class _PagedSlots:
    """One position of each sequence of a paged cache, int64 [sequences] each."""

    store: Tensor
    blocks: Tensor
    within: Tensor

    def fill(self, value: float) -> None:
        self.store[:, :, self.blocks, :, self.within] = value

    def read(self) -> Tensor:
        return self.store[:, :, self.blocks, :, self.within]


class RecordedStep:
    """The decode steps of so many sequences of one cache on this stage. shape: of their tokens."""

    def __init__(self, shard: "Shard", shape: tuple[int, int]) -> None:
        self._shard = shard
        if shard.first:
            self._inputs = torch.zeros(shape, dtype=torch.int64)
        else:
            self._inputs = torch.zeros((*shape, shard.config.hidden), dtype=shard.dtype)
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

    def __call__(self, inputs: Tensor, step: RecordableStep, slots: Slots) -> Tensor:
        """See `decode_step`. slots: where the step writes."""
        self._inputs.copy_(inputs)
        # A listener of the group must receive each all-reduce.
        if self.is_trusted and self._shard.group.listener is None:
            self._repeat()
            return self._output
        return self._prove(step, slots)

    def _prove(self, step: RecordableStep, slots: Slots) -> Tensor:
        """Run an ordinary step, and beside it the recording, or a comparison with it."""
        if self.refusals or self.is_trusted or self._shard.weights.memory_mapped:
            return compute_step(self._shard, self._inputs, step)
        if not self._is_warm:
            # A step loads the libraries of all kernels, so they are patched after it.
            self._is_warm = True
            return compute_step(self._shard, self._inputs, step)
        return self._record(step) if self._program is None else self._compare(step, slots)

    def _record(self, step: RecordableStep) -> Tensor:
        with Recording() as recording:
            output = compute_step(self._shard, self._inputs, step)
        self.refusals |= recording.refusals
        if self._agreed(not self.refusals, "another rank's step is not recorded"):
            self._program, self._output = recording.program(), output
        return output

    def _compare(self, step: RecordableStep, slots: Slots) -> Tensor:
        """Run the recorded step first, over memory cleared of other steps, then the ordinary one."""
        assert self._program is not None
        slots.fill(float("nan"))
        self._program.poison()
        self._repeat()
        repeated, written = self._output.clone(), slots.read()
        output = compute_step(self._shard, self._inputs, step)
        same = _same_bits(repeated, output) and _same_bits(written, slots.read())
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


def compute_step(shard: "Shard", inputs: Tensor, step: RecordableStep) -> Tensor:
    """Compute one more position of each sequence on this stage: token ids [sequences] on the last stage, else hidden
    states.
    """
    hidden = shard.compute(inputs, step, last_only=False)
    return shard.greedy(shard.head(hidden).flatten(0, 1)) if shard.last else hidden


def decode_step(shard: "Shard", cache: KeyValueCache, inputs: Tensor, padding: Tensor | None) -> Tensor:
    """Compute one more position of each sequence: token ids [batch] on the last stage, else hidden states [batch, 1,
    hidden].

    inputs: token ids [batch, 1] on the first stage, else the hidden states of the previous stage. The cache appends the
    new position. The result is valid until the next call. Call it in inference mode, which costs 5 us to enter.
    """
    assert torch.is_inference_mode_enabled()
    batch = inputs.shape[0]
    recorded = cache.recordings.get(batch)
    if recorded is None:
        recorded = cache.recordings[batch] = RecordedStep(shard, (batch, 1))
    slots = _ContiguousSlots(cache.store[:, :, :batch, :, cache.length])
    output: Tensor = recorded(inputs, cache.step(batch, 1, padding), slots)
    cache.length += 1
    return output


def paged_decode_step(
    shard: "Shard", cache: PagedCache, inputs: Tensor, sequences: Tensor, positions: Tensor
) -> Tensor:
    """Compute one more position of different sequences of a paged cache, as `decode_step`.

    inputs: token ids [1, sequences] on the first stage, else hidden states [1, sequences, hidden]. sequences,
    positions: int32 [sequences].
    """
    assert torch.is_inference_mode_enabled()
    count = len(sequences)
    recorded = cache.recordings.get(count)
    if recorded is None:
        recorded = cache.recordings[count] = RecordedStep(shard, (1, count))
    within = positions.long() % cache.sizes.block
    slots = _PagedSlots(cache.store, cache.blocks_of(sequences, positions), within)
    output: Tensor = recorded(inputs, cache.step(sequences, positions), slots)
    return output


def path_of(cache: KeyValueCache) -> DecodePath:
    """Return the current path of a cache's decode steps."""
    steps = list(cache.recordings.values())
    return "recorded" if steps and all(step.is_trusted for step in steps) else "steps"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
