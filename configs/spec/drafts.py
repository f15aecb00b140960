"""Drafts of cells: plain data with fields set by dotted names.

`configs.plans.points` overrides fields of drafts and builds cells from them.
"""

from typing import Any

from configs.common.execution import Layout
from configs.common.files.reading import brief
from configs.common.variables import checked_variables
from configs.spec.cell import Cell
from configs.spec.study import suggestion
from configs.workloads import STUDIED

Draft = dict[str, Any]

_PARTS = ("workload", "layout", "env")
"""Fields of a cell that have fields themselves."""
_MAPPINGS = ("params", "environment", "stop_after", "arguments")
"""Fields of a workload that are mappings, whose entries an override can name."""

_VARIABLES = (("env",), ("workload", "environment"))
"""Where a cell has variables of its ranks: their values would be shown beside what is wrong with a point."""


def copied(draft: Draft) -> Draft:
    """Return an independent copy of a draft."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in draft.items()}


def _copied(value: Any) -> Any:
    """Copy plain data; a tenth of the time of `deepcopy`, which a sweep of 10,000 cells notices."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def reference_of(draft: Draft) -> Draft:
    """Return the reference draft for correctness: unmodified transformers, one rank, float32, batch size 1."""
    reference = copied(draft) | {"engine": "transformers", "dtype": "float32", "layout": Layout().model_dump()}
    reference |= {"engine_mode": "eager", "compression": ()}
    reference.pop("nodes", None)
    reference["workload"].update(batch_size=1, micro_batch_size=None)
    return reference


def field_path(draft: Draft, dotted: str) -> tuple[str, ...] | None:
    """Return the path of a field: `batch_size` is short for `workload.batch_size`, `dp` for `layout.dp`."""
    path = tuple(dotted.split("."))
    if path[0] == "workload" and len(path) == 3:
        path = path[1:]
    if len(path) == 2 and path[0] in _MAPPINGS and path[0] in _workload_fields(draft):
        return "workload", *path
    inner = {"workload": _workload_fields(draft), "layout": list(Layout.model_fields)}
    if len(path) == 2:
        if path[0] == "env" or path[1] in inner.get(path[0], []):
            return path
        return None
    if len(path) == 1:
        if dotted in Cell.model_fields and dotted not in ("model", "target"):
            return path
        for part, names in inner.items():
            if dotted in names:
                return part, dotted
    return None


def _workload_fields(draft: Draft) -> list[str]:
    known = STUDIED.get(draft["workload"].get("kind", ""))
    if known is None:
        return []
    hidden = ("kind", *known.hidden_fields)
    return [name for name in known.model.model_fields if name not in hidden]


def field_names(draft: Draft) -> list[str]:
    """Return the fields that an override may set."""
    top = ["dtype", "engine", "engine_mode", "page_cache", "compression", "nodes", "cores_per_rank"]
    return top + _workload_fields(draft) + list(Layout.model_fields)


def override(draft: Draft, overrides: dict[str, Any]) -> list[str]:
    """Set dotted fields of a draft; return a problem, `field: what is wrong`, for each invalid field.

    A whole part (`workload`) is set before its fields, and a whole mapping (`params`) before its entries, whatever
    their order in the study. Two names of one field are a problem, because only one of their values would be measured.
    """
    problems = []
    set_by: dict[tuple[str, ...], str] = {}
    for dotted, value in sorted(overrides.items(), key=lambda item: _depth(item[0])):
        path = field_path(draft, dotted)
        if path is None:
            problems.append(f"{dotted}: unknown field of a cell{suggestion(dotted, field_names(draft))}")
        elif path == ("workload",) and not (isinstance(value, dict) and str(value.get("kind")) in STUDIED):
            problems.append(f"workload: kind is missing\n  use one of: {', '.join(STUDIED)}")
        elif path in set_by:
            problems.append(f"{dotted}: the same field as {set_by[path]}. Name it once")
        elif dotted in _PARTS and not isinstance(value, dict):
            problems.append(f"{dotted}: expected a mapping of fields to values, got {brief(value)}")
        elif wrong := _wrong_variables(path, value):
            problems.append(f"{dotted}: {wrong}")
        elif len(path) == 3:
            entries = dict(draft[path[0]].get(path[1]) or {})
            draft[path[0]][path[1]] = entries | {path[2]: value}
        elif path == ("workload", "params") and isinstance(value, dict):
            draft["workload"]["params"] = {**(draft["workload"].get("params") or {}), **value}
        elif len(path) == 1:
            draft[path[0]] = value
            set_by |= {(path[0], str(name)): dotted for name in value} if isinstance(value, dict) else {}
        else:
            draft[path[0]][path[1]] = value
        if path is not None:
            set_by.setdefault(path, dotted)
        if path is not None and path[-1] in _MAPPINGS and isinstance(value, dict):
            set_by |= {(*path, str(name)): dotted for name in value}
    return problems


def _depth(dotted: str) -> int:
    """0 of a whole part, 1 of a whole mapping, 2 of anything else."""
    return 0 if dotted in _PARTS else 1 if dotted.removeprefix("workload.") in _MAPPINGS else 2


def _wrong_variables(path: tuple[str, ...], value: Any) -> str | None:
    """Return what is wrong with variables of the ranks; values that are no text are for the check of the cell."""
    place = next((place for place in _VARIABLES if path[: len(place)] == place), None)
    named = {path[-1]: value} if place is not None and len(path) > len(place) else value
    if place is None or not isinstance(named, dict):
        return None
    try:
        checked_variables({name: text if isinstance(text, str) else "" for name, text in named.items()})
    except ValueError as error:
        return str(error)
    return None
