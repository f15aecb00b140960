"""Rotary positions as a `config.json` states them: one angle for each pair of a head's elements. No torch.

    rope, share = parse_rope(config_json, max_positions, "rope_theta", share_key="partial_rotary_factor")

Some families rotate only the first `share` of each head (GPT-NeoX, Phi).
"""

from dataclasses import dataclass
from typing import Any, Literal

from configs.common.printable import printable
from configs.families.numbers import MAX_SIZE, real_number, short_value, size_of

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `factor` and the fields after it belong to the kinds that extend the context."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_positions: int = 0


def parse_rope(
    data: dict[str, Any],
    max_positions: int,
    theta_key: str = "rope_theta",
    share_key: str = "",
    share: float = 1.0,
) -> tuple[Rope, float]:
    """Parse settings from `rope_scaling` (which takes precedence, as in transformers) or `rope_parameters`; return the
    rotated share too.

    max_positions: of the model. share_key: "" for a family whose heads are rotated completely; share: the family's
    default. Where a family has keys of its own, copies of them under the common names must be equal. Raises ValueError
    naming the key of an unsupported option.
    """
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    rope: dict[str, Any] = data.get(name) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: {name} {short_value(rope)}, expected an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"config.json: {name} differs by kind of layer, which is not implemented; use one for all")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"config.json: {name}.rope_type {short_value(kind)} is not implemented; use one of: {', '.join(ROPE_KINDS)}"
        )
    unknown = [key for key, value in rope.items() if key not in _KEYS and value is not None]
    if unknown:
        shown = printable(unknown[0], 80)
        raise ValueError(f"config.json: {name}.{shown} is not implemented; use one of: {', '.join(_KEYS)}")
    found = rope.get("partial_rotary_factor", data.get(share_key or "partial_rotary_factor"))
    share = share if found is None else real_number(found, share_key or "partial_rotary_factor")
    if not share_key and share != 1.0:
        raise ValueError(f"config.json: {name}.partial_rotary_factor is not implemented; use 1.0")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"config.json: {share_key} {share} is not a share of a head; use more than 0 and at most 1")
    theta = rope.get("rope_theta", data.get(theta_key))
    base = 10000.0 if theta is None else real_number(theta, "rope_theta" if "rope_theta" in rope else theta_key)
    if base <= 0:
        raise ValueError(f"config.json: {theta_key} {base} is not implemented; use a positive number")
    _check_copy(data, "rope_theta", theta_key, base)
    _check_copy(data, "partial_rotary_factor", share_key, share)
    return _scaled(data, rope, name, kind, base, max_positions), share


def _check_copy(data: dict[str, Any], common: str, own: str, used: float) -> None:
    """Raise ValueError where a common key differs from the family's own key, which transformers reads instead of it."""
    copied = data.get(common)
    if own in ("", common) or copied is None or real_number(copied, common) == used:
        return
    raise ValueError(f"config.json: {common} {short_value(copied)} is not implemented; use {own}, {short_value(used)}")


def _scaled(
    data: dict[str, Any], rope: dict[str, Any], name: str, kind: RopeKind, theta: float, max_positions: int
) -> Rope:
    if kind == "default":
        return Rope(theta)
    needed = ["factor"] if kind == "linear" else ["factor", "low_freq_factor", "high_freq_factor"]
    missing = [key for key in needed if rope.get(key) is None]
    if missing:
        raise ValueError(f"config.json: {name}.{missing[0]} is missing; {kind} needs {', '.join(needed)}")
    numbers = {key: real_number(rope[key], f"{name}.{key}") for key in needed}
    wrong = next((key for key in needed if numbers[key] <= 0), None)
    if wrong is not None:
        raise ValueError(f"config.json: {name}.{wrong} {numbers[wrong]} is not implemented; use a positive number")
    if kind == "linear":
        return Rope(theta, kind, numbers["factor"])
    before = data.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return Rope(
        theta,
        kind,
        factor=numbers["factor"],
        low_frequency_factor=numbers["low_freq_factor"],
        high_frequency_factor=numbers["high_freq_factor"],
        original_positions=size_of(before, "original_max_position_embeddings", MAX_SIZE) if before else max_positions,
    )
