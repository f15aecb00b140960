"""Why a cell is not measured: the engine has no such layout, the pass is not for it, or it does not fit.

    reason = refusal(draft)        # "engine deepspeed is measured with tp of 2 or more"; None: there is such a cell

`configs.expand` asks; a grid over engines keeps such points as unsupported, with the reason.
"""

from collections.abc import Sequence

from pydantic import ValidationError

from configs.cell import Cell, Layout
from configs.drafts import Draft, copied
from configs.plan import Candidate
from configs.prediction import Prediction

CHOICES = frozenset({"engine", "engine_mode", "compression"})
"""Fields whose values have no cell in every layout."""


def refusal(draft: Draft) -> str | None:
    """Why this version has no such cell: the engine, its layout or the pass. None: it has, or something is misspelt."""
    try:
        Cell.model_validate(draft)
    except ValidationError as error:
        found = [str(detail.get("ctx", {}).get("error", "")) for detail in error.errors() if not detail["loc"]]
        field, _, rest = found[0].partition(": ") if len(found) == error.error_count() == 1 else ("", "", "")
        if field in {*CHOICES, "layout"}:
            return rest.partition("; ")[0]
    return None


def unmeasured(draft: Draft, layout: Layout, prediction: Prediction) -> str | None:
    """Why a layout is not to be measured: it does not fit, or the engine has no such layout; None: it can be."""
    if prediction.fits is False:
        return "does not fit" + (f": {prediction.reason}" if prediction.reason else "")
    try:
        Cell.model_validate(copied(draft) | {"layout": layout.model_dump()})
    except ValidationError as error:
        reasons = [str(detail.get("ctx", {}).get("error", detail["msg"])) for detail in error.errors()]
        # What would work instead is for whoever writes a cell; here the planner did.
        return "; ".join(reason.partition(": ")[2].partition("; use ")[0] or reason for reason in reasons)
    return None


def why_none(candidates: Sequence[Candidate], ranks: int) -> str:
    """Why nothing is left to measure."""
    limit = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if not candidates:
        return f"no layout of up to {limit} is valid for this model and workload"
    reasons = "; ".join(dict.fromkeys(candidate.reason or "" for candidate in candidates))
    return f"none of {len(candidates)} layouts of up to {limit} can be measured: {reasons}"
