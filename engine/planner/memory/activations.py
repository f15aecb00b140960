"""Activations of a block, of the head and of the loss, operator by operator.

    parts = parts_of(setup, framework)          # Parts: embedding, block, head, each with both passes

All families share one sequence of operators: norm, projections, attention, residual, norm, feed-forward, residual. The
architecture determines the norm, the heads and whether the feed-forward is gated. What each operator keeps is in
`engine.planner.memory.operators`.
"""

from dataclasses import dataclass
from functools import lru_cache

from engine.planner.architecture import Architecture
from engine.planner.flops import FUSED_GATE_UP, FUSED_QUERY_KEY_VALUE
from engine.planner.memory.framework import Framework
from engine.planner.memory.operators import (
    FLOAT,
    Sizes,
    Widths,
    branch_gradient,
    gathered,
    has_rotary,
    record_attention,
    record_feed_forward,
    record_linear,
    record_norm,
    rotated,
    summed,
    widths,
)
from engine.planner.memory.tape import PASS, Tape, TapePasses
from engine.planner.setup import TrainingSetup


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
    sizes = Sizes(architecture, batch, length, tp, wide, fused_attention, compiled, framework)
    block, policy, extra, copies = _block(sizes)
    head, logits, product_high = _head(sizes)
    # In 16 bits each layer keeps separate copies of the tables; in float32 all layers share them.
    shared = has_rotary(architecture) and wide.product == FLOAT
    tables = 2.0 * length * architecture.head_dim * FLOAT if shared else 0.0
    return ActivationParts(
        _embedding(sizes), block, head, logits, product_high, sizes.stream, policy, extra, copies, tables
    )


def _embedding(sizes: Sizes) -> TapePasses:
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


def _block(sizes: Sizes) -> tuple[TapePasses, float, float, float]:
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
    normed = gathered(tape, record_norm(tape, x, sizes, vectors), sizes)
    q = record_linear(tape, normed, sizes, hidden, queries, share * hidden * queries, pointwise=local)
    k = record_linear(tape, normed, sizes, hidden, keys, share * hidden * keys, pointwise=local)
    v = record_linear(tape, normed, sizes, hidden, keys, share * hidden * keys, pointwise=local)
    kept += [tokens * queries * product, tokens * keys * product, tokens * keys * product]
    if any(weight.name in ("attention.query_key_norm", "attention.query_norm") for weight in architecture.weights):
        q = record_norm(tape, q, sizes, 0.0, architecture.heads / sizes.tp)
        k = record_norm(tape, k, sizes, 0.0, keys / architecture.head_dim)
    if has_rotary(architecture):
        if product < FLOAT:
            tables = tape.apply((tape.given(0),), 2 * sizes.length * architecture.head_dim * product, (), (None,))
            tape.hold(tables)
        q, k = rotated(tape, q, tokens * queries * product), rotated(tape, k, tokens * keys * product)
    mixed = record_attention(tape, sizes, q, k, v)
    out = record_linear(tape, mixed, sizes, queries, hidden, share * hidden * queries)
    kept.append(tokens * hidden * product)
    x = tape.apply((x, summed(tape, out, sizes)), sizes.stream, (), (PASS, branch_gradient(sizes)))
    normed = gathered(tape, record_norm(tape, x, sizes, vectors), sizes)
    out = record_feed_forward(tape, normed, sizes, kept, share, local)
    x = tape.apply((x, out), sizes.stream, (), (PASS, branch_gradient(sizes)))
    passes = tape.passes(x, sizes.stream)
    # torchtitan's policy "op" (December 2024, torchtitan/parallelisms/parallelize_llama.py): attention's output, every
    # second product from the first, and outputs of reduce-scatters.
    scattered = 2 * sizes.scattered * hidden * product if sizes.framework.sequence_parallel and sizes.tp > 1 else 0.0
    attention = tokens * queries * product + tokens * architecture.heads / sizes.tp * FLOAT
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


def _head(sizes: Sizes) -> tuple[TapePasses, float, float]:
    """Record last norm, head and loss; return logits' bytes at the peak, and the peak before the loss."""
    architecture, wide, framework = sizes.architecture, sizes.widths, sizes.framework
    tape = Tape()
    x = tape.given(sizes.stream)
    last = record_norm(tape, x, sizes, architecture.hidden)
    head = next((weight for weight in architecture.weights if weight.role == "head"), None)
    if head is None:
        return tape.passes(last, sizes.stream), 0.0, 0.0
    last = gathered(tape, last, sizes)
    tp = 1 if head.split is None else sizes.tp
    outputs: float = architecture.vocabulary / tp
    logits = record_linear(tape, last, sizes, architecture.hidden, outputs, head.shard(tp))
    product_high = tape.passes(logits, 0).forward_high
    if framework.holds_logits:
        tape.hold(logits)
    size: float = sizes.tokens * outputs * FLOAT
    if not framework.loss_parallel and tp > 1:
        outputs, size = outputs * tp, size * tp
        narrow = sizes.tokens * outputs * wide.product
        logits = tape.apply((logits,), narrow, (), (narrow / tp,))
    narrow = sizes.tokens * outputs * wide.product
    scores = tape.apply((logits,), size, (), (narrow,)) if wide.product < FLOAT else logits
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
    held = narrow if framework.holds_logits or wide.product == FLOAT else 0.0
    return passes, size * (4 if parallel else 3) + (held if framework.holds_logits else 0.0), product_high
