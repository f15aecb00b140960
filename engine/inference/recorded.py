"""Steps on a CPU as recorded calls of C: one call a step instead of about a hundred from Python.

    chosen = decode_step(shard, cache, inputs, padding)       # the first calls record and compare, later ones repeat
    chosen = paged_decode_step(shard, cache, tokens, sequences, positions)
    hidden = paged_step(shard, cache, tokens, sequences, positions)     # pieces of prompts among the tokens

A step of a small model is bound by Python: with 4 layers and 8 MB of weights, it takes three times as long as the
products. So a step is recorded (`engine.kernels.program`) and then replayed over the same memory: the inputs are in a
buffer that is overwritten before each step, and the `step` of a cache updates position-dependent data in place.

A recording is verified first. For two further steps it runs beside the ordinary step, over memory filled with NaN, and
its results, including new keys and values, must be bit-identical on all ranks of the group. A step that uses operators
of torch, or all-reduces outside of shared memory, is never replayed.

Decode steps have a recording for each number of sequences. Steps with pieces of prompts have too many sizes for that:
two recordings are made into one for all sizes between (`ScaledProgram`), which is compared at two others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from engine.inference.cache import CacheStep, GpuStep, KernelStep, KeyValueCache
from engine.inference.paged import PagedCache, PagedStep
from engine.inference.residual import splits_rows
from engine.kernels.operators import ONE_THREAD_ELEMENTS
from engine.kernels.program import KernelProgram, Recording, ScaledProgram
from engine.parallel.shared_memory import raise_for
from engine.parallel.transports import SharedTransport

if TYPE_CHECKING:
    from engine.inference.model import Shard

RecordableStep = CacheStep | GpuStep | KernelStep | PagedStep
DecodePath = Literal["recorded", "steps"]

_CHECKED_STEPS = 2
STEPS_BEFORE_TRUST = 2 + _CHECKED_STEPS
"""One step loads the libraries, one is recorded, and the rest are comparisons."""
_MOST_SCALED = 256
"""Tokens of a step. Of more, Python and memory are a small part, and a start computes four steps of nearly the most."""
_LARGEST_LAYER = 1 << 23
"""Hidden times feed-forward size of a rank: above this, 0.3 ms of Python are below a hundredth of a layer's time."""


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
    """Positions of a paged cache, int64 [tokens] each."""

    store: Tensor
    blocks: Tensor
    within: Tensor

    @classmethod
    def of(cls, cache: PagedCache, sequences: Tensor, positions: Tensor) -> "_PagedSlots":
        within = positions.long() % cache.sizes.block
        return cls(cache.store, cache.blocks_of(sequences, positions), within)

    def fill(self, value: float) -> None:
        self.store[:, :, self.blocks, :, self.within] = value

    def read(self) -> Tensor:
        return self.store[:, :, self.blocks, :, self.within]


class _Replay:
    """Steps on this stage of up to as many tokens as `shape`, from a recording once it is trusted."""

    def __init__(self, shard: "Shard", shape: tuple[int, int]) -> None:
        self._shard = shard
        if shard.first:
            self._inputs = torch.zeros(shape, dtype=torch.int64)
        else:
            self._inputs = torch.zeros((*shape, shard.config.hidden), dtype=shard.stream_dtype)
        self._output = self._inputs
        self._left_to_check = _CHECKED_STEPS
        self.refusals: set[str] = set()
        if shard.group.transport not in ("none", SharedTransport.name):
            self.refusals.add(f"sums over {shard.group.transport}")

    @property
    def is_trusted(self) -> bool:
        """Whether steps are replayed from the recording."""
        return self._left_to_check == 0 and not self.refusals

    @property
    def _is_replayed(self) -> bool:
        # A listener of the group must receive each all-reduce.
        return self.is_trusted and self._shard.group.listener is None

    @property
    def _may_be_proven(self) -> bool:
        return not (self.refusals or self.is_trusted or self._shard.weights.memory_mapped)

    def _compare(
        self, program: KernelProgram, recorded: Tensor, ordinary: Callable[[], Tensor], slots: Callable[[], Slots]
    ) -> Tensor:
        """Run the recorded step first, over memory cleared of other steps, then the ordinary one; return its result.

        recorded: where the program writes its own.
        """
        places = slots()
        places.fill(float("nan"))
        program.poison()
        self._run(program, recorded)
        repeated, written = recorded.clone(), places.read()
        output = ordinary()
        same = _same_bits(repeated, output) and _same_bits(written, places.read())
        if self._agreed(same, "the recorded step gives other bits than the ordinary one"):
            self._left_to_check -= 1
        return output

    def _agreed(self, fine: bool, otherwise: str) -> bool:
        """Return whether all ranks of the group agree; if not, none of them tries again."""
        group = self._shard.group
        if group.size > 1:
            fine = int(group.all_reduce(torch.tensor([int(fine)]))) == group.size
        if not fine and not self.refusals:
            self.refusals.add(otherwise)
        return fine

    def _run(self, program: KernelProgram, output: Tensor) -> None:
        group = self._shard.group
        if group.size == 1:
            _run_or_raise(program)
        else:
            group.repeat(lambda: _run_or_raise(program), output.nbytes)


