"""Family-independent model configuration parsed from `config.json`: sizes and options.

    config = ModelConfig.parse(json.loads(path.read_text()))
    config.kind, config.order, config.activation, config.gated

Pure data: no torch. The families differ in norms, biases, positions, activations and the order of a layer's parts,
which are all resolved here from one table (`configs.families.table`); the model code uses these options and never the
family.
"""

from typing import Any

from configs.families.family import PAGE, REQUIRED, Family, Key
from configs.families.keys import check_keys
from configs.families.numbers import MAX_LAYERS, MAX_SIZE, check_finite, real_number, short_value, size_of
from configs.families.plans import check_parallel_plan
from configs.families.rope import Rope, parse_rope
from configs.families.sizes import Activation, ModelSizes
from configs.families.table import families, family_of
from configs.families.tensors import tensor_shapes

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""What a `config.json` calls them. The last two are one formula: in 16 bits one is rounded at each operator,
the other at its end."""


class ModelConfig(ModelSizes):
    """The sizes and options that a `config.json` states."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a checkpoint by name; a tied head has no tensor."""
        return tensor_shapes(self)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> "ModelConfig":
        """Read a `config.json`; absent keys have transformers' defaults for the family.

        Raises ValueError naming the key of an unsupported option.
        """
        check_finite(data)
        family = _checked_family(data)
        said: dict[str, Any] = {
            field: _said(data, value) if isinstance(value, Key) else value for field, value in family.options.items()
        }
        layers, hidden, heads, kv_heads, head_dim = _sizes(family, said)
        activation, gated = _activation(data, family, said.pop("activation"), said.pop("gated"))
        max_positions = _size(family, said, "max_positions")
        rope, rotary_dim = _rotary(data, family, head_dim, max_positions)
        if said.pop("scaled_embedding"):
            said["embedding_scale"] = hidden**0.5
        head_scale = hidden**-0.5 if said.pop("scaled_head") else 1.0
        config = cls(
            **{
                **said,
                "vocabulary": _size(family, said, "vocabulary"),
                "family": str(data["model_type"]),
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "feed_forward": _size(family, said, "feed_forward", absent=4 * hidden),
                "max_positions": max_positions,
                "activation": activation,
                "gated": gated,
                "rope": rope,
                "rotary_dim": rotary_dim,
                "windows": _windows(data, family, layers),
                "norm_epsilon": real_number(said["norm_epsilon"], _name_of(family, "norm_epsilon")),
                "initializer_range": real_number(said["initializer_range"], _name_of(family, "initializer_range")),
                "head_scale": head_scale,
            }
        )
        check_parallel_plan(data, config)
        return config


