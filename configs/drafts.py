"""A cell while it is still being put together: plain data, whose fields are set by dotted names.

`configs.expand` overrides fields of drafts and makes cells of them.
"""

from typing import Any

from pydantic import BaseModel

from configs.cell import (
    Cell,
    CommunicationWorkload,
    EncodeWorkload,
    GenerateWorkload,
    Layout,
    NoopWorkload,
    Seq2SeqWorkload,
)
from configs.study import suggestion
from configs.training import TrainWorkload

Draft = dict[str, Any]
WORKLOADS: dict[str, type[BaseModel]] = {
    "generate": GenerateWorkload,
    "seq2seq": Seq2SeqWorkload,
    "encode": EncodeWorkload,
    "train": TrainWorkload,
    "noop": NoopWorkload,
    "communication": CommunicationWorkload,
}


def copied(draft: Draft) -> Draft:
    """A draft that can be changed without changing this one."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in draft.items()}


def reference_of(draft: Draft) -> Draft:
    """The draft that correctness holds it against: unmodified transformers, one rank, float32, a prompt at a time."""
    reference = copied(draft) | {"engine": "transformers", "dtype": "float32", "layout": Layout().model_dump()}
    reference |= {"engine_mode": "eager", "compression": ()}
    reference.pop("nodes", None)
    reference["workload"].update(batch_size=1, micro_batch_size=None)
    return reference


def field_path(draft: Draft, dotted: str) -> tuple[str, ...] | None:
    """Where a field lies: `batch_size` is short for `workload.batch_size`, `dp` for `layout.dp`."""
    path = tuple(dotted.split("."))
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
    model = WORKLOADS.get(draft["workload"].get("kind", ""))
    hidden = ("kind", "answers", "noise_dtypes", "noise_orders")  # set by the study and by the correctness experiment
    return [name for name in model.model_fields if name not in hidden] if model else []


def field_names(draft: Draft) -> list[str]:
    """What an override may name."""
    top = ["dtype", "engine", "engine_mode", "page_cache", "compression", "nodes", "cores_per_rank"]
    return top + _workload_fields(draft) + list(Layout.model_fields)


def override(draft: Draft, overrides: dict[str, Any]) -> list[str]:
    """Set dotted fields of a draft; returns a problem, `field: what is wrong`, for each that cannot be set."""
    problems = []
    for dotted, value in overrides.items():
        path = field_path(draft, dotted)
        if path is None:
            problems.append(f"{dotted}: no such field of a cell{suggestion(dotted, field_names(draft))}")
        elif path == ("workload",) and not (isinstance(value, dict) and value.get("kind") in WORKLOADS):
            problems.append(f"workload: a whole workload needs its kind\n  use one of: {', '.join(WORKLOADS)}")
        elif len(path) == 1:
            draft[path[0]] = value
        else:
            draft[path[0]][path[1]] = value
    return problems
