"""Activations of a block, of the head and of the loss, operator by operator.

    parts = parts_of(setup, framework)          # Parts: embedding, block, head, each with both passes

All families share one sequence of operators: norm, projections, attention, residual, norm, feed-forward, residual. The
architecture determines the norm, the heads and whether the feed-forward is gated. Tensors saved for the backward pass
follow torch's derivatives.yaml. The operators are those of `engine.models.llama`, and PyTorch's own for the rest.
"""

from dataclasses import dataclass
from functools import lru_cache

from engine.planner.architecture import Architecture
from engine.planner.flops import FUSED_GATE_UP, FUSED_QUERY_KEY_VALUE
from engine.planner.memory.framework import Framework
from engine.planner.memory.tape import PASS, Gradient, Tape, TapePasses, TapeValue
from engine.planner.setup import TrainingSetup

_FLOAT = 4


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
class ActivationParts:
    """The model's parts on one rank, of one micro-batch.

    input_bytes: a block's input, which checkpointing keeps; policy_bytes: further bytes that selective checkpointing
    keeps per block; policy_extra: the part of these that a block without checkpointing would not keep; cast_copies: a
    block's weights as torch.autocast keeps them to the end of the forward pass; tables: rotary tables and positions,
    alive from the first block to the last.
    """

    embedding: TapePasses
    block: TapePasses
    head: TapePasses
    logits_bytes: float  # at the head's peak: logits, loss and their gradients
    product_high: float  # of the head's forward pass, before the loss
    input_bytes: float
    policy_bytes: float
    policy_extra: float
    cast_copies: float
    tables: float


@dataclass(frozen=True)
class _Sizes:
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


