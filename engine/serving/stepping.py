"""Compute the steps of a replica on one of its ranks.

runner = StepRunner(shard, communicators.pipeline, cache)
found = runner.run(step)                # on the first rank: what the rows chose
launched = runner.launch(step, began)   # the same, without waiting for a GPU
found, seconds = launched.wait()
"""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.inference.graphs import MAX_RECORDED_TOKENS, RECORDED_SIZES, static_paged_step
from engine.inference.model import Shard
from engine.inference.paged import PagedCache
from engine.inference.pipeline import PipelineStage
from engine.inference.recorded import STEPS_BEFORE_TRUST, paged_decode_step, paged_step, scaled_counts
from engine.parallel.communicator import Communicator
from engine.serving.drawing import DRAW_FIELDS, as_draws, count_unfiltered, draw_in_shares, draw_tokens
from engine.serving.sampling import Sampling
from engine.serving.step_message import TokenStep

_MAX_WARM_SIZES = 64


@dataclass(frozen=True)
class StepChoices:
    """What a step's rows chose: token ids int64 [rows]; logits of its logit rows, float32 [logit rows, vocabulary].

    The tokens of these rows say nothing. logits None: there are none.
    """

    tokens: Tensor
    logits: Tensor | None = None


class LaunchedStep:
    """A step that may still be running: what its rows chose, and how long it took."""

    def __init__(self, device: torch.device, began: float) -> None:
        """began: by time.perf_counter; a GPU has a clock of its own, since steps wait there for those before."""
        self._began = began
        self._found: StepChoices | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            self._events = first, last

    def take(self, found: StepChoices | None) -> None:
        """Take what the rows chose. Token ids go to the host as soon as they are known, before a step behind begins."""
        self._found = found
        if self._events is None:
            return
        if found is not None:
            tokens = torch.empty(found.tokens.shape, dtype=found.tokens.dtype, pin_memory=True)
            tokens.copy_(found.tokens, non_blocking=True)
            self._found = StepChoices(tokens, found.logits)
        self._events[1].record()

    def wait(self) -> tuple[StepChoices | None, float]:
        """Return what the rows chose, on the host, and the seconds of the step. Logits wait for every launched step."""
        found = self._found
        if self._events is None:
            return found, time.perf_counter() - self._began
        first, last = self._events
        last.synchronize()
        if found is not None and found.logits is not None:
            found = StepChoices(found.tokens, found.logits.cpu())
        return found, first.elapsed_time(last) / 1e3


