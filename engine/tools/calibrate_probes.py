"""Calibration probes of one rank: operators as issued by our engine, each timed separately.

    figures = measure_rank(sizes, wait)          # {"linear/float32/cold/1": [seconds in round 1, ...], ...}

Each probe runs for a few milliseconds in each of several rounds; a round's figure is the median of its calls. The clock
is the thread's CPU time: one thread on its core is always busy, and time taken by other processes does not count.
`configs.hardware.calibration` defines the names.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.families.config import ModelConfig
from configs.families.rope import Rope
from configs.hardware.calibration import MEASURED_FORMATS
from configs.hardware.hardware import NumberFormat
from engine.inference.model import Shard
from engine.inference.recorded import STEPS_BEFORE_TRUST, decode_step
from engine.inference.weights import shard_of
from engine.kernels.linear import PackedLinear, pack_linear
from engine.models.llama import DecoderLayer, Llama
from engine.models.weights import DTYPES
from engine.parallel.communicator import open_communicators
from engine.parallel.grid import Grid
from engine.tools.calibration_figures import (
    HEAD_DIM,
    SHALLOW_LAYERS,
    Sizes,
    context_heads,
    derived_figures,
    feed_forward_size,
)

OperatorProbe = Callable[[], object]


def measure_rank(sizes: Sizes, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Return every figure of this rank, by round. `wait` is called before each probe, to synchronise ranks."""
    torch.manual_seed(0)
    raw: dict[str, list[float]] = {}
    probes = list(_probes(sizes))
    for _, probe in probes:
        probe()  # first calls choose kernels and allocate
    for _ in range(sizes.rounds):
        for names, probe in probes:
            wait()
            raw.setdefault(names, []).append(_median_seconds(probe, sizes.seconds))
    return derived_figures(raw, sizes)


def _median_seconds(probe: OperatorProbe, seconds: float) -> float:
    """Return the median of the calls within `seconds` of CPU time, at least two; one where it takes ten times as long.

    Torch needs seconds for a product in bfloat16 on a processor without instructions for it.
    """
    taken: list[float] = []
    began = now = time.thread_time()
    while now - began < seconds or (len(taken) < 2 and now - began < 10 * seconds):
        start = time.thread_time()
        probe()
        now = time.thread_time()
        taken.append(now - start)
    return statistics.median(taken)


def _probes(sizes: Sizes) -> Iterator[tuple[str, OperatorProbe]]:
    """Yield name and probe; the figures are derived from these in `derived_figures`."""
    yield "operator", _inference(_small_linear())
    yield "read", _inference(_reader(sizes.read_bytes))
    for layers in SHALLOW_LAYERS:
        yield f"decode/{layers}", _inference(_decode(sizes, layers))
        yield f"recorded/{layers}", _inference(_recorded(sizes, layers))
    for kind in MEASURED_FORMATS:
        dtype = DTYPES[kind]
        yield f"square/{kind}", _inference(_square(sizes.square, dtype))
        for place, shape, held in (
            ("cold", sizes.cold_shape, sizes.cold_bytes),
            ("cached", sizes.cached_shape, sizes.cached_bytes),
        ):
            weights = _weights(shape, held, dtype)
            for rows in sizes.rows:
                yield f"linear/{kind}/{place}/{rows}", _inference(_linear(weights, rows))
        yield f"attention/{kind}", _inference(_attention(sizes, dtype))
        yield f"context/{kind}", _inference(_context(sizes, dtype))
        layer = _layer(sizes, dtype)
        yield f"layer/{kind}", _inference(layer)
        yield f"layer_linear/{kind}", _inference(_layer_linears(sizes, dtype))
        yield f"train_layer/{kind}", _train_layer(sizes, kind)
        yield f"train_linear/{kind}", _train_linear(sizes, kind)
    yield "logit", _loss(sizes)
    yield "parameter", _optimizer(sizes)


def _inference(probe: OperatorProbe) -> OperatorProbe:
    def run() -> object:
        with torch.inference_mode():
            return probe()

    return run


def _small_linear() -> OperatorProbe:
    weight, row = torch.randn(HEAD_DIM, HEAD_DIM), torch.randn(1, 1, HEAD_DIM)
    return lambda: functional.linear(row, weight)


