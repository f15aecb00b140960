"""Memory of each strategy besides activations, over a step: weights, gradients, optimizer states, buckets.

    states = Ddp(stage, setup, framework)
    states.begin(0); states.gradients((elements, ...)); ...; states.step()

A strategy receives events (a micro-batch begins, a block is entered, gradients appear, the optimizer steps) and updates
`held`; temporary memory is in `momentary`. DeepSpeed's are in `zero_states`. Sources: torch 2.13
(nn/parallel/distributed.py and reducer.cpp for DDP; distributed/fsdp/_fully_shard for FSDP2).
"""

from dataclasses import dataclass

from engine.planner.memory.framework import Framework
from engine.planner.memory.stage import StageElements
from engine.planner.setup import TrainingSetup

_FLOAT = 4


@dataclass
class StateBytes:
    """Bytes by purpose."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    host: float = 0.0
    storage: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.communication


class States:
    """One rank without data parallelism; base class of the strategies."""

    def __init__(self, stage: StageElements, setup: TrainingSetup, framework: Framework) -> None:
        self.stage, self.setup, self.framework = stage, setup, framework
        self.mixed = setup.precision not in ("float32", "bfloat16_autocast")
        self.width = 2 if self.mixed else _FLOAT
        self.moments = 2 * _FLOAT if setup.optimizer == "adamw" else 0
        self.ranks = setup.layout.dp
        self.on_cpu = setup.machine.accelerator.kind == "cpu"
        self.held = StateBytes()
        self.momentary = 0.0
        self.micro = 0
        self.lay_out()

    @property
    def offloads(self) -> bool:
        """Whether states live on the host or in its storage."""
        return self.setup.offload != "none"

    @property
    def last(self) -> bool:
        """Whether this micro-batch ends the step."""
        return self.micro == self.setup.accumulation - 1

    def lay_out(self) -> None:
        """Allocate what exists during the whole step."""
        elements = self.stage.elements
        self.held.parameters = elements * self.width
        self._optimizer(elements * (self.moments + (_FLOAT if self.mixed else 0)))

    def _optimizer(self, size: float) -> None:
        """Allocate optimizer states, if the setup has an optimizer."""
        if self.setup.offload == "cpu":
            self.held.host += size
        elif self.setup.offload == "nvme":
            self.held.storage += size
        else:
            self.held.optimizer += size

    def begin(self, micro: int) -> None:
        """Begin a micro-batch's forward pass."""
        self.micro = micro

    def enter_forward(self, block: int) -> None:
        """Enter the first or last block in the forward pass; the head counts as one more block."""

    def enter_head(self) -> None:
        """Begin the backward pass, with the head's product."""

    def enter_block(self, first: bool) -> None:
        """Enter a block in the backward pass; `first`: the model's first block."""

    def leave_block(self) -> None:
        """Finish the block's backward pass."""

    def gradients(self, weights: tuple[float, ...]) -> None:
        """Receive the weights' gradients; they are added in place to earlier ones."""
        if self.micro == 0:
            self.held.gradients += sum(weights) * self.width

    def skip(self, blocks: int) -> None:
        """Skip this many blocks, equal to those before."""
        if blocks > 0:
            self.gradients((self.stage.block * blocks,))

    def end(self) -> None:
        """Finish the backward pass."""

    def step(self) -> None:
        """Take the optimizer's step: `momentary` is its temporary memory; afterwards gradients are freed."""
        self.momentary = self._temporaries(self.stage.elements)

    def _temporaries(self, elements: float) -> float:
        """Return temporary memory: foreach AdamW computes the square roots of all second moments; fused needs none."""
        return 0.0 if self.framework.fused_optimizer or not self.moments else elements * _FLOAT


class Ddp(States):
    """Gradients are views of buckets that are never freed; during `no_sync` accumulation they are separate."""

    def lay_out(self) -> None:
        super().lay_out()
        self.held.gradients = self.stage.elements * self.width

    def gradients(self, weights: tuple[float, ...]) -> None:
        size = sum(weights) * self.width
        if self.setup.accumulation == 1:
            return
        if self.micro == 0:
            self.held.gradients += size
        elif self.last:  # copied into the bucket and replaced by a view
            self.held.gradients -= size


