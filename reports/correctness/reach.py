"""What a comparison of answers reached, and what not: positions, attention window, rows of a batch, decode steps.

    reach = reach_of(study, result, answers)
    reach.text                # "sequences of 2,048 tokens, batches of 8, 32 decode steps"
    reach.missed              # ("positions 2,049 to 32,768", ...)

A defect may begin at a position, in a row or at a step. What counts is what the study's other cells of the model
measure; without any, what the model allows.
"""

from dataclasses import dataclass
from math import ceil

from configs.spec.cell import Cell
from configs.workloads.prompted import PromptedWorkload
from reports.correctness.data import Answers
from reports.correctness.embeddings import Embeddings
from reports.reading.load import CellResult, StudyResult
from reports.text import plural


@dataclass(frozen=True)
class Reach:
    """positions: tokens of the longest sequence compared; rows: of the largest batch; steps: through the cache, None
    for an encoder. missed: what was not reached, in words.
    """

    positions: int
    rows: int
    steps: int | None
    missed: tuple[str, ...]

    @property
    def text(self) -> str:
        """What was reached."""
        steps = [] if self.steps is None else [plural(self.steps, "decode step")]
        return ", ".join([f"sequences of {self.positions:,} tokens", f"batches of {self.rows:,}", *steps])

    @property
    def missed_text(self) -> str:
        """What was not reached; empty if all was."""
        return "; ".join(self.missed)


@dataclass(frozen=True)
class _Used:
    """The largest that other cells measure; None: none are known to."""

    positions: int | None
    rows: int | None
    steps: int | None


def reach_of(study: StudyResult, result: CellResult, answers: Answers | Embeddings) -> Reach:
    """Return the reach of one candidate's answers."""
    rows = _rows(result.cell)
    positions, steps = _compared(answers, result.cell)
    # A decoder may be given a part of its source only, and few prompts of an encoder keep their states.
    positions = max(positions, _positions(result) or 0)
    used = _used(study, result)
    missed: list[str] = []
    limit, window = _figure(result, "model_max_positions"), _figure(result, "model_window")
    wanted = limit if used is None else used.positions
    if wanted is None and used is None:
        missed.append(f"positions from {positions + 1:,}")
    elif wanted is not None and wanted > positions:
        missed.append(_range("position", positions + 1, wanted))
    if window is not None and positions <= window and (wanted is None or wanted > window):
        missed.append(f"the attention window of {window:,} tokens")
    if used is None:
        missed.append(f"batches of more than {rows:,}")
    elif used.rows is not None and used.rows > rows:
        missed.append(f"{_range('row', rows + 1, used.rows)} of a batch")
    if steps is not None and used is None:
        missed.append(f"decode steps from {steps + 1:,}")
    elif steps is not None and used is not None and (used.steps or 0) > steps:
        missed.append(_range("decode step", steps + 1, used.steps or 0))
    return Reach(positions, rows, steps, tuple(missed))


def _range(name: str, first: int, last: int) -> str:
    return f"{name} {first:,}" if first == last else f"{name}s {first:,} to {last:,}"


def _compared(answers: Answers | Embeddings, cell: Cell) -> tuple[int, int | None]:
    """Longest sequence in tokens, and most steps through the cache."""
    if isinstance(answers, Embeddings):
        return max((int(at.max()) + 1 for at in answers.positions.values() if len(at)), default=0), None
    lengths = [_work(cell).positions(len(nll) + 1) for nll in answers.prefill.nll.values()]
    steps = [len(nll) + 1 for nll in answers.cached.nll.values()]  # what follows the last position is not known
    return max(lengths, default=0), max(steps, default=0)


def _used(study: StudyResult, result: CellResult) -> _Used | None:
    """What the other cells of the model measure, which keep no answers; None where there are none."""
    others = [
        other
        for other in study.cells.values()
        if other.cell.model == result.cell.model
        and other.cell.workload.kind == result.cell.workload.kind
        and isinstance(other.cell.workload, PromptedWorkload)
        and not other.cell.workload.keeps_answers
    ]
    if not others:
        return None
    positions = [found for other in others if (found := _positions(other)) is not None]
    steps = [
        other.cell.workload.decoded_tokens for other in others if isinstance(other.cell.workload, PromptedWorkload)
    ]
    return _Used(max(positions, default=None), max(_rows(other.cell) for other in others), max(steps))


def _positions(result: CellResult) -> int | None:
    work = _work(result.cell)
    prompt = work.prompt_tokens or _figure(result, "max_prompt_tokens")
    lengths = [length for length in (prompt, work.longest_tokens) if length is not None]
    return work.positions(max(lengths)) if lengths else None


def _rows(cell: Cell) -> int:
    work = _work(cell)
    if work.num_prompts is None:
        return work.batch_size
    return min(work.batch_size, ceil(work.num_prompts / cell.layout.dp))


def _work(cell: Cell) -> PromptedWorkload:
    assert isinstance(cell.workload, PromptedWorkload)
    return cell.workload


def _figure(result: CellResult, name: str) -> int | None:
    """The largest of all ranks."""
    found = [value for reading in result.completed.values() for value in reading.numbers_by_rank(name)]
    return int(max(found)) if found else None
