"""Operators of a block, recorded on a tape: what each keeps for the backward pass, and what passes through it.

Tensors saved for the backward pass follow torch's derivatives.yaml. The operators are those of `engine.models.llama`,
and PyTorch's own for the rest.
"""

from dataclasses import dataclass

from engine.planner.architecture import Architecture
from engine.planner.memory.framework import Framework
from engine.planner.memory.tape import PASS, Gradient, Tape, TapeValue
from engine.planner.setup import TrainingSetup

FLOAT = 4


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: of matrix products (`product`), of the residual stream, of weights in use.

    `cast`: torch.autocast converts each product's input and weight, and both copies are kept for the backward pass.
    `recast`: torchao casts a product's input to float8 in both passes. Compiled, the cast is fused with the pointwise
    operators before it, and the backward pass computes them again from what these keep: neither a norm's output nor
    SwiGLU's product is kept (torchao 0.18, torch 2.13's min-cut partitioner; `tests/engine/planner/memory`).
    """

    product: int
    residual: int
    weight: int
    cast: bool
    recast: bool = False


def widths(setup: TrainingSetup) -> Widths:
    """Return widths by precision.

    Float8 copies are freed at once; torchao's product keeps its input in 16 bits, as a product in bfloat16 does. How
    full and selective checkpointing divide a compiled float8 block was not counted, and is left as in bfloat16.
    """
    if setup.precision == "float32":
        return Widths(4, 4, 4, False)
    if setup.precision == "bfloat16_autocast":
        return Widths(2, 4, 4, True)
    recast = setup.precision == "float8_mixed" and setup.compiled and setup.checkpointing == "none"
    return Widths(2, 2, 2, False, recast)


@dataclass(frozen=True)
class Sizes:
    """Tokens and widths on one rank, as used by the operator lists."""

    architecture: Architecture
    batch: int
    length: int
    tp: int
    widths: Widths
    fused_attention: bool
    compiled: bool
    framework: Framework

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def scattered(self) -> float:
        """Tokens of the residual stream on one rank; sequence parallelism splits them."""
        return self.tokens / (self.tp if self.framework.sequence_parallel else 1)

    @property
    def queries(self) -> float:
        return self.architecture.heads * self.architecture.head_dim / self.tp

    @property
    def keys(self) -> float:
        return max(1, self.architecture.kv_heads / self.tp) * self.architecture.head_dim

    @property
    def feed_forward(self) -> float:
        """Width of the feed-forward; of one expert, if there are experts."""
        experts = [weight.shape[0] for weight in self.architecture.weights if weight.share < 1 and weight.split == 0]
        return max(experts, default=self.architecture.feed_forward) / self.tp

    @property
    def shared_experts(self) -> float:
        """Experts that every token goes to, as many of a routed one's width."""
        shared = [
            weight.shape[0]
            for weight in self.architecture.weights
            if weight.name.startswith("shared_") and weight.split == 0
        ]
        return sum(shared) / self.tp / self.feed_forward

    @property
    def stream(self) -> float:
        """Bytes of the residual stream."""
        return self.scattered * self.architecture.hidden * self.widths.residual


def has_rotary(architecture: Architecture) -> bool:
    """Return whether positions are rotations of queries and keys: gated decoders without a position table."""
    return architecture.kind == "decoder" and architecture.gated and not architecture.positions


def record_norm(tape: Tape, x: TapeValue, sizes: Sizes, elements: float, heads: float = 0.0) -> TapeValue:
    """Record LayerNorm as one operator, or RMSNorm in float32 as five (`engine.models.llama.RmsNorm`,
    `torch.rms_norm`).

    heads: normalise this many heads' queries or keys, instead of the residual stream.
    """
    wide = sizes.widths
    tokens = sizes.tokens * heads if heads else sizes.scattered
    width, narrow = (sizes.architecture.head_dim, wide.product) if heads else (sizes.architecture.hidden, wide.residual)
    size, rows, full = tokens * width * narrow, tokens * FLOAT, tokens * width * FLOAT
    weight = elements * wide.weight
    if sizes.architecture.norm == "layernorm" or sizes.compiled:
        statistics = tape.apply((x,), 2 * rows, (), (None,))
        return tape.apply((x, statistics), size, (x, statistics), (size, None), (elements,), weight)
    wider = tape.apply((x,), full, (), (size,)) if narrow < FLOAT else x
    squares = tape.apply((wider,), full, (wider,), (full,), backward_temporary=2 * full)
    mean = tape.apply((squares,), rows, (), (full,))
    scale = tape.apply((mean,), rows, (), (rows,), saves_output=True, backward_temporary=2 * rows)
    normed = tape.apply((wider, scale), full, (wider, scale), (full, rows), backward_temporary=full)
    if narrow < FLOAT:
        normed = tape.apply((normed,), size, (), (full,))
    return tape.apply((normed,), size, (normed,), (size,), (elements,), weight, backward_temporary=size)


