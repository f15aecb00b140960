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
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.hardware.calibration import MEASURED_FORMATS
from configs.hardware.hardware import NumberFormat
from engine.inference.model import Shard
from engine.inference.recorded import STEPS_BEFORE_TRUST, decode_step
from engine.inference.weights import shard_of
from engine.kernels.linear import PackedLinear, pack_linear
from engine.models.config import ModelConfig
from engine.models.llama import DecoderLayer, Llama
from engine.models.rope import Rope
from engine.models.weights import DTYPES
from engine.parallel.communicator import open_communicators
from engine.parallel.grid import Grid

_LEAST_SECONDS = 1e-12  # a difference of two measured times may be negative
_LEAST_OPERATORS = 8  # a layer issues about 10 operators, most of them as expensive as the small product that is timed
_HEAD_DIM = 64
_SHALLOW_LAYERS = (2, 10)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the probes, and the duration of each in a round."""

    rounds: int = 3
    seconds: float = 0.02
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 128, 512)
    cold_shape: tuple[int, int] = (2048, 1024)
    cold_bytes: int = 96 << 20
    cached_shape: tuple[int, int] = (256, 256)
    cached_bytes: int = 512 << 10
    square: int = 1024
    read_bytes: int = 128 << 20
    hidden: int = 512
    prompt: int = 256
    shallow: int = 256
    vocabulary: int = 8192
    parameters: int = 1 << 22


QUICK = Sizes(
    rounds=1, seconds=0.001, rows=(1, 8), cold_shape=(256, 256), cold_bytes=1 << 20, cached_shape=(64, 64),
    cached_bytes=1 << 16, square=128, read_bytes=1 << 20, hidden=128, prompt=32, shallow=32, vocabulary=512,
    parameters=1 << 16,
)  # fmt: skip
"""For testing the code, not for calibration."""

Probe = Callable[[], object]


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
    return _derived(raw, sizes)


def _median_seconds(probe: Probe, seconds: float) -> float:
    """Return the median of the calls within `seconds` of CPU time, at least two."""
    taken: list[float] = []
    began = now = time.thread_time()
    while len(taken) < 2 or now - began < seconds:
        start = time.thread_time()
        probe()
        now = time.thread_time()
        taken.append(now - start)
    return statistics.median(taken)


def _probes(sizes: Sizes) -> Iterator[tuple[str, Probe]]:
    """Yield name and probe; the figures are derived from these in `_derived`."""
    yield "operator", _inference(_small_linear())
    yield "read", _inference(_reader(sizes.read_bytes))
    for layers in _SHALLOW_LAYERS:
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


def _derived(raw: dict[str, list[float]], sizes: Sizes) -> dict[str, list[float]]:
    """Derive the figures of `configs.hardware.calibration.Calibration` from times of probes."""
    figures: dict[str, list[float]] = {"operator": raw["operator"]}

    def put(name: str, seconds: list[float], divisor: float) -> None:
        figures[name] = [max(_LEAST_SECONDS, value) / divisor for value in seconds]

    def less(whole: str, *parts: str) -> list[float]:
        return [value - sum(raw[part][place] for part in parts) for place, value in enumerate(raw[whole])]

    put("read", raw["read"], sizes.read_bytes)
    for kind in MEASURED_FORMATS:
        for place, shape in (("cold", sizes.cold_shape), ("cached", sizes.cached_shape)):
            for count in sizes.rows:
                name = f"linear/{kind}/{place}/{count}"
                put(name, less(name, "operator"), shape[0] * shape[1])
    few, many = _SHALLOW_LAYERS

    def each_layer(probe: str) -> list[float]:
        pairs = zip(raw[f"{probe}/{many}"], raw[f"{probe}/{few}"], strict=True)
        return [(more - fewer) / (many - few) for more, fewer in pairs]

    whole_layer, recorded_layer = each_layer("decode"), each_layer("recorded")
    # Its weights come from memory and evict the caches, as those of a large model do.
    weights = _layer_weights(sizes.shallow)
    by_layer = [
        max(_LEAST_OPERATORS * raw["operator"][place], layer - weights * figures["linear/float32/cold/1"][place])
        for place, layer in enumerate(whole_layer)
    ]
    put("layer", by_layer, 1)
    put("step", [whole - few * layer for whole, layer in zip(raw[f"decode/{few}"], whole_layer, strict=True)], 1)
    products = [weights * seconds for seconds in figures["linear/float32/cold/1"]]
    put("recorded_layer", [layer - own for layer, own in zip(recorded_layer, products, strict=True)], 1)
    recorded = zip(raw[f"recorded/{few}"], recorded_layer, strict=True)
    put("recorded_step", [whole - few * layer for whole, layer in recorded], 1)
    rows = sizes.prompt
    for kind in MEASURED_FORMATS:
        put(f"square/{kind}", raw[f"square/{kind}"], 2 * sizes.square**3)
        put(f"attention/{kind}", less(f"attention/{kind}", "operator"), attention_flops(rows, sizes.hidden))
        put(f"context/{kind}", less(f"context/{kind}", "operator"), _context_bytes(sizes, kind))
        rest = less(f"layer/{kind}", f"layer_linear/{kind}", f"attention/{kind}")
        alone = [value - layer for value, layer in zip(rest, by_layer, strict=True)]
        put(f"element/{kind}", alone, rows * sizes.hidden)
        put(f"training/{kind}", raw[f"train_linear/{kind}"], 6 * rows * sizes.hidden * _feed_forward(sizes.hidden))
        linear_share = _layer_weights(sizes.hidden) / (sizes.hidden * _feed_forward(sizes.hidden))
        trained = [
            whole - linear_share * linear
            for whole, linear in zip(raw[f"train_layer/{kind}"], raw[f"train_linear/{kind}"], strict=True)
        ]
        put(f"training_element/{kind}", trained, rows * sizes.hidden)
    put("logit", raw["logit"], rows * sizes.vocabulary)
    put("parameter", raw["parameter"], sizes.parameters)
    return figures


def attention_flops(tokens: int, width: int) -> float:
    """Return FLOPs of causal attention over a prompt: two products, half of each masked; `width` = heads x head_dim."""
    return 2 * tokens * tokens * width


def _inference(probe: Probe) -> Probe:
    def run() -> object:
        with torch.inference_mode():
            return probe()

    return run


def _small_linear() -> Probe:
    weight, row = torch.randn(_HEAD_DIM, _HEAD_DIM), torch.randn(1, 1, _HEAD_DIM)
    return lambda: functional.linear(row, weight)


def _reader(size: int) -> Probe:
    data = torch.ones(size // 4)
    return lambda: data.sum()


def _config(hidden: int, feed_forward: int, layers: int, vocabulary: int) -> ModelConfig:
    heads = max(2, hidden // _HEAD_DIM)
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


def _decode(sizes: Sizes, layers: int) -> Probe:
    """Return one decode step of a model so narrow that issuing operators takes most of its time."""
    config = _config(sizes.shallow, _feed_forward(sizes.shallow), layers, 64)
    shard = _shard(config, torch.float32)
    cache = shard.new_cache(1, 40)
    token = torch.zeros((1, 1), dtype=torch.int64)
    shard.forward(token.expand(1, 32), cache)  # uninitialised cache contents may be slow to compute with

    def step() -> Tensor:
        cache.length = 32
        return shard.greedy(shard.head(shard.forward(token, cache, last_only=True))[:, -1])

    return step


def _recorded(sizes: Sizes, layers: int) -> Probe:
    """Return the same step, recorded as one call."""
    shard = _shard(_config(sizes.shallow, _feed_forward(sizes.shallow), layers, 64), torch.float32)
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


def _square(size: int, dtype: torch.dtype) -> Probe:
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return lambda: left @ right


def _weights(shape: tuple[int, int], held: int, dtype: torch.dtype) -> list[PackedLinear]:
    count = max(1, held // (shape[0] * shape[1] * dtype.itemsize))
    return [pack_linear(torch.full(shape, 0.01, dtype=dtype)) for _ in range(count)]


def _linear(weights: list[PackedLinear], rows: int) -> Probe:
    """Return products with one weight after the other, together larger than any cache."""
    hidden = torch.randn(1, rows, weights[0].in_features).to(weights[0].dtype)
    turn = 0

    def call() -> Tensor:
        nonlocal turn
        turn = (turn + 1) % len(weights)
        return weights[turn](hidden)

    return call


def _attention(sizes: Sizes, dtype: torch.dtype) -> Probe:
    heads = max(2, sizes.hidden // _HEAD_DIM)
    shape = (1, heads, sizes.prompt, sizes.hidden // heads)
    queries, keys, values = (torch.randn(shape).to(dtype) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def _context_heads(sizes: Sizes) -> tuple[int, int]:
    """Return heads of keys and values, and tokens of the context."""
    return max(1, sizes.hidden // _HEAD_DIM // 2), 4 * sizes.prompt


def _context_bytes(sizes: Sizes, kind: NumberFormat) -> int:
    heads, tokens = _context_heads(sizes)
    return 2 * heads * tokens * _HEAD_DIM * DTYPES[kind].itemsize


def _context(sizes: Sizes, dtype: torch.dtype) -> Probe:
    """Return attention of one new token, two query heads per key-value head, grouped as in the engine."""
    heads, tokens = _context_heads(sizes)
    queries = torch.randn(1, heads, 2, _HEAD_DIM).to(dtype)
    keys, values = (torch.randn(1, heads, tokens, _HEAD_DIM).to(dtype) for _ in range(2))
    return lambda: functional.scaled_dot_product_attention(queries, keys, values)


def _feed_forward(hidden: int) -> int:
    return hidden * 11 // 4  # near the 8/3 of the Llama family


def _layer_weights(hidden: int) -> int:
    """Return the shapes of a layer's matrices: queries, output, half as many keys and values; gate, up, down."""
    return hidden * (3 * hidden + 3 * _feed_forward(hidden))


