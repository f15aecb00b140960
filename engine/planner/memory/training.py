"""Bytes on the fullest rank at the peak of a training step, phase by phase.

    memory = training_memory(setup)                             # TrainingSetup -> Memory
    memory = training_memory(setup, Framework(holds_logits=False))

A step is replayed: forward pass, loss, backward pass block by block, optimizer. At each moment the bytes of the
strategy (`states`) and of autograd (`activations`) are summed; the result is the largest sum with its parts.
"""

from dataclasses import replace

from engine.planner.memory.activations import ActivationParts, parts_of
from engine.planner.memory.framework import DEFAULT, Framework
from engine.planner.memory.stage import StageElements, stage_of
from engine.planner.memory.states import Ddp, Fsdp, StateBytes, States
from engine.planner.memory.tape import TapePasses
from engine.planner.memory.zero_states import Zero3, Zero12
from engine.planner.results import Memory
from engine.planner.setup import TrainingSetup

_STATES: dict[str, type[States]] = {
    "none": States, "ddp": Ddp, "fsdp": Fsdp, "zero1": Zero12, "zero2": Zero12, "zero3": Zero3,
}  # fmt: skip
# Blocks are equal: the peak is in the first or the last ones, so those between are skipped.
_REPLAYED_BLOCKS = 2


def training_memory(setup: TrainingSetup, framework: Framework = DEFAULT) -> Memory:
    """Return the peak of a step on the fullest rank, once optimizer states exist."""
    stages = {0, setup.layout.pp - 1}
    return max((_stage_memory(setup, framework, index) for index in sorted(stages)), key=lambda memory: memory.total)


class _Peak:
    """The largest moment so far."""

    def __init__(self) -> None:
        self.total = -1.0
        self.held = StateBytes()
        self.activations = self.logits = self.momentary = 0.0

    def see(self, states: States, activations: float, logits: float = 0.0) -> None:
        """Update the peak with a moment: held and temporary bytes of the strategy, and autograd's."""
        total = states.held.total + states.momentary + activations
        if total > self.total:
            self.total, self.held, self.momentary = total, replace(states.held), states.momentary
            self.activations, self.logits = activations, min(logits, activations)

    def memory(self, setup: TrainingSetup, framework: Framework) -> Memory:
        """Return whole bytes by purpose."""
        held = self.held
        tensors = Memory(
            round(held.parameters), round(held.gradients), round(held.optimizer),
            round(self.activations - self.logits), round(self.logits), 0,
            round(held.communication + self.momentary), 0, round(held.host), round(held.storage),
        )  # fmt: skip
        accelerator = setup.machine.accelerator
        if accelerator.training_framework_bytes is not None:  # measured
            return replace(tensors, framework=accelerator.training_framework_bytes)
        if accelerator.kind == "cpu":
            return tensors
        lost = tensors.tensors * framework.fragmentation / (1 - framework.fragmentation)
        return replace(tensors, framework=round(lost) + framework.context_bytes)


def _stage_memory(setup: TrainingSetup, framework: Framework, index: int) -> Memory:
    stage, parts = stage_of(setup, index), parts_of(setup, framework)
    states = _STATES[setup.layout.strategy](stage, setup, framework)
    peak = _Peak()
    pipeline = setup.layout.pp
    # Micro-batches in progress on a stage of the 1F1B schedule (arXiv 2104.04473).
    begun = min(pipeline - index, setup.accumulation)
    replay = _Replay(setup, parts, stage, states, peak, begun - 1)
    replay.embeds, replay.heads = index == 0, index == pipeline - 1
    for micro in sorted({0, min(1, setup.accumulation - 1), setup.accumulation - 1}):
        states.begin(micro)
        replay.micro_batch()
    states.step()
    peak.see(states, 0.0)
    return peak.memory(setup, framework)


