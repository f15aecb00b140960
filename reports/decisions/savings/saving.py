"""A saving as the report shows it: a row of the table where it has a figure, else a word on what it lacks."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.spec.objectives import Purpose
from reports.text import Table, joined

BATCH: tuple[Purpose, ...] = ("batch", "hybrid")
SERVING: tuple[Purpose, ...] = ("serving", "hybrid")
EVERY: tuple[Purpose, ...] = ("batch", "serving", "hybrid")
HYBRID: tuple[Purpose, ...] = ("hybrid",)
UNKNOWN_EFFECT = "unknown"


@dataclass(frozen=True)
class Saving:
    """One saving: for which purposes, what it would bring (Markdown), and what that rests on or lacks."""

    name: str
    purposes: tuple[Purpose, ...]
    effect: str
    basis: str


def savings_table(found: Sequence[Saving]) -> Table | None:
    """One row for each saving that has a figure; None where none has."""
    known = [saving for saving in found if saving.effect != UNKNOWN_EFFECT]
    if not known:
        return None
    rows = tuple((saving.name, ", ".join(saving.purposes), saving.effect, saving.basis) for saving in known)
    return Table(("saving", "for", "what it would bring", "from what"), rows, text_columns=4)


def unknown_savings(found: Sequence[Saving]) -> str | None:
    """One sentence (Markdown) of the savings without a figure, and what each lacks; None where all have one."""
    missing: dict[str, list[str]] = {}
    for saving in found:
        names = missing.setdefault(saving.basis, [])
        if saving.effect == UNKNOWN_EFFECT and saving.name not in names:
            names.append(saving.name)
    told = [f"{joined(names)} ({basis})" for basis, names in missing.items() if names]
    return f"Without a figure: {'; '.join(told)}." if told else None