class StepRunner:
    """This rank's layers and cache."""

    def __init__(self, shard: Shard, pipeline: Communicator, cache: PagedCache) -> None:
        self._shard, self._pipeline, self._cache = shard, pipeline, cache
        self._stage = PipelineStage(shard, pipeline)
        self._records = shard.uses_graphs and cache.has_static_steps
        self._chosen: Tensor | None = None  # token ids of the last step that chose some
        self.on_gpu = shard.device.type == "cuda"

    @property
    def overlaps(self) -> bool:
        """Whether a step can be launched while the one before is computed: every rank has what that one chooses."""
        return self._records and self._pipeline.size == 1

    @torch.inference_mode()
    def launch(self, step: TokenStep, began: float) -> LaunchedStep:
        """Begin a step, on a CPU compute it. began: when its work began, by time.perf_counter."""
        launched = LaunchedStep(self._shard.device, began)
        launched.take(self.run(step))
        return launched

    @torch.inference_mode()
    def run(self, step: TokenStep) -> StepChoices | None:
        """Compute a step; return what the rows chose on the first stage, None on others and where none chooses.

        A token ~row is the one that this row of the step before has chosen. On a GPU the step may still be running.
        """
        shard, cache = self._shard, self._cache
        moved = moved_to(shard.device, step)
        if step.assigned.shape[1]:
            cache.assign(*moved.assigned)
        inputs = self._stage.inputs(self._known(step, moved.tokens)[None])
        greedy = not len(step.logit_rows) and not step.draws.shape[1]
        made: StepChoices | None = None
        if len(step.rows) == len(step.tokens) and greedy and shard.device.type == "cpu":
            tokens = self._stage.passed_on(paged_decode_step(shard, cache, inputs, step.slots, step.positions))
            made = None if tokens is None else StepChoices(tokens)
        else:
            if self._records and len(step.tokens) <= MAX_RECORDED_TOKENS:
                hidden = static_paged_step(shard, cache, inputs, moved.slots, moved.positions)
            else:
                hidden = paged_step(shard, cache, inputs, step.slots, step.positions)
            last = self._stage.passed_on(hidden)
            if last is not None and len(step.rows):
                made = self._choices(last, moved, count_unfiltered(step.draws))
        return self._on_first_stage(step, made) if len(step.rows) else None

    def _on_first_stage(self, step: TokenStep, made: StepChoices | None) -> StepChoices | None:
        """Return on the first stage what the last one has made, and None on the others."""
        pipeline = self._pipeline
        if pipeline.size == 1:
            self._chosen = None if made is None or made.logits is not None else made.tokens
            return made
        if made is not None:
            pipeline.send(made.tokens, 0)
            if made.logits is not None:
                pipeline.send(made.logits, 0)
            return None
        if not self._shard.first:
            return None
        device, wanted = self._shard.device, len(step.logit_rows)
        tokens = torch.empty(len(step.rows), dtype=torch.int64, device=device)
        tokens = pipeline.receive(tokens, pipeline.size - 1)
        if not wanted:
            return StepChoices(tokens)
        logits = torch.empty((wanted, self._shard.config.vocabulary), dtype=torch.float32, device=device)
        return StepChoices(tokens, pipeline.receive(logits, pipeline.size - 1))

    def _known(self, step: TokenStep, tokens: Tensor) -> Tensor:
        """Return token ids [tokens], int64 on the device, with those that the step before has chosen."""
        if not bool((step.tokens < 0).any()):
            return tokens.long().to(self._shard.device)
        assert self._chosen is not None, "the step before has chosen no token"
        # What could not be chosen (NO_WORD) is told by that step; here any word will do.
        chosen = self._chosen[(~tokens).clamp(min=0).long()].clamp(min=0)
        return torch.where(tokens < 0, chosen, tokens)

    def warm_up(self) -> None:
        """Compute each size of a decode step until it is recorded, so that no request pays for it.

        All ranks call it together, before the first request. What it leaves in the cache is never read.
        """
        sizes = self._cache.sizes
        if self._shard.device.type == "cuda":
            # A step takes the next larger size that is recorded; the largest compiles the kernels for prompts.
            recorded = {min(size, sizes.max_tokens) for size in RECORDED_SIZES} if self._records else set()
            for length in sorted(recorded | {sizes.max_tokens}):
                self.run(self._prompt_step(length, choosing=1))
            drawing = as_draws([(0, Sampling(temperature=1.0), 0), (0, Sampling(temperature=1.0, top_p=0.5), 0)])
            self.run(replace(self._prompt_step(1, choosing=1), draws=drawing))
            return
        for count in range(1, min(sizes.sequences, sizes.blocks, _MAX_WARM_SIZES) + 1):
            numbers = torch.arange(count, dtype=torch.int32)
            places = torch.zeros(count, dtype=torch.int32)
            step = TokenStep(places, numbers, places, numbers, torch.stack([numbers, places, numbers]))
            for _ in range(STEPS_BEFORE_TRUST):
                self.run(step)
        for counts in scaled_counts(self._shard, self._cache).values():
            # Two recordings, then two comparisons.
            for length in (counts[-1], counts[0], counts[-1], counts[len(counts) // 2]):
                self.run(self._prompt_step(length, choosing=0))

    def _prompt_step(self, length: int, choosing: int) -> TokenStep:
        """Return a step of a prompt's tokens, of which so many choose; the prompt's table is all block 0."""
        places = torch.arange(length, dtype=torch.int32) % self._cache.sizes.max_length
        nowhere = torch.zeros(length, dtype=torch.int32)
        return TokenStep(nowhere, nowhere, places, nowhere[:choosing], torch.zeros((3, 0), dtype=torch.int32))

    def _choices(self, hidden: Tensor, step: TokenStep, unfiltered: int) -> StepChoices:
        """Return what the rows choose. step: on the device; unfiltered: of its draws."""
        shard, device = self._shard, hidden.device
        logits = shard.head(hidden[:, step.rows.long().to(device)])
        wanted = step.logit_rows.long().to(device)
        if step.draws.shape[1]:
            full = shard.full_logits(logits)[0].float()
            if self.on_gpu:
                # Sums on a GPU may differ in the last bit from rank to rank.
                tokens = shard.group.broadcast(draw_tokens(full, step.draws, unfiltered), 0)
            else:
                tokens = draw_in_shares(full, step.draws, shard.group)
            return StepChoices(tokens, full[wanted] if len(wanted) else None)
        if not len(wanted):
            return StepChoices(shard.greedy(logits[0]))
        full = shard.full_logits(logits[:, wanted])[0].float()
        if len(wanted) == len(step.rows):
            return StepChoices(torch.zeros(len(wanted), dtype=torch.int64, device=device), full)
        return StepChoices(shard.greedy(logits[0]), full)


def moved_to(device: torch.device, step: TokenStep) -> TokenStep:
    """Return a step's numbers on a device: to a GPU in one copy that waits for nothing before it."""
    if device.type == "cpu":
        return step
    packed, lengths = packed_numbers(step)
    if device.type == "cuda":
        packed = packed.pin_memory()
    return unpacked_step(packed.to(device, non_blocking=True), lengths)


def packed_numbers(step: TokenStep) -> tuple[Tensor, list[int]]:
    """Return all numbers of a step as int32, and how many belong to each part."""
    draws = step.draws.flatten().view(torch.int32)  # first: numbers of 64 bits do not begin anywhere
    assigned = step.assigned.flatten()
    parts = (draws, step.tokens, step.slots, step.positions, step.rows, step.logit_rows, assigned)
    return torch.cat(parts), [len(part) for part in parts]


def unpacked_step(packed: Tensor, lengths: list[int]) -> TokenStep:
    """Return the step of `packed_numbers`, as views."""
    draws, tokens, slots, positions, rows, logit_rows, assigned = torch.split(packed, lengths)
    drawn = draws.view(torch.float64).view(DRAW_FIELDS, lengths[0] // (2 * DRAW_FIELDS))
    return TokenStep(tokens, slots, positions, rows, assigned.view(3, lengths[-1] // 3), logit_rows, drawn)