def parts_of(setup: TrainingSetup, framework: Framework) -> ActivationParts:
    """Return both passes of each part of the model."""
    return _parts(
        setup.architecture, setup.micro_batch, setup.sequence_length, setup.layout.tp, widths(setup),
        setup.attention == "fused", setup.compiled, framework,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _parts(
    architecture: Architecture,
    batch: int,
    length: int,
    tp: int,
    wide: Widths,
    fused_attention: bool,
    compiled: bool,
    framework: Framework,
) -> ActivationParts:
    sizes = _Sizes(architecture, batch, length, tp, wide, fused_attention, compiled, framework)
    block, policy, extra, copies = _block(sizes)
    head, logits, product_high = _head(sizes)
    # In 16 bits each layer keeps separate copies of the tables; in float32 all layers share them.
    shared = _rotary(architecture) and wide.product == _FLOAT
    tables = 2.0 * length * architecture.head_dim * _FLOAT if shared else 0.0
    return ActivationParts(
        _embedding(sizes), block, head, logits, product_high, sizes.stream, policy, extra, copies, tables
    )


def _rotary(architecture: Architecture) -> bool:
    """Return whether positions are rotations of queries and keys: gated decoders without a position table."""
    return architecture.kind == "decoder" and architecture.gated and not architecture.positions


def _embedding(sizes: _Sizes) -> TapePasses:
    tape, architecture = Tape(), sizes.architecture
    ids = tape.given(sizes.tokens * 8)
    tables = [each for each in architecture.weights if each.role == "embedding" and each.name != "positions"]
    table = float(sum(each.shard(sizes.tp) * each.copies for each in tables))
    weight = sizes.widths.weight
    x = tape.apply((ids,), sizes.stream, (ids,), (None,), (table,), table * weight)
    if architecture.positions:
        place = tape.apply(
            (tape.given(0),), sizes.length * architecture.hidden * weight, (), (None,),
            (architecture.positions * architecture.hidden,), architecture.positions * architecture.hidden * weight,
        )  # fmt: skip
        x = tape.apply((x, place), sizes.stream, (), (PASS, sizes.length * architecture.hidden * weight))
    return tape.passes(x, sizes.stream)


def _norm(tape: Tape, x: TapeValue, sizes: _Sizes, elements: float, heads: float = 0.0) -> TapeValue:
    """Record LayerNorm as one operator, or RMSNorm in float32 as five (`engine.models.llama.RmsNorm`,
    `torch.rms_norm`).

    heads: normalise this many heads' queries or keys, instead of the residual stream.
    """
    wide = sizes.widths
    tokens = sizes.tokens * heads if heads else sizes.scattered
    width, narrow = (sizes.architecture.head_dim, wide.product) if heads else (sizes.architecture.hidden, wide.residual)
    size, rows, full = tokens * width * narrow, tokens * _FLOAT, tokens * width * _FLOAT
    weight = elements * wide.weight
    if sizes.architecture.norm == "layernorm" or sizes.compiled:
        statistics = tape.apply((x,), 2 * rows, (), (None,))
        return tape.apply((x, statistics), size, (x, statistics), (size, None), (elements,), weight)
    wider = tape.apply((x,), full, (), (size,)) if narrow < _FLOAT else x
    squares = tape.apply((wider,), full, (wider,), (full,), backward_temporary=2 * full)
    mean = tape.apply((squares,), rows, (), (full,))
    scale = tape.apply((mean,), rows, (), (rows,), saves_output=True, backward_temporary=2 * rows)
    normed = tape.apply((wider, scale), full, (wider, scale), (full, rows), backward_temporary=full)
    if narrow < _FLOAT:
        normed = tape.apply((normed,), size, (), (full,))
    return tape.apply((normed,), size, (normed,), (size,), (elements,), weight, backward_temporary=size)


def _linear(
    tape: Tape,
    x: TapeValue,
    sizes: _Sizes,
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


def _gathered(tape: Tape, x: TapeValue, sizes: _Sizes) -> TapeValue:
    """Gather the whole sequence before a column-parallel product."""
    if not sizes.framework.sequence_parallel or sizes.tp == 1:
        return x
    return tape.apply((x,), sizes.tokens * sizes.architecture.hidden * sizes.widths.residual, (), (sizes.stream,))


def _summed(tape: Tape, x: TapeValue, sizes: _Sizes) -> TapeValue:
    """Sum over ranks after a row-parallel product."""
    if sizes.tp == 1:
        return x
    hidden, product = sizes.architecture.hidden, sizes.widths.product
    return tape.apply(
        (x,), sizes.scattered * hidden * product, (),
        (sizes.tokens * hidden * product if sizes.framework.sequence_parallel else PASS,),
    )  # fmt: skip


def _rotated(tape: Tape, heads: TapeValue, size: float) -> TapeValue:
    """Record heads * cos + rotated halves * sin; the tables are kept, the heads are not."""
    by_cosine = tape.apply((heads,), size, (), (size,))
    halves = tape.apply((heads,), None)
    negated = tape.apply((halves,), size / 2, (), (size / 2,))
    turned = tape.apply((negated, halves), size, (), (PASS, size))
    by_sine = tape.apply((turned,), size, (), (size,))
    return tape.apply((by_cosine, by_sine), size, (), (PASS, PASS))


def _attention(tape: Tape, sizes: _Sizes, queries: TapeValue, keys: TapeValue, values: TapeValue) -> TapeValue:
    """Record attention: fused keeps queries, keys, values, output and float32 row sums; eager keeps probabilities."""
    product, architecture = sizes.widths.product, sizes.architecture
    heads = architecture.heads / sizes.tp
    full, rows = sizes.tokens * sizes.queries * product, sizes.tokens * heads * _FLOAT
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
    shares = tape.apply((masked,), scores * _FLOAT, (), (scores * product,), saves_output=True)
    if product < _FLOAT:
        shares = tape.apply((shares,), scores * product, (), (scores * _FLOAT,))
    return tape.apply((shares, values), full, (shares, values), (scores * product, shared))


def _block(sizes: _Sizes) -> tuple[TapePasses, float, float, float]:
    """Record a block; return also what selective checkpointing keeps (and plain blocks do not), and cast copies."""
    architecture, wide = sizes.architecture, sizes.widths
    hidden, tokens, product = architecture.hidden, sizes.tokens, wide.product
    queries, keys = sizes.queries, sizes.keys
    per_rank = sum(w.shard(sizes.tp) * w.copies for w in architecture.weights if w.block) / max(architecture.layers, 1)
    matrices = hidden * (2 * queries + 2 * keys)
    experts = architecture.experts + sizes.shared_experts
    matrices += (3 if architecture.gated else 2) * hidden * sizes.feed_forward * experts
    # With shared or different layers: the mean layer's.
    share = min(1.0, per_rank / matrices)
    vectors = max(0.0, per_rank - matrices) / 2
    kept: list[float] = []  # outputs of products, in order
    tape = Tape()
    x = tape.given(sizes.stream)
    local = not sizes.framework.sequence_parallel or sizes.tp == 1  # a gathered sequence is not computed again
    normed = _gathered(tape, _norm(tape, x, sizes, vectors), sizes)
    q = _linear(tape, normed, sizes, hidden, queries, share * hidden * queries, pointwise=local)
    k = _linear(tape, normed, sizes, hidden, keys, share * hidden * keys, pointwise=local)
    v = _linear(tape, normed, sizes, hidden, keys, share * hidden * keys, pointwise=local)
    kept += [tokens * queries * product, tokens * keys * product, tokens * keys * product]
    if any(weight.name == "attention.query_key_norm" for weight in architecture.weights):
        q = _norm(tape, q, sizes, 0.0, architecture.heads / sizes.tp)
        k = _norm(tape, k, sizes, 0.0, keys / architecture.head_dim)
    if _rotary(architecture):
        if product < _FLOAT:
            tables = tape.apply((tape.given(0),), 2 * sizes.length * architecture.head_dim * product, (), (None,))
            tape.hold(tables)
        q, k = _rotated(tape, q, tokens * queries * product), _rotated(tape, k, tokens * keys * product)
    mixed = _attention(tape, sizes, q, k, v)
    out = _linear(tape, mixed, sizes, queries, hidden, share * hidden * queries)
    kept.append(tokens * hidden * product)
    x = tape.apply((x, _summed(tape, out, sizes)), sizes.stream, (), (PASS, _branch(sizes)))
    normed = _gathered(tape, _norm(tape, x, sizes, vectors), sizes)
    x = tape.apply(
        (x, _feed_forward(tape, normed, sizes, kept, share, local)), sizes.stream, (), (PASS, _branch(sizes))
    )
    passes = tape.passes(x, sizes.stream)
    # torchtitan's policy "op" (December 2024, torchtitan/parallelisms/parallelize_llama.py): attention's output, every
    # second product from the first, and outputs of reduce-scatters.
    scattered = 2 * sizes.scattered * hidden * product if sizes.framework.sequence_parallel and sizes.tp > 1 else 0.0
    attention = tokens * queries * product + tokens * architecture.heads / sizes.tp * _FLOAT
    kept = _fused(kept, architecture)
    extra = scattered + (kept[-1] if len(kept) % 2 else 0.0)
    copies = matrices * 2 if wide.cast else 0.0
    return passes, sum(kept[::2]) + attention + scattered, extra, copies


def _fused(kept: list[float], architecture: Architecture) -> list[float]:
    """Return the outputs of products, those of weights that a family multiplies at once together."""
    if architecture.model_type in FUSED_GATE_UP:
        kept = [*kept[:4], kept[4] + kept[5], *kept[6:]]
    if architecture.model_type in FUSED_QUERY_KEY_VALUE:
        kept = [sum(kept[:3]), *kept[3:]]
    return kept


def _branch(sizes: _Sizes) -> Gradient:
    """Record the gradient of a branch added to the residual stream: cast if the stream is wider."""
    if sizes.widths.residual == sizes.widths.product:
        return PASS
    return sizes.scattered * sizes.architecture.hidden * sizes.widths.product


def _feed_forward(tape: Tape, x: TapeValue, sizes: _Sizes, kept: list[float], share: float, local: bool) -> TapeValue:
    architecture, product = sizes.architecture, sizes.widths.product
    hidden, inner = architecture.hidden, sizes.feed_forward
    tokens = sizes.tokens * (architecture.experts_per_token + sizes.shared_experts)
    size, elements = tokens * inner * product, share * hidden * inner * (architecture.experts + sizes.shared_experts)
    if architecture.gated:
        gate = _linear(tape, x, sizes, hidden, inner, elements, tokens, pointwise=local)
        bent = tape.apply((gate,), size, (gate,), (size,))
        up = _linear(tape, x, sizes, hidden, inner, elements, tokens, pointwise=local)
        saves = (gate, up) if sizes.compiled else (bent, up)
        bent = tape.apply((bent, up), size, saves, (size, size))
        kept += [size, size]
    else:
        up = _linear(tape, x, sizes, hidden, inner, elements, tokens, pointwise=local)
        bent = tape.apply((up,), size, (up,), (size,))
        kept.append(size)
    down = _linear(tape, bent, sizes, inner, hidden, elements, tokens, pointwise=True)
    kept.append(sizes.tokens * hidden * product)
    return _summed(tape, down, sizes)


def _head(sizes: _Sizes) -> tuple[TapePasses, float, float]:
    """Record last norm, head and loss; return logits' bytes at the peak, and the peak before the loss."""
    architecture, wide, framework = sizes.architecture, sizes.widths, sizes.framework
    tape = Tape()
    x = tape.given(sizes.stream)
    last = _norm(tape, x, sizes, architecture.hidden)
    head = next((weight for weight in architecture.weights if weight.role == "head"), None)
    if head is None:
        return tape.passes(last, sizes.stream), 0.0, 0.0
    last = _gathered(tape, last, sizes)
    tp = 1 if head.split is None else sizes.tp
    outputs: float = architecture.vocabulary / tp
    logits = _linear(tape, last, sizes, architecture.hidden, outputs, head.shard(tp))
    product_high = tape.passes(logits, 0).forward_high
    if framework.holds_logits:
        tape.hold(logits)
    size: float = sizes.tokens * outputs * _FLOAT
    if not framework.loss_parallel and tp > 1:
        outputs, size = outputs * tp, size * tp
        narrow = sizes.tokens * outputs * wide.product
        logits = tape.apply((logits,), narrow, (), (narrow / tp,))
    narrow = sizes.tokens * outputs * wide.product
    scores = tape.apply((logits,), size, (), (narrow,)) if wide.product < _FLOAT else logits
    targets = tape.given(sizes.tokens * 8)
    parallel = framework.loss_parallel and tp > 1
    likelihoods = tape.apply(
        (scores,), size, (), (PASS if parallel else size,), saves_output=True, temporary=size if parallel else 0
    )
    # Loss-parallel computes both derivatives at once: the sum of the one-hot and the exponential, then their product.
    loss = tape.apply(
        (likelihoods, targets), 4, (likelihoods, targets), (size, None), backward_temporary=2 * size if parallel else 0
    )
    passes = tape.passes(loss, 4)
    held = narrow if framework.holds_logits or wide.product == _FLOAT else 0.0
    return passes, size * (4 if parallel else 3) + (held if framework.holds_logits else 0.0), product_high