def record_linear(
    tape: Tape,
    x: TapeValue,
    sizes: Sizes,
    inner: float,
    outer: float,
    elements: float,
    tokens: float | None = None,
    pointwise: bool = False,
) -> TapeValue:
    """Record x [tokens, inner] times a weight: saves both; of the weight only a cast copy counts.

    pointwise: x comes from pointwise operators or a norm, so that a compiled float8 product need not keep it.
    """
    tokens = sizes.tokens if tokens is None else tokens
    wide = sizes.widths
    out, into = tokens * outer * wide.product, tokens * inner * wide.product
    if not wide.cast:
        saves = () if pointwise and wide.recast else (x,)
        return tape.apply((x,), out, saves, (into,), (elements,), elements * wide.weight)
    if tape.sizes[x.buffer] > into:  # else it is already in bfloat16
        x = tape.apply((x,), into, (), (tokens * inner * wide.residual,))
    copy = tape.apply((tape.given(0),), elements * 2, (), (None,), (elements,), elements * wide.weight)
    tape.weight_copies.add(copy.buffer)
    return tape.apply((x, copy), out, (x, copy), (into, elements * 2))


def gathered(tape: Tape, x: TapeValue, sizes: Sizes) -> TapeValue:
    """Gather the whole sequence before a column-parallel product."""
    if not sizes.framework.sequence_parallel or sizes.tp == 1:
        return x
    return tape.apply((x,), sizes.tokens * sizes.architecture.hidden * sizes.widths.residual, (), (sizes.stream,))


def summed(tape: Tape, x: TapeValue, sizes: Sizes) -> TapeValue:
    """Sum over ranks after a row-parallel product."""
    if sizes.tp == 1:
        return x
    hidden, product = sizes.architecture.hidden, sizes.widths.product
    return tape.apply(
        (x,), sizes.scattered * hidden * product, (),
        (sizes.tokens * hidden * product if sizes.framework.sequence_parallel else PASS,),
    )  # fmt: skip


def rotated(tape: Tape, heads: TapeValue, size: float) -> TapeValue:
    """Record heads * cos + rotated halves * sin; the tables are kept, the heads are not."""
    by_cosine = tape.apply((heads,), size, (), (size,))
    halves = tape.apply((heads,), None)
    negated = tape.apply((halves,), size / 2, (), (size / 2,))
    turned = tape.apply((negated, halves), size, (), (PASS, size))
    by_sine = tape.apply((turned,), size, (), (size,))
    return tape.apply((by_cosine, by_sine), size, (), (PASS, PASS))


def record_attention(tape: Tape, sizes: Sizes, queries: TapeValue, keys: TapeValue, values: TapeValue) -> TapeValue:
    """Record attention: fused keeps queries, keys, values, output and float32 row sums; eager keeps probabilities."""
    product, architecture = sizes.widths.product, sizes.architecture
    heads = architecture.heads / sizes.tp
    full, rows = sizes.tokens * sizes.queries * product, sizes.tokens * heads * FLOAT
    shared = sizes.tokens * sizes.keys * product
    if sizes.keys < sizes.queries and sizes.framework.expands_heads:
        keys = tape.apply((keys,), full, (), (shared,))
        values = tape.apply((values,), full, (), (shared,))
        shared = full
    if sizes.fused_attention:
        rows_value = tape.apply((queries,), rows, (), (None,))
        return tape.apply(
            (queries, keys, values, rows_value), full, (queries, keys, values, rows_value),
            (full, shared, shared, None), saves_output=True,
        )  # fmt: skip
    scores = sizes.batch * heads * sizes.length**2
    raw = tape.apply((queries, keys), scores * product, (queries, keys), (full, shared))
    scaled = tape.apply((raw,), scores * product, (), (scores * product,))
    masked = tape.apply((scaled,), scores * product, ())
    shares = tape.apply((masked,), scores * FLOAT, (), (scores * product,), saves_output=True)
    if product < FLOAT:
        shares = tape.apply((shares,), scores * product, (), (scores * FLOAT,))
    return tape.apply((shares, values), full, (shares, values), (scores * product, shared))


def branch_gradient(sizes: Sizes) -> Gradient:
    """Record the gradient of a branch added to the residual stream: cast if the stream is wider."""
    if sizes.widths.residual == sizes.widths.product:
        return PASS
    return sizes.scattered * sizes.architecture.hidden * sizes.widths.product


def record_feed_forward(
    tape: Tape, x: TapeValue, sizes: Sizes, kept: list[float], share: float, local: bool
) -> TapeValue:
    """Record a feed-forward of each token's experts; the outputs of its products are appended to `kept`."""
    architecture, product = sizes.architecture, sizes.widths.product
    hidden, inner = architecture.hidden, sizes.feed_forward
    tokens = sizes.tokens * (architecture.experts_per_token + sizes.shared_experts)
    size, elements = tokens * inner * product, share * hidden * inner * (architecture.experts + sizes.shared_experts)
    if architecture.gated:
        gate = record_linear(tape, x, sizes, hidden, inner, elements, tokens, pointwise=local)
        bent = tape.apply((gate,), size, (gate,), (size,))
        up = record_linear(tape, x, sizes, hidden, inner, elements, tokens, pointwise=local)
        saves = (gate, up) if sizes.compiled else (bent, up)
        bent = tape.apply((bent, up), size, saves, (size, size))
        kept += [size, size]
    else:
        up = record_linear(tape, x, sizes, hidden, inner, elements, tokens, pointwise=local)
        bent = tape.apply((up,), size, (up,), (size,))
        kept.append(size)
    down = record_linear(tape, bent, sizes, inner, hidden, elements, tokens, pointwise=True)
    kept.append(sizes.tokens * hidden * product)
    return summed(tape, down, sizes)