def _sizes(family: Family, said: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Return layers, hidden size, heads, heads of keys and values, and elements of a head; the last two leave `said`.

    Further sizes are replaced by checked ones.
    """
    hidden, heads = _size(family, said, "hidden"), _size(family, said, "heads")
    if isinstance(family.options["encoder_layers"], Key):
        said["encoder_layers"] = _size(family, said, "encoder_layers", MAX_LAYERS)
    layers = _size(family, said, "layers", MAX_LAYERS, absent=said["encoder_layers"])
    # null: one per query head; an absent key: the family's default.
    kv_heads = _size(family, said, "kv_heads", absent=heads)
    if heads % kv_heads:
        raise ValueError(f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if said.get("head_dim") is None and hidden % heads:
        named = _name_of(family, "hidden"), _name_of(family, "heads")
        raise ValueError(f"config.json: {named[0]} {hidden} is not divisible by {named[1]} {heads}")
    head_dim = _size(family, said, "head_dim", absent=hidden // heads)
    for name in ("kv_heads", "head_dim"):
        said.pop(name, None)
    for name in ("relative_buckets", "relative_distance", "token_types", "start_token"):
        if isinstance(family.options.get(name), Key):
            said[name] = size_of(said[name], _name_of(family, name), MAX_SIZE, smallest=0)
    return layers, hidden, heads, kv_heads, head_dim


def _size(family: Family, said: dict[str, Any], field: str, largest: int = MAX_SIZE, absent: int | None = None) -> int:
    """Return a checked size; absent: its value where the key is null."""
    value = said.get(field)
    if value is None and absent is not None:
        return absent
    return size_of(value, _name_of(family, field), largest)


def _name_of(family: Family, field: str) -> str:
    """Return the key of `config.json` that holds a field."""
    key = family.options.get(field)
    return key.name if isinstance(key, Key) else field


def _said(data: dict[str, Any], key: Key) -> Any:
    """Return the value of a key in our terms."""
    names = (key.name, *key.others)
    # null is a valid value, unless an alternative key is set.
    given = (data[name] for name in names if name in data and (data[name] is not None or not key.others))
    value = next(given, key.default)
    if isinstance(key.default, bool):
        if value not in (True, False, None):
            raise ValueError(f"config.json: {key.name} {short_value(value)}, expected true or false")
        value = bool(value)
    if key.values is None:
        return value
    if value not in key.values:
        known = ", ".join(repr(one) for one in key.values)
        raise ValueError(f"config.json: {key.name} {value!r} is not implemented; use one of: {known}")
    return key.values[value]


def _checked_family(data: dict[str, Any]) -> Family:
    """Return the family of `model_type`. Raises ValueError for an unsupported family."""
    kind = data.get("model_type")
    family = family_of(kind)
    if family is None:
        raise ValueError(
            f"config.json: model_type {short_value(kind)} is not implemented; use one of: {', '.join(families())} "
            f"({PAGE} says how to add one)"
        )
    required = [key.name for key in family.options.values() if isinstance(key, Key) and key.default is REQUIRED]
    missing = [name for name in required if data.get(name) is None]
    if missing:
        raise ValueError(f"config.json: {missing[0]} is missing; a {kind} model needs {', '.join(required)}")
    if data.get("quantization_config"):
        raise ValueError("config.json: quantization_config is not implemented; use the unquantised checkpoint")
    for name, computed in family.computed.items():
        value = data.get(name, computed[0])
        if value not in computed:
            raise ValueError(
                f"config.json: {name} {short_value(value)} is not implemented; "
                + ("leave it out" if computed == (None,) else f"use {' or '.join(map(repr, computed))}")
            )
    for name, field in family.equal.items():
        key = family.options[field]
        assert isinstance(key, Key)
        used = data.get(key.name, key.default)
        if data.get(name) is not None and data[name] != used:
            raise ValueError(
                f"config.json: {name} {short_value(data[name])} is not implemented; use {key.name}, {short_value(used)}"
            )
    check_keys(data, family)
    return family


def _activation(data: dict[str, Any], family: Family, named: Any, gated: bool | None) -> tuple[Activation, bool]:
    """Return the activation and whether it is a gate. gated None: derived from the name ("gated-gelu")."""
    name = named if isinstance(named, str) else ""
    if gated is None:
        gated = name.startswith("gated-")
        # "gated-gelu" always means the tanh form, as in transformers; "gelu" means the exact one.
        name = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        # Newer files state both parts too, and transformers uses those.
        gated = bool(data.get("is_gated_act", gated))
        if "dense_act_fn" in data:
            named = data["dense_act_fn"]
            name = named if isinstance(named, str) else ""
    name = family.activations.get(name, name)
    if name not in ACTIVATIONS:
        where = "dense_act_fn" if family.gate_keys and "dense_act_fn" in data else _name_of(family, "activation")
        raise ValueError(
            f"config.json: {where} {short_value(named)} is not implemented; use one of: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name], gated


def _rotary(data: dict[str, Any], family: Family, head_dim: int, max_positions: int) -> tuple[Rope | None, int]:
    """Return the rotary positions, and the number of rotated elements of each head."""
    if family.options["positions"] != "rotary":
        return None, 0
    rope, share = parse_rope(data, max_positions, family.theta_key, family.share_key, family.rotary_share)
    turning = int(head_dim * share)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim {head_dim} is odd; rotary positions need an even one")
    if turning % 2 or not turning:
        raise ValueError(
            f"config.json: {family.share_key} {share} turns {turning} of {head_dim} elements of each head "
            f"({_name_of(family, 'hidden')} / {_name_of(family, 'heads')}); use a share that turns an even number"
        )
    return rope, turning


def _windows(data: dict[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens; None: all tokens."""
    window = data.get("sliding_window", family.window)
    if family.slides == "none" or (family.slides == "upper" and not data.get("use_sliding_window", False)):
        window = None
    types = data.get("layer_types") if family.layer_types else None
    if types is None:
        first = data.get("max_window_layers", family.max_window_layers) if family.slides == "upper" else 0
        first = size_of(first, "max_window_layers", MAX_SIZE, smallest=0)
        slides = [layer >= first for layer in range(layers)]
    else:
        if not isinstance(types, list):
            raise ValueError(f"config.json: layer_types {short_value(types)}, expected a list of names")
        slides = [kind == "sliding_attention" for kind in types]
        # "attention": the former name of full_attention.
        unknown = {str(kind) for kind in types} - {"sliding_attention", "full_attention", "attention"}
        if unknown or len(types) != layers:
            raise ValueError(
                "config.json: layer_types must name full_attention or sliding_attention for each of "
                f"{layers} layers (num_hidden_layers)"
            )
        if window is None and any(slides):
            raise ValueError(
                "config.json: layer_types names sliding_attention, but no sliding_window is in use (use_sliding_window)"
            )
    if window is None:
        return (None,) * layers
    tokens = size_of(window, "sliding_window", MAX_SIZE)
    return tuple(tokens if slide else None for slide in slides)
