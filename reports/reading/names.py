"""Names of cells and models for readers, and fields as dotted names, by which cells of one label are told apart."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from configs.common.printable import printable, value_text
from configs.plans.plan import Plan, PlannedModel
from configs.spec.cell import Cell

NO_MODEL = "no model"
"""Stands where tables name the model, of work that has none."""
_HASH = re.compile(r"[0-9a-f]{64}")


def cell_names(plan: Plan) -> dict[str, str]:
    """A name for each cell by key: its label, with what tells it from others of the same label."""
    groups: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    for key, cell in plan.cells.items():
        groups[cell.model, _label(cell)].append(key)
    names = {}
    for (_, label), keys in groups.items():
        fields = {key: _flat(plan.cells[key].model_dump(mode="json")) for key in keys}
        telling = _telling(list(fields.values()))
        # A file's hash says nothing to a reader, who needs it where nothing else tells the cells apart.
        words = [name for name in telling if not any(_is_hash(flat.get(name)) for flat in fields.values())]
        apart = {repr([flat.get(name) for name in words]) for flat in fields.values()}
        for key in keys:
            # A label has the target's name and texts of the workload.
            extra = [
                _field_text(name, fields[key].get(name)) for name in (words if len(apart) == len(keys) else telling)
            ]
            names[key] = printable(", ".join([label, *extra]))
    return names


def _telling(fields: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which cells differ. A mapping that some have and others lack differs by its entries: of `env` the
    variables tell, and to say `no env` of a cell that has some would be wrong."""
    every = sorted({name for flat in fields for name in flat})
    telling = [name for name in every if len({repr(flat.get(name)) for flat in fields}) > 1]
    entries = [name for name in telling if not any(other.startswith(f"{name}.") for other in telling)]
    found, kept = (len({repr([flat.get(name) for name in names]) for flat in fields}) for names in (telling, entries))
    return entries if kept == found else telling


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _field_text(name: str, value: Any) -> str:
    """`8 prompts`, `no variant`, `env.OMP_NUM_THREADS` as `OMP_NUM_THREADS 2`, a file by the start of its hash."""
    word = name.rpartition(".")[2]
    if word == "num_prompts" and value not in (None, 1):
        return f"{value} prompts"
    return f"no {word}" if value is None else f"{word} {value[:12] if _is_hash(value) else value_text(value)}"


def _label(cell: Cell) -> str:
    return f"{cell.label}, answers kept" if cell.workload.keeps_answers else cell.label


def model_title(plan: Plan, identity: str | None) -> str:
    """The name that a study gives a model, marked where its weights are random."""
    if identity is None:
        return NO_MODEL
    named = next((model for model in plan.models if model.identity == identity), None)
    return _marked(named) if named else identity


def title_of_name(plan: Plan, name: str) -> str:
    """The same of a model by its name in the study; a name that is none of its models' stays as it is."""
    named = next((model for model in plan.models if model.name == name), None)
    return _marked(named) if named else name


def _marked(model: PlannedModel) -> str:
    return f"{model.name} (random weights)" if model.synthetic else model.name


def flat_environment(environment: dict[str, Any]) -> dict[str, str]:
    """An environment as dotted names and text, sorted by name."""
    flat = _flat(environment)
    texts = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in flat.items()
    }
    return dict(sorted(texts.items()))


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