class Fsdp(States):
    """FSDP2: shards of each block and of the root; float32 shards, gathered in the compute precision."""

    def lay_out(self) -> None:
        stage = self.stage
        self.ranks = self.setup.shards
        self.shard = stage.elements / self.ranks
        self.defers = self.setup.deferred and self.setup.accumulation > 1
        self.held.parameters = self.shard * _FLOAT
        if self.offloads:  # CPUOffloadPolicy: weights, gradients and states
            self.held.host += self.held.parameters * 2
            self.held.parameters = 0.0
        self._optimizer(self.shard * self.moments)
        self.previous = 0.0  # input of the previous reduce-scatter, kept until the next
        self.raw = 0.0  # gradients of the unit being computed
        self.root_raw = 0.0
        self.staying = 0.0  # bytes of blocks that are still gathered

    def begin(self, micro: int) -> None:
        super().begin(micro)
        self.previous = 0.0
        staying = {"root": 0, "last": 1, "all": self.stage.layers}[self.framework.stays_gathered]
        staying = staying if self.setup.reshard else self.stage.layers
        self.staying = staying * self.stage.block * self.width
        self.held.communication = self.stage.root * self.width + self.staying
        # A block's shards arrive in one buffer and are copied into its weights.
        self.momentary = 2 * self.stage.block * self.width

    def _gather(self) -> None:
        """Gather a block's weights unless they are present; gloo has an additional buffer for them."""
        block = self.stage.block * self.width
        self.momentary = 0.0
        if self.staying:
            self.staying -= block
            return
        self.held.communication += block
        self.momentary = (block if self.on_cpu else 0.0) + (block / self.ranks if self.mixed else 0.0)

    def enter_head(self) -> None:
        self._gather()  # prefetch of the last block

    def enter_block(self, first: bool) -> None:
        self.momentary = 0.0
        if not first and self.framework.prefetches:
            self._gather()
        self.raw = 0.0

    def gradients(self, weights: tuple[float, ...]) -> None:
        self.momentary = 0.0
        size = sum(weights) * self.width
        if self.defers and self.micro > 0 and not self.mixed:  # added in place to the gradients kept
            self.momentary = size
            return
        self.raw += size
        self.held.communication += size

    def head_gradients_stay(self) -> None:
        """Keep the root's gradients, which are reduced last."""
        self.root_raw, self.raw = self.raw, 0.0

    def _reduce(self, elements: float, raw: float) -> None:
        whole = elements * _FLOAT
        if self.defers and not self.last:  # unsharded gradients stay, in the precision of the later reduction
            self.held.communication -= raw
            self.held.gradients += whole if self.micro == 0 else 0.0
            self.momentary = 0.0
            return
        self.held.communication += whole - self.previous
        self.momentary = 0.0
        self.previous = whole
        self.held.communication -= raw
        if self.defers:
            self.held.gradients -= whole
        if (self.micro == 0 or self.defers) and not self.offloads:
            self.held.gradients += whole / self.ranks
        self.momentary = (whole if self.on_cpu else 0.0) + (
            whole / self.ranks if self.micro and not self.defers else 0.0
        )

    def leave_block(self) -> None:
        self.held.communication -= self.stage.block * self.width
        self._reduce(self.stage.block, self.raw)
        self.raw = 0.0

    def skip(self, blocks: int) -> None:
        blocks = max(0, blocks)
        gone = min(self.staying, blocks * self.stage.block * self.width)
        self.staying -= gone
        self.held.communication -= gone
        whole = blocks * self.stage.block * _FLOAT
        if self.defers:
            if self.micro == 0:
                self.held.gradients += whole
            if not self.last:
                return
            self.held.gradients -= whole
        if (self.micro == 0 or self.defers) and not self.offloads:
            self.held.gradients += whole / self.ranks

    def end(self) -> None:
        self.held.communication -= self.stage.root * self.width
        self._reduce(self.stage.root, self.root_raw + self.raw)
        self.root_raw = self.raw = 0.0

    def step(self) -> None:
        self.held.communication = self.previous = 0.0
        self.momentary = self._temporaries(self.shard)
