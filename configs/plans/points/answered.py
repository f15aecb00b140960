"""How much a correctness experiment answers: as much as the study's other cells of the model ask for, within bounds.

    drafts = answering_drafts(experiment, draft, available, used_workloads(cells, draft), saved=None)

A defect may depend on the length of a sequence, the row of a batch or the decode step, so answers are compared at the
sizes that are measured. What the bounds leave out is named beside the verdict (`reports.correctness.reach`).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from configs.spec.cell import Cell
from configs.spec.drafts import Draft, copied, reference_of
from configs.spec.experiments import Correctness
from configs.workloads import STUDIED
from configs.workloads.prompted import PromptedWorkload

MIN_PROMPTS = 20
MAX_PROMPTS = 64
MAX_NEW_TOKENS = 64
_FAR = 2**40
MAX_POSITIONS = 2048
"""Without a word of the author: the reference answers one prompt at a time, several times over."""


@dataclass(frozen=True)
class UsedWorkload:
    """A workload that is measured, over so many replicas."""

    workload: PromptedWorkload
    dp: int

    @property
    def rows(self) -> int:
        """Sequences of its largest batch."""
        prompts = self.workload.num_prompts
        return self.workload.batch_size if prompts is None else min(self.workload.batch_size, -(-prompts // self.dp))


@dataclass(frozen=True)
class AnsweringDraft:
    """A cell of a correctness experiment, not yet checked."""

    draft: Draft
    values: dict[str, Any]
    label: str
    baseline: bool = False


def used_workloads(cells: Iterable[Cell], draft: Draft) -> list[UsedWorkload]:
    """Return what other cells measure of the draft's model in its kind of workload."""
    return [
        UsedWorkload(cell.workload, cell.layout.dp)
        for cell in cells
        if cell.model == draft["model"]
        and cell.workload.kind == draft["workload"]["kind"]
        and isinstance(cell.workload, PromptedWorkload)
        and not cell.workload.keeps_answers
    ]


def answering_drafts(
    experiment: Correctness,
    draft: Draft,
    available: int | None,
    used: Sequence[UsedWorkload],
    saved: PromptedWorkload | None,
) -> Iterator[AnsweringDraft]:
    """Return the reference and the candidates. saved: what a saved reference answered; others as `answered_fields`.

    Raises ValueError where a saved reference does not fit.
    """
    dtypes = list(dict.fromkeys([*experiment.dtypes, "float32"]))
    if saved is None:
        fields = answered_fields(experiment, draft["workload"], available, used)
        noise = {"noise_dtypes": tuple(dtypes), "noise_orders": experiment.noise_orders}
    else:
        fields = saved_fields(saved, draft["workload"], used, dtypes)
        noise = {"noise_dtypes": saved.noise_dtypes, "noise_orders": saved.noise_orders}
    draft = copied(draft)
    draft["workload"] |= fields
    return _drafts(experiment, draft, noise, dtypes)


def _drafts(
    experiment: Correctness, draft: Draft, noise: dict[str, Any], dtypes: Sequence[str]
) -> Iterator[AnsweringDraft]:
    reference = reference_of(draft)
    reference["workload"] |= noise
    values = {"engine": "transformers", "dtype": "float32", "layout": "1 rank"}
    yield AnsweringDraft(reference, values, "transformers, 1 rank, float32", baseline=True)
    for engine, layout, dtype in itertools.product(experiment.engines, experiment.layouts, dtypes):
        candidate = copied(draft) | {"engine": engine, "dtype": dtype, "layout": layout.model_dump()}
        values = {"engine": engine, "dtype": dtype, "layout": str(layout)}
        yield AnsweringDraft(candidate, values, f"{engine}, {layout}, {dtype}")


