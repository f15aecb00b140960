"""Simulate autograd's memory, operator by operator: a recorded forward pass gives the bytes of both passes.

    tape = Tape()
    x = tape.given(bytes)                                        # created elsewhere; counted if a node saves it
    y = tape.apply((x,), out=bytes, saves=(x,), grads=(bytes,), weights=(elements,))
    both = tape.passes(y, gradient=bytes)

The rules are those of torch's eager autograd (torch/csrc/autograd/engine.cpp, input_buffer.cpp; version 2.13): nodes
run in reverse order of creation; a node releases its saved tensors, and its incoming gradient, when it has run; a
second gradient of the same value is added in place if nothing else holds the first; a weight's gradient is passed on at
once.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

PASS: Final[Literal["pass"]] = "pass"
Gradient = float | Literal["pass"] | None


@dataclass(eq=False)
class TapeValue:
    """A tensor of the forward pass; a view shares its base's buffer."""

    buffer: int


@dataclass(frozen=True)
class TapeNode:
    """One operator. `grads`: bytes of each input's gradient; PASS: the incoming tensor itself; None: needs none."""

    out: TapeValue
    inputs: tuple[TapeValue, ...]
    saves: tuple[int, ...]
    grads: tuple[Gradient, ...]
    weights: tuple[float, ...]
    weight_bytes: float
    temporary: float
    backward_temporary: float


@dataclass(frozen=True)
class MemoryEvent:
    """Weights' gradients appear in the backward pass.

    high: peak bytes since the previous event, these gradients included; low: bytes when they are passed on, without
    them.
    weights: elements of each; the last event of a pass has none.
    """

    high: float
    low: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class TapePasses:
    """Bytes of a part of the model, above the level before it; the input is counted if `input_saved`.

    forward_high: peak of the forward pass (`bare_high`: without tensors saved for the backward pass); saved: bytes kept
    for the backward pass, output not counted; events: levels of the backward pass, the saved and the incoming gradient
    included, down to the outgoing gradient.
    """

    forward_high: float
    bare_high: float
    saved: float
    input_saved: bool
    events: tuple[MemoryEvent, ...]

    held: float  # bytes that a variable keeps after the backward pass
    loss_high: float  # peak of the backward pass before the first weight's node runs
    after_loss_high: float  # peak from there to the first event


