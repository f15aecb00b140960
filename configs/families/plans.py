"""Check a tensor-parallel plan in a `config.json` against the engine's splits; no torch.

    check_parallel_plan(config_json, config)    # ValueError names the entry that differs
    splits_of(config)                           # {"layers.*.self_attn.q_proj": "rows", ...}

transformers keeps such plans in its classes (`base_model_tp_plan`), and a user's plan in `distributed_config.tp_plan`.
It writes neither into a `config.json`, but a model's publisher may. A plan does not change results, only the
distribution of work. The engine's splits are used, and a plan that differs is rejected instead of ignored.
"""

from typing import Any

from configs.common.printable import printable
from configs.families.family import PAGE
from configs.families.numbers import short_value
from configs.families.sizes import ModelSizes
from configs.families.table import FAMILIES
from configs.families.tensors import ROLES, WeightSplit, layer_stacks

STYLES: dict[str, tuple[WeightSplit, ...]] = {
    "colwise": ("rows",),
    "colwise_gather_output": ("rows", "words"),
    "colwise_rep": ("rows", "words"),
    "packed_colwise": ("rows",),
    "rowwise": ("columns",),
    "rowwise_split_input": ("columns",),
    "rowwise_rep": ("columns",),
    "packed_rowwise": ("columns",),
    "embedding_rowwise": ("words",),
    "replicate": ("whole",),
    "replicated_with_grad_allreduce": ("whole",),
    "all_reduce": ("whole",),
}
"""Split names of transformers, and the splits of ours that give each rank the same part."""


def splits_of(config: ModelSizes) -> dict[str, WeightSplit]:
    """How each module of the base model is split, by its name there, "*" for the number of a layer."""
    family = FAMILIES[config.family]
    found: dict[str, WeightSplit] = {}
    for slot, name in family.tables.items():
        found[name] = "words" if slot == "embedding" else "whole"
    for stack in layer_stacks(config):
        place = family.stacks[stack]
        for name, roles in place.names.items():
            found[place.layers.format("*") + name] = ROLES[roles[0]].split
        if place.norm:
            found[place.norm] = "whole"
    return found


def check_parallel_plan(data: dict[str, Any], config: ModelSizes) -> None:
    """Raise ValueError, naming the entry, where a plan in a `config.json` splits otherwise than we do."""
    nested = data.get("distributed_config")
    for where, plan in (
        ("base_model_tp_plan", data.get("base_model_tp_plan")),
        ("distributed_config.tp_plan", nested.get("tp_plan") if isinstance(nested, dict) else None),
    ):
        if not isinstance(plan, dict):
            continue
        ours = splits_of(config)
        for name, style in plan.items():
            module, shown = _own_name(str(name), config), printable(str(name), 80)
            if module not in ours:
                raise ValueError(f"config.json: {where} names {shown}, which is no module that is split here ({PAGE})")
            if ours[module] not in STYLES.get(str(style), ()):
                fitting = ", ".join(one for one, splits in STYLES.items() if ours[module] in splits)
                raise ValueError(
                    f"config.json: {where} has {shown}: {short_value(style)}, but it is split by {ours[module]} here; "
                    f"use one of: {fitting}, or leave the plan out"
                )


def _own_name(name: str, config: ModelSizes) -> str:
    """An entry's module without the prefix of the class whose plan it is."""
    family = FAMILIES[config.family]
    for prefix in sorted((family.prefix, *family.prefixes), key=len, reverse=True):
        if prefix and name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