def _reader(size: int) -> OperatorProbe:
    data = torch.ones(size // 4)
    return lambda: data.sum()


def _config(hidden: int, feed_forward: int, layers: int, vocabulary: int) -> ModelConfig:
    heads = max(2, hidden // HEAD_DIM)
    return ModelConfig(
        vocabulary=vocabulary, hidden=hidden, feed_forward=feed_forward, layers=layers, heads=heads,
        kv_heads=heads // 2, head_dim=hidden // heads, max_positions=2048, norm_epsilon=1e-5, rope=Rope(1e4),
        qkv_bias=False, output_bias=False, mlp_bias=False, head_norms=False, windows=(None,) * layers, tied=True,
        initializer_range=0.02,
    )  # fmt: skip


def _filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module.to(dtype)


def _decode(sizes: Sizes, layers: int) -> OperatorProbe:
    """Return one decode step of a model so narrow that issuing operators takes most of its time."""
    config = _config(sizes.shallow, feed_forward_size(sizes.shallow), layers, 64)
    shard = _shard(config, torch.float32)
    cache = shard.new_cache(1, 40)
    token = torch.zeros((1, 1), dtype=torch.int64)
    shard.forward(token.expand(1, 32), cache)  # uninitialised cache contents may be slow to compute with

    def step() -> Tensor:
        cache.length = 32
        return shard.greedy(shard.head(shard.forward(token, cache, last_only=True))[:, -1])

    return step


def _recorded(sizes: Sizes, layers: int) -> OperatorProbe:
    """Return the same step, recorded as one call."""
    shard = _shard(_config(sizes.shallow, feed_forward_size(sizes.shallow), layers, 64), torch.float32)
    cache = shard.new_cache(1, 40)
    token = torch.zeros((1, 1), dtype=torch.int64)
    shard.forward(token.expand(1, 32), cache)

    def step() -> Tensor:
        cache.length = 32
        return decode_step(shard, cache, token, None)

    with torch.inference_mode():
        for _ in range(STEPS_BEFORE_TRUST):
            step()
    return step


def _shard(config: ModelConfig, dtype: torch.dtype, stages: int = 1, stage: int = 0) -> Shard:
    """Return a stage of a random model, as inference runs it on one rank."""
    grid = Grid(1, 1, stages, stage)
    tensors = {name: torch.randn(shape).mul_(0.02).to(dtype) for name, shape in config.tensor_shapes().items()}
    alone = open_communicators(Grid(1, 1, 1, 0), torch.device("cpu"), None, 60.0)
    shard = shard_of(config, grid, alone.tensor, tensors)
    shard.finalize()
    return shard


def _square(size: int, dtype: torch.dtype) -> OperatorProbe:
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return lambda: left @ right


def _weights(shape: tuple[int, int], held: int, dtype: torch.dtype) -> list[PackedLinear]:
    count = max(1, held // (shape[0] * shape[1] * dtype.itemsize))
    return [pack_linear(torch.full(shape, 0.01, dtype=dtype)) for _ in range(count)]


def _linear(weights: list[PackedLinear], rows: int) -> OperatorProbe:
    """Return products with one weight after the other, together larger than any cache."""
    hidden = torch.randn(1, rows, weights[0].in_features).to(weights[0].dtype)
    turn = 0

    def call() -> Tensor:
        nonlocal turn
        turn = (turn + 1) % len(weights)
        return weights[turn](hidden)

    return call


def _attention(sizes: Sizes, dtype: torch.dtype) -> OperatorProbe:
    heads = max(2, sizes.hidden // HEAD_DIM)
    shape = (1, heads, sizes.prompt, sizes.hidden // heads)
    queries, keys, values = (torch.randn(shape).to(dtype) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def _context(sizes: Sizes, dtype: torch.dtype) -> OperatorProbe:
    """Return attention of one new token, two query heads per key-value head, grouped as in the engine."""
    heads, tokens = context_heads(sizes)
    queries = torch.randn(1, heads, 2, HEAD_DIM).to(dtype)
    keys, values = (torch.randn(1, heads, tokens, HEAD_DIM).to(dtype) for _ in range(2))
    return lambda: functional.scaled_dot_product_attention(queries, keys, values)


def _rotary(tokens: int, config: ModelConfig) -> tuple[Tensor, Tensor]:
    angles = torch.randn(1, 1, tokens, config.head_dim)
    return angles.cos(), angles.sin()


def _layer(sizes: Sizes, dtype: torch.dtype) -> OperatorProbe:
    """Return a layer of a prompt's prefill: the one of the middle stage of three."""
    config = _config(sizes.hidden, feed_forward_size(sizes.hidden), 3, 8)
    shard = _shard(config, dtype, stages=3, stage=1)
    assert len(shard.layers) == 1
    cache, hidden = shard.new_cache(1, sizes.prompt), torch.randn(1, sizes.prompt, sizes.hidden).to(dtype)

    def call() -> Tensor:
        cache.clear()
        return shard.forward(hidden, cache)

    return call


def _layer_linears(sizes: Sizes, dtype: torch.dtype) -> OperatorProbe:
    """Return the products of such a layer only."""
    wide, feed = sizes.hidden, feed_forward_size(sizes.hidden)
    shapes = [(2 * wide, wide), (wide, wide), (2 * feed, wide)]
    products = [pack_linear(torch.randn(shape).to(dtype)) for shape in shapes]
    down, inner = pack_linear(torch.randn(wide, feed).to(dtype)), torch.randn(1, sizes.prompt, feed).to(dtype)
    hidden = torch.randn(1, sizes.prompt, wide).to(dtype)

    def call() -> object:
        for product in products:
            product(hidden)
        return down(inner)

    return call


def _train_layer(sizes: Sizes, kind: NumberFormat) -> OperatorProbe:
    """Return forward and backward of a layer with float32 weights, under autocast if the format needs it."""
    config = _config(sizes.hidden, feed_forward_size(sizes.hidden), 1, 8)
    layer = _filled(DecoderLayer(config), torch.float32)
    hidden, rotary = torch.randn(1, sizes.prompt, sizes.hidden, requires_grad=True), _rotary(sizes.prompt, config)
    return _both_ways(lambda: layer(hidden, rotary, None), [hidden, *layer.parameters()], kind)


def _train_linear(sizes: Sizes, kind: NumberFormat) -> OperatorProbe:
    weight = torch.randn(feed_forward_size(sizes.hidden), sizes.hidden, requires_grad=True)
    hidden = torch.randn(1, sizes.prompt, sizes.hidden, requires_grad=True)
    return _both_ways(lambda: functional.linear(hidden, weight), [hidden, weight], kind)


def _both_ways(forward: Callable[[], Tensor], leaves: list[Tensor], kind: NumberFormat) -> OperatorProbe:
    given: Tensor | None = None

    def run() -> None:
        nonlocal given
        autocast = torch.autocast("cpu", dtype=torch.bfloat16) if kind == "bfloat16" else nullcontext()
        with autocast:
            out = forward()
        if given is None:
            given = torch.randn_like(out)
        torch.autograd.grad(out, leaves, given)

    return run


def _loss(sizes: Sizes) -> OperatorProbe:
    logits = torch.randn(sizes.prompt, sizes.vocabulary, requires_grad=True)
    targets = torch.randint(sizes.vocabulary, (sizes.prompt,))
    return lambda: torch.autograd.grad(functional.cross_entropy(logits.float(), targets), logits)


def _optimizer(sizes: Sizes) -> OperatorProbe:
    """Return clipping and an AdamW step, as in `engine.training`."""
    parameters = [nn.Parameter(torch.randn(sizes.parameters // 4)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1e9)
        optimizer.step()

    return step


def a_little_generation() -> None:
    """Generate a few tokens with a small model in each format, to touch all library pages that our engine uses."""
    config = _config(64, 128, 2, 64)
    for kind in MEASURED_FORMATS:
        shard = _shard(config, DTYPES[kind])
        cache = shard.new_cache(2, 40)
        shard.forward(torch.zeros((2, 32), dtype=torch.int64), cache, last_only=True)
        with torch.inference_mode():
            for _ in range(STEPS_BEFORE_TRUST + 1):
                decode_step(shard, cache, torch.zeros((2, 1), dtype=torch.int64), None)


def a_little_training() -> None:
    """Train a small model for two steps in each format."""
    for kind in MEASURED_FORMATS:
        model = _filled(Llama(_config(64, 128, 2, 64)), torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros((2, 33), dtype=torch.int64)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bfloat16"):
                logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