@dataclass
class Tape:
    """The recorded forward pass of a part of the model: operators and the bytes of their outputs."""

    sizes: list[float] = field(default_factory=list)
    nodes: list[TapeNode] = field(default_factory=list)
    given_buffers: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    weight_copies: set[int] = field(default_factory=set)

    def given(self, size: float) -> TapeValue:
        """Add an input of the part."""
        value = self._new(size)
        self.given_buffers.add(value.buffer)
        return value

    def _new(self, size: float) -> TapeValue:
        self.sizes.append(size)
        return TapeValue(len(self.sizes) - 1)

    def hold(self, value: TapeValue) -> None:
        """Keep a value until the end of the backward pass, as a variable of the training loop does."""
        self.held.add(value.buffer)

    def apply(
        self,
        inputs: tuple[TapeValue, ...],
        out: float | None,
        saves: tuple[TapeValue, ...] = (),
        grads: tuple[Gradient, ...] = (PASS,),
        weights: tuple[float, ...] = (),
        weight_bytes: float = 0,
        temporary: float = 0,
        backward_temporary: float = 0,
        saves_output: bool = False,
    ) -> TapeValue:
        """Record an operator; out None: a view of the first input. `weight_bytes`: of the gradients as computed."""
        value = TapeValue(inputs[0].buffer) if out is None else self._new(out)
        saved = {each.buffer for each in saves} | ({value.buffer} if saves_output else set())
        node = TapeNode(
            value, inputs, tuple(sorted(saved)), grads, weights, weight_bytes, temporary, backward_temporary
        )  # fmt: skip
        self.nodes.append(node)
        return value

    def passes(self, output: TapeValue, gradient: float) -> TapePasses:
        """Return bytes of the forward and the backward pass; `gradient`: of the output, 0 for a loss."""
        saved = {buffer for node in self.nodes for buffer in node.saves} | self.held
        kept = sum(self.sizes[buffer] for buffer in saved)
        events, loss_high, after_loss_high = self._backward(output, gradient, kept)
        return TapePasses(
            self._forward(saved, output),
            self._forward(set(), output),
            kept,
            bool(saved & self.given_buffers),
            tuple(events),
            sum(self.sizes[buffer] for buffer in self.held),
            loss_high,
            after_loss_high,
        )

    def _forward(self, saved: set[int], output: TapeValue) -> float:
        last_use = {buffer: -1 for buffer in range(len(self.sizes))}
        for number, node in enumerate(self.nodes):
            for value in (node.out, *node.inputs):
                last_use[value.buffer] = number
        last_use[output.buffer] = len(self.nodes)
        live = high = 0.0
        alive: set[int] = set()
        for buffer in saved & self.given_buffers:
            live += self.sizes[buffer]
        for number, node in enumerate(self.nodes):
            buffer = node.out.buffer
            if buffer not in alive and buffer not in self.given_buffers:
                alive.add(buffer)
                live += self.sizes[buffer]
            high = max(high, live + node.temporary)
            for used in {each.buffer for each in (node.out, *node.inputs)}:
                if last_use[used] == number and used not in saved and used in alive:
                    alive.remove(used)
                    live -= self.sizes[used]
        return high

    def _backward(self, output: TapeValue, gradient: float, kept: float) -> tuple[list[MemoryEvent], float, float]:
        holders = dict.fromkeys(range(len(self.sizes)), 0)
        for node in self.nodes:
            for buffer in node.saves:
                holders[buffer] += 1
        for buffer in self.held:
            holders[buffer] += 1
        walk = _Walk(live=kept + gradient)
        walk.pending[output] = walk.buffer(gradient)
        events: list[MemoryEvent] = []
        loss_high, after_loss_high = 0.0, 0.0
        for node in reversed(self.nodes):
            if node.out not in walk.pending:
                continue
            product = node.weights or any(value.buffer in self.weight_copies for value in node.inputs)
            if product and not events and not loss_high:
                loss_high, walk.high = max(walk.high, walk.live), 0.0
            walk.run(node)
            for buffer in node.saves:
                holders[buffer] -= 1
                if holders[buffer] == 0:
                    walk.live -= self.sizes[buffer]
            walk.accumulate_gradients()
            if node.weights:
                walk.live -= node.weight_bytes
                after_loss_high = after_loss_high or walk.high
                events.append(MemoryEvent(max(walk.high, 0.0 if events else loss_high), walk.live, node.weights))
                walk.high = walk.live
        events.append(MemoryEvent(walk.high, walk.live, ()))
        return events, loss_high, after_loss_high


@dataclass
class _Walk:
    """The gradients that are alive during a backward pass. A buffer is [bytes, holders]."""

    live: float
    high: float = 0.0
    pending: dict[TapeValue, list[float]] = field(default_factory=dict)
    _arrived: list[tuple[TapeValue, list[float]]] = field(default_factory=list)

    @staticmethod
    def buffer(size: float) -> list[float]:
        return [size, 1.0]

    def release(self, buffer: list[float]) -> None:
        buffer[1] -= 1
        if buffer[1] == 0:
            self.live -= buffer[0]

    def run(self, node: TapeNode) -> None:
        """Run a node: its gradients appear, its incoming gradient is released."""
        given = self.pending.pop(node.out)
        self.high = max(self.high, self.live)
        for value, size in zip(node.inputs, node.grads, strict=False):
            if size is None:
                continue
            if isinstance(size, str):
                given[1] += 1
                self._arrived.append((value, given))
            else:
                self.live += size
                self._arrived.append((value, self.buffer(size)))
        self.live += node.weight_bytes
        self.high = max(self.high, self.live + node.backward_temporary)
        self.release(given)

    def accumulate_gradients(self) -> None:
        """Keep arrived gradients, or add them to existing ones."""
        for value, new in self._arrived:
            old = self.pending.get(value)
            if old is None:
                self.pending[value] = new
                continue
            if old[1] > 1:  # another holder: the sum is a new tensor
                self.live += old[0]
                self.high = max(self.high, self.live)
                self.release(old)
                self.pending[value] = self.buffer(old[0])
            self.release(new)
        self._arrived.clear()