class _Replay:
    """One micro-batch after another on one stage."""

    def __init__(
        self,
        setup: TrainingSetup,
        parts: ActivationParts,
        stage: StageElements,
        states: States,
        peak: _Peak,
        others: int,
    ) -> None:
        self.setup, self.parts, self.stage, self.states, self.peak = setup, parts, stage, states, peak
        self.embeds = self.heads = True
        block = parts.block
        own_input = 0.0 if block.input_saved else parts.input_bytes
        if setup.checkpointing == "none":
            self.kept, self.again = block.saved, 0.0
        elif setup.checkpointing == "full":
            self.kept, self.again = parts.input_bytes, own_input
        else:
            self.kept, self.again = parts.input_bytes + parts.policy_bytes, own_input + parts.policy_extra
        self.below = parts.tables + parts.embedding.saved + others * self.kept * stage.layers

    def micro_batch(self) -> None:
        """Run forward, loss and backward."""
        parts, states, peak = self.parts, self.states, self.peak
        kept = self.below + self.kept * self.stage.layers
        checkpointed = self.setup.checkpointing != "none"
        forward = parts.block.bare_high if checkpointed else parts.block.forward_high
        copies = parts.cast_copies if checkpointed else 0.0
        peak.see(states, self.below)
        for number in sorted({0, self.stage.layers - 1}):
            states.enter_forward(number)
            moment = self.below + self.kept * number + forward + (parts.input_bytes if checkpointed else 0.0)
            peak.see(states, moment + copies * number)
        states.momentary = 0.0
        states.enter_forward(self.stage.layers)
        if self.heads:
            peak.see(states, kept + parts.product_high + copies * self.stage.layers)
        pending = 0.0
        if self.heads:
            # The loss is computed within autocast, which then frees its copies of the weights.
            peak.see(states, kept + parts.head.forward_high + copies * self.stage.layers, parts.logits_bytes)
            pending = self._events(parts.head, kept, tied_bytes=self._tied(), head=True) + parts.head.held
        if isinstance(states, Fsdp):
            states.head_gradients_stay()
        self._blocks(kept, pending)
        if self.embeds:
            self._events(parts.embedding, self.below - parts.embedding.saved + pending, head=False)
        states.end()
        peak.see(states, self.below - parts.embedding.saved + (parts.head.held if self.heads else 0.0))
        states.momentary = 0.0

    def _tied(self) -> float:
        """Hold a tied head's gradient until the embedding's is computed, as autograd does."""
        tied = self.stage.unembedding and not self.stage.head and self.embeds
        return self.states.width if tied else 0.0

    def _events(self, passes: TapePasses, base: float, tied_bytes: float = 0.0, head: bool = False) -> float:
        """Run the backward pass of a part of the root; returns bytes that wait for the other end of a tied weight."""
        pending = 0.0
        first, *rest = passes.events
        logits = self.parts.logits_bytes if head else 0.0
        if head:
            # The loss precedes the head's product and its weight gathering.
            self.peak.see(self.states, base + passes.loss_high, logits)
            self.states.enter_head()
        for number, event in enumerate((first, *rest)):
            high = passes.after_loss_high if head and number == 0 else event.high
            self.peak.see(self.states, base + pending + high, logits if number == 0 else 0.0)
            if head and number == 0 and tied_bytes:
                pending += sum(event.weights) * tied_bytes
            elif event.weights:
                self.states.gradients(event.weights)
            self.peak.see(self.states, base + pending + event.low)
            if event.weights:
                self.states.momentary = 0.0
        return pending

    def _blocks(self, kept: float, pending: float) -> None:
        layers = self.stage.layers
        for number in range(layers):
            between = layers - 2 * _REPLAYED_BLOCKS
            if number == _REPLAYED_BLOCKS and between > 0:
                self.states.skip(between)
            if between > 0 and _REPLAYED_BLOCKS <= number < _REPLAYED_BLOCKS + between:
                continue
            self._block(kept - self.kept * (number + 1) + pending, first=number == layers - 1)

    def _block(self, base: float, first: bool) -> None:
        states, peak, block = self.states, self.peak, self.parts.block
        states.enter_block(first)
        if self.setup.checkpointing != "none":
            peak.see(states, base + self.again + self.parts.input_bytes + block.forward_high)
            states.momentary = 0.0
        for event in block.events:
            peak.see(states, base + self.again + event.high)
            if event.weights:
                states.gradients(event.weights)
            peak.see(states, base + self.again + event.low)
            if event.weights:
                states.momentary = 0.0
        states.leave_block()
        peak.see(states, base + self.parts.input_bytes)
        states.momentary = 0.0