class RecordedStep(_Replay):
    """The decode steps of so many sequences of one cache on this stage. shape: of their tokens."""

    def __init__(self, shard: "Shard", shape: tuple[int, int]) -> None:
        super().__init__(shard, shape)
        self._program: KernelProgram | None = None
        self._is_warm = False

    def __call__(self, inputs: Tensor, step: RecordableStep, slots: Callable[[], Slots]) -> Tensor:
        """See `decode_step`. slots: where the step writes."""
        self._inputs.copy_(inputs)
        if self._is_replayed:
            assert self._program is not None
            self._run(self._program, self._output)
            return self._output
        if not self._may_be_proven:
            return compute_step(self._shard, self._inputs, step)
        if not self._is_warm:
            # A step loads the libraries of all kernels, so they are patched after it.
            self._is_warm = True
            return compute_step(self._shard, self._inputs, step)
        if self._program is None:
            return self._record(step)
        return self._compare(self._program, self._output, lambda: compute_step(self._shard, self._inputs, step), slots)

    def _record(self, step: RecordableStep) -> Tensor:
        with Recording() as recording:
            output = compute_step(self._shard, self._inputs, step)
        self.refusals |= recording.refusals
        if self._agreed(not self.refusals, "another rank's step is not recorded"):
            self._program, self._output = recording.program(), output
        return output


class ScaledStep(_Replay):
    """Steps of `least` to `most` tokens of a paged cache on this stage, with pieces of prompts among them.

    unit: all numbers of tokens are multiples of it. The first step of `most` tokens is recorded, after it the first of
    `least`, and the next two are comparisons.
    """

    def __init__(self, shard: "Shard", least: int, most: int, unit: int) -> None:
        super().__init__(shard, (1, most))
        self.least, self.most, self._unit = least, most, unit
        self._large: Recording | None = None
        self._program: ScaledProgram | None = None

    def __call__(self, inputs: Tensor, step: RecordableStep, slots: Callable[[], Slots]) -> Tensor:
        """See `paged_step`."""
        count = inputs.shape[1]
        own, output = self._inputs[:, :count], self._output[:, :count]
        own.copy_(inputs)
        if self._is_replayed:
            assert self._program is not None
            self._program.scale(count)
            self._run(self._program, output)
            return output
        if not self._may_be_proven:
            return self._ordinary(own, step)
        if self._program is not None:
            self._program.scale(count)
            return self._compare(self._program, output, lambda: self._ordinary(own, step), slots)
        if count != (self.most if self._large is None else self.least):
            return self._ordinary(own, step)
        return self._record(own, step, self._large)

    def _ordinary(self, inputs: Tensor, step: RecordableStep) -> Tensor:
        return self._shard.compute(inputs, step, last_only=False)

    def _record(self, inputs: Tensor, step: RecordableStep, large: Recording | None) -> Tensor:
        with Recording(large) as recording:
            output = self._ordinary(inputs, step)
        self.refusals |= recording.refusals
        if large is None:
            self._large, self._output = recording, output
        elif not self.refusals:
            try:
                self._program = ScaledProgram(large, recording, (self.most, self.least), self._unit)
            except ValueError as error:
                self.refusals.add(str(error))
        self._agreed(not self.refusals, "another rank's step is not recorded")
        return output


def _run_or_raise(program: KernelProgram) -> None:
    failed = program.run()
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
    position = cache.length
    output: Tensor = recorded(
        inputs,
        cache.step(batch, 1, padding),
        lambda: _ContiguousSlots(cache.store[:, :, :batch, :, position]),
    )
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
    output: Tensor = recorded(
        inputs, cache.step(sequences, positions), lambda: _PagedSlots.of(cache, sequences, positions)
    )
    return output


def paged_step(shard: "Shard", cache: PagedCache, inputs: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
    """Compute the next positions of different sequences of a paged cache, some of them of prompts: hidden states [1,
    tokens, hidden].

    inputs: token ids [1, tokens] on the first stage, else hidden states. sequences, positions: int32 [tokens], as for
    `PagedCache.step`. The result is valid until the next call.
    """
    assert torch.is_inference_mode_enabled()
    count = len(positions)
    step = cache.step(sequences, positions)
    if cache.scaled_recordings is None:
        cache.scaled_recordings = {
            splits: ScaledStep(shard, counts[0], counts[-1], shard.group.size if splits else 1)
            for splits, counts in scaled_counts(shard, cache).items()
        }
    scaled = cache.scaled_recordings.get(splits_rows(shard.group, count, shard.config.hidden))
    if scaled is None or not scaled.least <= count <= scaled.most:
        return shard.compute(inputs, step, last_only=False)
    output: Tensor = scaled(inputs, step, lambda: _PagedSlots.of(cache, sequences, positions))
    return output


def scaled_counts(shard: "Shard", cache: PagedCache) -> dict[bool, list[int]]:
    """Return the numbers of tokens of the steps that `paged_step` records, by whether ranks split their rows.

    Empty without our attention, and where the layers are so large that it would not show. Equal on all ranks.
    """
    config, tp = shard.config, shard.grid.tp
    if not cache.batch_invariant or config.hidden * config.feed_forward > _LARGEST_LAYER * tp:
        return {}
    most = min(cache.sizes.max_tokens, _MOST_SCALED)
    if torch.get_num_threads() > 1:
        widest = max(config.hidden, -(-config.feed_forward * (1 + config.gated) // tp))
        most = min(most, ONE_THREAD_ELEMENTS // widest)  # torch's operators are not recorded
    counts: dict[bool, list[int]] = {}
    for count in range(1, most + 1):
        counts.setdefault(splits_rows(shard.group, count, config.hidden), []).append(count)
    return counts


def path_of(cache: KeyValueCache) -> DecodePath:
    """Return the current path of a cache's decode steps."""
    steps = list(cache.recordings.values())
    return "recorded" if steps and all(step.is_trusted for step in steps) else "steps"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