def answered_fields(
    experiment: Correctness, work: dict[str, Any], available: int | None, used: Sequence[UsedWorkload]
) -> dict[str, Any]:
    """Return the fields of the workload of a correctness experiment.

    work: fields of its base. available: prompts in its file, None without one. used: of the study's other cells of the
    same model and kind; none: the base stands for them.
    """
    known = STUDIED[work["kind"]]
    used = used or [UsedWorkload(_base(work), 1)]
    new_tokens = 0
    found: dict[str, Any] = {}
    if known.decodes:
        new_tokens = experiment.new_tokens or min(MAX_NEW_TOKENS, max(each.workload.decoded_tokens for each in used))
        found["new_tokens"] = new_tokens
    chosen = {"batch_size", "workload.batch_size"} & set(experiment.base)
    rows = work.get("batch_size") or 1 if chosen else max(each.rows for each in used)
    found |= kept_answers(work | {"batch_size": rows}, experiment.prompts or MIN_PROMPTS, available)
    if experiment.prompts is None:
        count = max(found["num_prompts"], min(rows, MAX_PROMPTS))
        found |= {"num_prompts": count, "batch_size": min(rows, count)}
        found["micro_batch_size"] = _micro_batch(work, rows, count)
    return found | {"longest_tokens": _longest(experiment, work, used, new_tokens)}


def saved_fields(
    saved: PromptedWorkload, work: dict[str, Any], used: Sequence[UsedWorkload], dtypes: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of the workload of a correctness experiment with a saved reference.

    Raises ValueError where it answered another kind of work, or lacks the noise of a precision.
    """
    kind = saved.model_dump()["kind"]
    if kind != work["kind"]:
        raise ValueError(f"a saved {kind} workload, expected {work['kind']}")
    missing = [name for name in dtypes if name not in saved.noise_dtypes]
    if missing:
        raise ValueError(
            f"dtypes: noise of {', '.join(saved.noise_dtypes)} only, expected {missing[0]}. "
            f"Save the reference again with --dtype {missing[0]}"
        )
    count = saved.num_prompts or MIN_PROMPTS
    rows = max(each.rows for each in used or [UsedWorkload(_base(work), 1)])
    own = {"batch_size": min(rows, count), "micro_batch_size": _micro_batch(work, rows, count)}
    return saved.model_dump() | own | {"noise_dtypes": (), "noise_orders": saved.noise_orders}


def kept_answers(work: dict[str, Any], most: int | None, available: int | None) -> dict[str, Any]:
    """Return the fields of a workload that answers at most `most` of its prompts and keeps what it answers."""
    given, size = work.get("num_prompts"), work.get("batch_size") or 1
    available = available or (given if isinstance(given, int) else None)
    count = min(most or available or MIN_PROMPTS, available or most or MIN_PROMPTS)
    found = {"answers": True, "num_prompts": count}
    if not isinstance(size, int):  # stays as it is, for the check of the cell's fields
        return found | {"batch_size": size}
    return found | {"batch_size": min(size, count), "micro_batch_size": _micro_batch(work, size, count)}


def _micro_batch(work: dict[str, Any], size: int, count: int) -> Any:
    """Return the micro-batch of a batch of `size`, of which `count` rows are answered; what is wrong stays so."""
    given = work.get("micro_batch_size")
    return min(given, count) if isinstance(given, int) and given <= size else given


def _longest(
    experiment: Correctness, work: dict[str, Any], used: Sequence[UsedWorkload], new_tokens: int
) -> int | None:
    """Return the length of the last prompt, if it is not that of the base's own prompts."""
    # Decoded tokens follow a prompt, or have a stack of their own.
    beside = max(0, _base(work | {"new_tokens": new_tokens}).positions(_FAR) - _FAR)
    if experiment.positions is not None:
        return max(1, experiment.positions - beside)
    lengths = [each.workload.prompt_tokens for each in used]
    if None in lengths:
        return None  # a file's or the default's, which the base has too
    positions = max(each.workload.positions(each.workload.prompt_tokens or 0) for each in used)
    longest = min(positions, MAX_POSITIONS) - beside
    return longest if longest > (work.get("prompt_tokens") or 0) else None


def _base(work: dict[str, Any]) -> PromptedWorkload:
    model = STUDIED[work["kind"]].model
    found = model.model_construct(**work)
    assert isinstance(found, PromptedWorkload)
    return found
