"""The figures of a calibration, derived from the times of its probes (`engine.tools.calibrate_probes`).

figures = derived_figures(raw, sizes)        # {"linear/float32/cold/1": [seconds in round 1, ...], ...}
"""

from dataclasses import dataclass

from configs.hardware.calibration import MEASURED_FORMATS
from configs.hardware.hardware import NumberFormat
from engine.models.weights import DTYPES
from engine.planner.flops import FUSED_BACKWARD

_LEAST_SECONDS = 1e-12  # a difference of two measured times may be negative
_LEAST_OPERATORS = 8  # a layer issues about 10 operators, most of them as expensive as the small product that is timed
HEAD_DIM = 64
SHALLOW_LAYERS = (2, 10)


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
    shallow: int = 64
    vocabulary: int = 8192
    parameters: int = 1 << 22


QUICK = Sizes(
    rounds=1, seconds=0.001, rows=(1, 8), cold_shape=(256, 256), cold_bytes=1 << 20, cached_shape=(64, 64),
    cached_bytes=1 << 16, square=128, read_bytes=1 << 20, hidden=128, prompt=32, shallow=32, vocabulary=512,
    parameters=1 << 16,
)  # fmt: skip
"""For testing the code, not for calibration."""


def derived_figures(raw: dict[str, list[float]], sizes: Sizes) -> dict[str, list[float]]:
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
    few, many = SHALLOW_LAYERS

    def each_layer(probe: str) -> list[float]:
        pairs = zip(raw[f"{probe}/{many}"], raw[f"{probe}/{few}"], strict=True)
        return [(more - fewer) / (many - few) for more, fewer in pairs]

    whole_layer, recorded_layer = each_layer("decode"), each_layer("recorded")
    # So narrow a model stays in the caches, and its products take a few microseconds of a layer's tens.
    weights = layer_weights(sizes.shallow)
    by_layer = [
        max(_LEAST_OPERATORS * raw["operator"][place], layer - weights * figures["linear/float32/cached/1"][place])
        for place, layer in enumerate(whole_layer)
    ]
    put("layer", by_layer, 1)
    put("step", [whole - few * layer for whole, layer in zip(raw[f"decode/{few}"], whole_layer, strict=True)], 1)
    products = [weights * seconds for seconds in figures["linear/float32/cached/1"]]
    put("recorded_layer", [layer - own for layer, own in zip(recorded_layer, products, strict=True)], 1)
    recorded = zip(raw[f"recorded/{few}"], recorded_layer, strict=True)
    put("recorded_step", [whole - few * layer for whole, layer in recorded], 1)
    rows = sizes.prompt
    for kind in MEASURED_FORMATS:
        put(f"square/{kind}", raw[f"square/{kind}"], 2 * sizes.square**3)
        attention = less(f"attention/{kind}", "operator")
        put(f"attention/{kind}", attention, attention_flops(rows, sizes.hidden))
        put(f"context/{kind}", less(f"context/{kind}", "operator"), context_bytes(sizes, kind))
        rest = less(f"layer/{kind}", f"layer_linear/{kind}", f"attention/{kind}")
        alone = [value - layer for value, layer in zip(rest, by_layer, strict=True)]
        put(f"element/{kind}", alone, rows * sizes.hidden)
        put(f"training/{kind}", raw[f"train_linear/{kind}"], 6 * rows * sizes.hidden * feed_forward_size(sizes.hidden))
        linear_share = layer_weights(sizes.hidden) / (sizes.hidden * feed_forward_size(sizes.hidden))
        layers = zip(raw[f"train_layer/{kind}"], raw[f"train_linear/{kind}"], attention, strict=True)
        trained = [
            whole - linear_share * linear - (1 + FUSED_BACKWARD) * max(_LEAST_SECONDS, own)  # all of it is predicted
            for whole, linear, own in layers
        ]
        put(f"training_element/{kind}", trained, rows * sizes.hidden)
    put("logit", raw["logit"], rows * sizes.vocabulary)
    put("parameter", raw["parameter"], sizes.parameters)
    return figures


def attention_flops(tokens: int, width: int) -> float:
    """Return FLOPs of causal attention over a prompt: two products, half of each masked; `width` = heads x head_dim."""
    return 2 * tokens * tokens * width


def context_heads(sizes: Sizes) -> tuple[int, int]:
    """Return heads of keys and values, and tokens of the context."""
    return max(1, sizes.hidden // HEAD_DIM // 2), 4 * sizes.prompt


def context_bytes(sizes: Sizes, kind: NumberFormat) -> int:
    heads, tokens = context_heads(sizes)
    return 2 * heads * tokens * HEAD_DIM * DTYPES[kind].itemsize


def feed_forward_size(hidden: int) -> int:
    return hidden * 11 // 4  # near the 8/3 of the Llama family


def layer_weights(hidden: int) -> int:
    """Return the shapes of a layer's matrices: queries, output, half as many keys and values; gate, up, down."""
    return hidden * (3 * hidden + 3 * feed_forward_size(hidden))
