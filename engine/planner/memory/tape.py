"""What autograd keeps, operator by operator: a forward pass written down once gives the bytes of both passes.

    tape = Tape()
    x = tape.given(bytes)                                        # made elsewhere; counted where a node saves it
    y = tape.apply((x,), out=bytes, saves=(x,), grads=(bytes,), weights=(elements,))
    both = tape.passes(y, gradient=bytes)

The rules are those of torch's eager autograd (torch/csrc/autograd/engine.cpp, input_buffer.cpp; version 2.13): nodes
run in reverse order of creation; a node lets go of what it saved, and of the gradient it was given, when it has run;
a second gradient of the same value is added in place where nobody else holds the first; a weight's gradient is handed
on at once.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

PASS: Final[Literal["pass"]] = "pass"
Gradient = float | Literal["pass"] | None


@dataclass(eq=False)
class Value:
    """A tensor of the forward pass; a view shares its base's buffer."""

    buffer: int


@dataclass(frozen=True)
class Node:
    """One operator. `grads`: bytes of each input's gradient; PASS: the same tensor as was given; None: needs none."""

    out: Value
    inputs: tuple[Value, ...]
    saves: tuple[int, ...]
    grads: tuple[Gradient, ...]
    weights: tuple[float, ...]
    weight_bytes: float
    temporary: float
    backward_temporary: float


@dataclass(frozen=True)
class Event:
    """Weights' gradients appear in the backward pass.

    high: most bytes since the event before, these gradients included; low: bytes when they are handed on, without them.
    weights: elements of each; the last event of a pass has none.
    """

    high: float
    low: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Passes:
    """Bytes of a part of the model, above what was there before it; the input is counted if `input_saved`.

    forward_high: most during the forward pass (`bare_high`: where nothing is kept for a backward pass); saved: what
    stays for the backward pass, output not counted; events: levels of the backward pass, the saved and the incoming
    gradient included, down to the outgoing gradient.
    """

    forward_high: float
    bare_high: float
    saved: float
    input_saved: bool
    events: tuple[Event, ...]

    held: float  # bytes that a variable keeps when the backward pass is over
    loss_high: float  # most bytes of the backward pass before the first weight's node runs
    after_loss_high: float  # most bytes from there to the first event


@dataclass
class Tape:
    """The forward pass of a part of the model, as its operators and the bytes of their outputs."""

    sizes: list[float] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    given_buffers: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    weight_copies: set[int] = field(default_factory=set)

    def given(self, size: float) -> Value:
        """An input of the part."""
        value = self._new(size)
        self.given_buffers.add(value.buffer)
        return value

    def _new(self, size: float) -> Value:
        self.sizes.append(size)
        return Value(len(self.sizes) - 1)

    def hold(self, value: Value) -> None:
        """A variable of the training loop keeps it until the backward pass is over."""
        self.held.add(value.buffer)

    def apply(
        self,
        inputs: tuple[Value, ...],
        out: float | None,
        saves: tuple[Value, ...] = (),
        grads: tuple[Gradient, ...] = (PASS,),
        weights: tuple[float, ...] = (),
        weight_bytes: float = 0,
        temporary: float = 0,
        backward_temporary: float = 0,
        saves_output: bool = False,
    ) -> Value:
        """Write down an operator; out None: a view of the first input. `weight_bytes`: of the gradients as computed."""
        value = Value(inputs[0].buffer) if out is None else self._new(out)
        saved = {each.buffer for each in saves} | ({value.buffer} if saves_output else set())
        node = Node(
            value, inputs, tuple(sorted(saved)), grads, weights, weight_bytes, temporary, backward_temporary
        )  # fmt: skip
        self.nodes.append(node)
        return value

    def passes(self, output: Value, gradient: float) -> Passes:
        """Bytes of the forward and the backward pass; `gradient`: of the output, 0 for a loss."""
        saved = {buffer for node in self.nodes for buffer in node.saves} | self.held
        kept = sum(self.sizes[buffer] for buffer in saved)
        events, loss_high, after_loss_high = self._backward(output, gradient, kept)
        return Passes(
            self._forward(saved, output),
            self._forward(set(), output),
            kept,
            bool(saved & self.given_buffers),
            tuple(events),
            sum(self.sizes[buffer] for buffer in self.held),
            loss_high,
            after_loss_high,
        )

    def _forward(self, saved: set[int], output: Value) -> float:
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

    def _backward(self, output: Value, gradient: float, kept: float) -> tuple[list[Event], float, float]:
        holders = dict.fromkeys(range(len(self.sizes)), 0)
        for node in self.nodes:
            for buffer in node.saves:
                holders[buffer] += 1
        for buffer in self.held:
            holders[buffer] += 1
        walk = _Walk(live=kept + gradient)
        walk.pending[output] = walk.buffer(gradient)
        events: list[Event] = []
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
            walk.settle()
            if node.weights:
                walk.live -= node.weight_bytes
                after_loss_high = after_loss_high or walk.high
                events.append(Event(max(walk.high, 0.0 if events else loss_high), walk.live, node.weights))
                walk.high = walk.live
        events.append(Event(walk.high, walk.live, ()))
        return events, loss_high, after_loss_high


@dataclass
class _Walk:
    """The gradients that are alive during a backward pass. A buffer is [bytes, holders]."""

    live: float
    high: float = 0.0
    pending: dict[Value, list[float]] = field(default_factory=dict)
    _arrived: list[tuple[Value, list[float]]] = field(default_factory=list)

    @staticmethod
    def buffer(size: float) -> list[float]:
        return [size, 1.0]

    def release(self, buffer: list[float]) -> None:
        buffer[1] -= 1
        if buffer[1] == 0:
            self.live -= buffer[0]

    def run(self, node: Node) -> None:
        """The node's gradients appear, the one it was given goes."""
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

    def settle(self) -> None:
        """Gradients that arrived are kept, or added to what is there."""
        for value, new in self._arrived:
            old = self.pending.get(value)
            if old is None:
                self.pending[value] = new
                continue
            if old[1] > 1:  # somebody else holds it: the sum is a new tensor
                self.live += old[0]
                self.high = max(self.high, self.live)
                self.release(old)
                self.pending[value] = self.buffer(old[0])
            self.release(new)
        self._arrived.clear()
