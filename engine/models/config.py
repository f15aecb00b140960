"""What of a `config.json` fixes the computation of a decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3.

    config = ModelConfig.parse(json.loads(path.read_text()))
    config.tensor_shapes()["model.norm.weight"]

Pure data: no torch. The families differ in biases, norms of the heads and how far a layer looks back, which is all
resolved here; the model asks for these and never for the family.
"""

from dataclasses import dataclass
from typing import Any, Literal

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class _Family:
    """How a family differs. Numbers are what transformers takes where a configuration says nothing.

    biases: of queries, keys and values, and of the output; None: both as `attention_bias` says.
    mlp_bias: whether there is such a key.
    slides: which layers look back `window` tokens only.
    """

    biases: tuple[bool, bool] | None = None
    mlp_bias: bool = False
    head_norms: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 32768
    slides: Literal["none", "all", "upper"] = "none"
    window: int = 4096
    max_window_layers: int = 28


_FAMILIES = {
    "llama": _Family(mlp_bias=True, max_positions=2048),
    "mistral": _Family(biases=(False, False), kv_heads=8, max_positions=131072, slides="all"),
    "qwen2": _Family(biases=(True, False), kv_heads=32, slides="upper"),
    "qwen3": _Family(head_norms=True, kv_heads=32, head_dim=128, slides="upper"),
}
MODEL_TYPES = tuple(_FAMILIES)


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `factor` and what follows it belong to the kinds that stretch the context."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model and which of the family's options it has.

    head_norms: queries and keys pass through a norm of each head. windows: tokens that each layer's attention
    looks back, the token itself included (None: all).
    """

    vocabulary: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]
    tied: bool
    initializer_range: float

    @classmethod
    def parse(cls, data: dict[str, Any]) -> "ModelConfig":
        """Read a `config.json`; absent keys have transformers' defaults for the family.

        Raises ValueError, naming the key, for what this decoder does not compute.
        """
        family = _checked_family(data)
        hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
        # A null means one for each query head; only an absent key means the family's default.
        kv_heads = int(data.get("num_key_value_heads", family.kv_heads) or heads)
        if heads % kv_heads:
            raise ValueError(f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        head_dim = int(data.get("head_dim") or family.head_dim or hidden // heads)
        if head_dim % 2:
            raise ValueError(f"config.json: head_dim {head_dim} is odd; rotary positions need an even one")
        bias = bool(data.get("attention_bias", False))
        qkv_bias, output_bias = family.biases or (bias, bias)
        return cls(
            vocabulary=int(data["vocab_size"]),
            hidden=hidden,
            feed_forward=int(data["intermediate_size"]),
            layers=int(data["num_hidden_layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=int(data.get("max_position_embeddings", family.max_positions)),
            norm_epsilon=float(data.get("rms_norm_eps", 1e-6)),
            rope=_rope(data),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=family.mlp_bias and bool(data.get("mlp_bias", False)),
            head_norms=family.head_norms,
            windows=_windows(data, family),
            tied=bool(data.get("tie_word_embeddings", False)),
            initializer_range=float(data.get("initializer_range", 0.02)),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of a checkpoint by its name; a tied head has none of its own."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        queries, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, self.hidden, self.qkv_bias),
            "self_attn.k_proj": (shared, self.hidden, self.qkv_bias),
            "self_attn.v_proj": (shared, self.hidden, self.qkv_bias),
            "self_attn.o_proj": (self.hidden, queries, self.output_bias),
            "mlp.gate_proj": (self.feed_forward, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.feed_forward, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.feed_forward, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        norms = {"input_layernorm": self.hidden, "post_attention_layernorm": self.hidden}
        if self.head_norms:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return shapes | {f"{name}.weight": (size,) for name, size in norms.items()}


def _checked_family(data: dict[str, Any]) -> _Family:
    """The family that `model_type` names. Raises ValueError for what no family of ours computes."""
    kind = data.get("model_type")
    if kind not in _FAMILIES:
        raise ValueError(f"config.json: model_type {kind!r} is not implemented; use one of: {', '.join(MODEL_TYPES)}")
    missing = [name for name in _REQUIRED if data.get(name) is None]
    if missing:
        raise ValueError(f"config.json: {missing[0]} is missing; a {kind} model needs {', '.join(_REQUIRED)}")
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act {activation!r} is not implemented; use silu")
    if data.get("quantization_config"):
        raise ValueError("config.json: quantization_config is not implemented; use the unquantised checkpoint")
    return _FAMILIES[kind]


def _rope(data: dict[str, Any]) -> Rope:
    """Rotary settings from `rope_scaling` (which wins, as in transformers) or `rope_parameters`, and `rope_theta`."""
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    rope: dict[str, Any] = data.get(name) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"config.json: {name} differs by kind of layer, which is not implemented; use one for all")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"config.json: {name}.rope_type {kind!r} is not implemented; use one of: {', '.join(ROPE_KINDS)}"
        )
    if rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ValueError(f"config.json: {name}.partial_rotary_factor is not implemented; use 1.0")
    theta = rope.get("rope_theta", data.get("rope_theta"))
    theta = float(10000.0 if theta is None else theta)
    if kind == "default":
        return Rope(theta)
    needed = ["factor"] if kind == "linear" else ["factor", "low_freq_factor", "high_freq_factor"]
    missing = [key for key in needed if rope.get(key) is None]
    if missing:
        raise ValueError(f"config.json: {name}.{missing[0]} is missing; {kind} needs {', '.join(needed)}")
    if kind == "linear":
        return Rope(theta, kind, float(rope["factor"]))
    limit = data.get("max_position_embeddings", _FAMILIES[data["model_type"]].max_positions)
    return Rope(
        theta,
        kind,
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_positions=int(
            data.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or limit
        ),
    )


def _windows(data: dict[str, Any], family: _Family) -> tuple[int | None, ...]:
    """Tokens that each layer looks back; None for all."""
    layers = int(data["num_hidden_layers"])
    window = data.get("sliding_window", family.window)
    if family.slides == "none" or (family.slides == "upper" and not data.get("use_sliding_window", False)):
        window = None
    types = data.get("layer_types") if family.slides == "upper" else None
    if types is None:
        first = data.get("max_window_layers", family.max_window_layers) if family.slides == "upper" else 0
        slides = [layer >= int(first) for layer in range(layers)]
    else:
        slides = [kind == "sliding_attention" for kind in types]
        unknown = sorted({str(kind) for kind in types} - {"sliding_attention", "full_attention"})
        if unknown or len(types) != layers:
            raise ValueError(
                f"config.json: layer_types must name full_attention or sliding_attention for each of {layers} layers"
            )
        if window is None and any(slides):
            raise ValueError("config.json: layer_types names sliding_attention, but no sliding_window is in use")
    if window is None:
        return (None,) * layers
    if int(window) < 1:
        raise ValueError(f"config.json: sliding_window {window} is not implemented; use 1 or more, or null for none")
    return tuple(int(window) if slide else None for slide in slides)