def _rotary(tokens: int, config: ModelConfig) -> tuple[Tensor, Tensor]:
    angles = torch.randn(1, 1, tokens, config.head_dim)
    return angles.cos(), angles.sin()


def _layer(sizes: Sizes, dtype: torch.dtype) -> Probe:
    """Return a layer of a prompt's prefill: the one of the middle stage of three."""
    config = _config(sizes.hidden, _feed_forward(sizes.hidden), 3, 8)
    shard = _shard(config, dtype, stages=3, stage=1)
    assert len(shard.layers) == 1
    cache, hidden = shard.new_cache(1, sizes.prompt), torch.randn(1, sizes.prompt, sizes.hidden).to(dtype)

    def call() -> Tensor:
        cache.clear()
        return shard.forward(hidden, cache)

    return call


def _layer_linears(sizes: Sizes, dtype: torch.dtype) -> Probe:
    """Return the products of such a layer only."""
    wide, feed = sizes.hidden, _feed_forward(sizes.hidden)
    shapes = [(2 * wide, wide), (wide, wide), (2 * feed, wide)]
    products = [pack_linear(torch.randn(shape).to(dtype)) for shape in shapes]
    down, inner = pack_linear(torch.randn(wide, feed).to(dtype)), torch.randn(1, sizes.prompt, feed).to(dtype)
    hidden = torch.randn(1, sizes.prompt, wide).to(dtype)

    def call() -> object:
        for product in products:
            product(hidden)
        return down(inner)

    return call


def _train_layer(sizes: Sizes, kind: NumberFormat) -> Probe:
    """Return forward and backward of a layer with float32 weights, under autocast if the format needs it."""
    config = _config(sizes.hidden, _feed_forward(sizes.hidden), 1, 8)
    layer = _filled(DecoderLayer(config), torch.float32)
    hidden, rotary = torch.randn(1, sizes.prompt, sizes.hidden, requires_grad=True), _rotary(sizes.prompt, config)
    return _both_ways(lambda: layer(hidden, rotary, None), [hidden, *layer.parameters()], kind)


def _train_linear(sizes: Sizes, kind: NumberFormat) -> Probe:
    weight = torch.randn(_feed_forward(sizes.hidden), sizes.hidden, requires_grad=True)
    hidden = torch.randn(1, sizes.prompt, sizes.hidden, requires_grad=True)
    return _both_ways(lambda: functional.linear(hidden, weight), [hidden, weight], kind)


def _both_ways(forward: Callable[[], Tensor], leaves: list[Tensor], kind: NumberFormat) -> Probe:
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


def _loss(sizes: Sizes) -> Probe:
    logits = torch.randn(sizes.prompt, sizes.vocabulary, requires_grad=True)
    targets = torch.randint(sizes.vocabulary, (sizes.prompt,))
    return lambda: torch.autograd.grad(functional.cross_entropy(logits.float(), targets), logits)


def _optimizer(sizes: Sizes) -> Probe:
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
