"""Are the answers right? Answers of a cell against those of unmodified transformers, judged.

    verdict = judge(reference, candidate, dtype="bfloat16")

Tokens are compared by prompt and position; logits and likelihoods are of the prompts, which both sides
were given alike, so that they stay comparable after a token has differed. The thresholds are fixed
constants of this version; they are not fitted to the noise of the machine.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from configs.cell import Dtype, GenerateWorkload
from configs.plan import PlannedExperiment
from configs.rates import Column, Floats, by_rank
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.reading.samples import read_samples
from reports.text import UNKNOWN, Table, escaped, number, percent, plural, shortened

Word = Literal["equal", "agrees", "differs", "not judged"]

ANSWER_COLUMNS = (
    "answer_prompts",
    "answer_tokens",
    "answer_nll",
    "answer_nll_prompts",
    "answer_logits",
    "answer_logit_prompts",
)


@dataclass(frozen=True)
class Tolerance:
    """What reduction order and rounding may change. Both are shares: of the largest logit, of the perplexity."""

    logits: float
    perplexity: float


TOLERANCES: dict[Dtype, Tolerance] = {
    "float32": Tolerance(logits=1e-4, perplexity=1e-4),
    "float16": Tolerance(logits=1e-2, perplexity=1e-2),
    "bfloat16": Tolerance(logits=5e-2, perplexity=1e-2),
}
"""float32 leaves 24 bits of mantissa, float16 11 and bfloat16 8; each layer rounds anew."""


@dataclass(frozen=True)
class Answers:
    """What a cell answered, by prompt: tokens, likelihoods of the prompt's tokens in nats, rows of logits."""

    tokens: dict[int, Column]
    nll: dict[int, Floats]
    logits: dict[int, Floats]


@dataclass(frozen=True)
class Verdict:
    """The comparison of a candidate with its reference. What is None could not be compared."""

    word: Word
    reason: str
    tolerance: Tolerance
    prompts: int = 0
    prompts_equal: int = 0
    prompts_missing: int = 0
    first_divergence: tuple[int, int] | None = None
    logit_difference: float | None = None
    logit_relative: float | None = None
    nll_mean: float | None = None
    nll_p99: float | None = None
    perplexity_reference: float | None = None
    perplexity_candidate: float | None = None

    @property
    def perplexity_change(self) -> float | None:
        """(candidate - reference) / reference."""
        if self.perplexity_reference is None or self.perplexity_candidate is None:
            return None
        return self.perplexity_candidate / self.perplexity_reference - 1


@dataclass(frozen=True)
class Judged:
    """One candidate cell and its verdict."""

    label: str
    result: CellResult
    verdict: Verdict


def answers_of(samples: dict[str, Column], vocabulary: int | None) -> Answers:
    """Answers of all ranks, by prompt. Raises ValueError where the columns do not fit each other."""
    tokens: dict[int, Column] = {}
    for prompts, flat in zip(by_rank(samples, "answer_prompts"), by_rank(samples, "answer_tokens"), strict=True):
        if len(prompts):
            tokens |= _grouped(prompts, flat, "answer_tokens")
    nll = _by_prompt(samples, "answer_nll", "answer_nll_prompts")
    logits = _by_prompt(samples, "answer_logits", "answer_logit_prompts")
    for prompt, rows in logits.items():
        if not vocabulary or len(rows) % vocabulary:
            raise ValueError(f"samples: the {len(rows)} answer_logits of prompt {prompt} are no rows of {vocabulary}")
    return Answers(tokens, nll, logits)


def _by_prompt(samples: dict[str, Column], values: str, prompts: str) -> dict[int, Floats]:
    if not any(key.endswith("/" + values) for key in samples):
        return {}
    found: dict[int, Floats] = {}
    for ids, flat in zip(by_rank(samples, prompts), by_rank(samples, values), strict=True):
        if len(ids):
            found |= {
                prompt: np.asarray(part, dtype=np.float64) for prompt, part in _grouped(ids, flat, values).items()
            }
    return found


def _grouped(prompts: Column, flat: Column, name: str) -> dict[int, Column]:
    """Cut `flat` into equal rows, one for each entry of `prompts`, and join the rows of each prompt."""
    if len(flat) % len(prompts):
        raise ValueError(f"samples: {name} has {len(flat)} values, which is no multiple of its {len(prompts)} prompts")
    rows = flat.reshape(len(prompts), -1)
    ids = np.asarray(prompts, dtype=np.int64)
    return {int(prompt): rows[ids == prompt].ravel() for prompt in np.unique(ids)}


def judge(reference: Answers, candidate: Answers, dtype: Dtype) -> Verdict:
    """Compare answers.

    equal: every token is equal and the logits are within the tolerance of the dtype. agrees: tokens
    differ somewhere, but logits and perplexity are within the tolerance. differs: anything else,
    prompts that were not answered and values that are not numbers included.
    """
    tolerance = TOLERANCES[dtype]
    prompts = sorted(set(reference.tokens) & set(candidate.tokens))
    unanswered = set(reference.tokens) - set(candidate.tokens) | set(reference.nll) - set(candidate.nll)
    missing = len(unanswered)
    if reference.logits and not set(reference.logits) & set(candidate.logits):
        return Verdict("not judged", "the cell kept no logits of the reference's prompts", tolerance)
    if not prompts:
        return Verdict("not judged", "the two have no prompt in common", tolerance, prompts_missing=missing)
    divergences = {prompt: _divergence(reference.tokens[prompt], candidate.tokens[prompt]) for prompt in prompts}
    first = next(((prompt, at) for prompt, at in divergences.items() if at is not None), None)
    difference, relative = _logits(reference.logits, candidate.logits)
    nll = _nll(reference.nll, candidate.nll)
    verdict = Verdict(
        word="not judged",
        reason="",
        tolerance=tolerance,
        prompts=len(prompts),
        prompts_equal=sum(at is None for at in divergences.values()),
        prompts_missing=missing,
        first_divergence=first,
        logit_difference=difference,
        logit_relative=relative,
        nll_mean=nll[0] if nll else None,
        nll_p99=nll[1] if nll else None,
        perplexity_reference=nll[2] if nll else None,
        perplexity_candidate=nll[3] if nll else None,
    )
    word, reason = _word(verdict)
    return Verdict(**{**vars(verdict), "word": word, "reason": reason})


def _divergence(reference: Column, candidate: Column) -> int | None:
    """The first position that differs; one that is there on one side only differs too."""
    length = min(len(reference), len(candidate))
    unequal = np.flatnonzero(reference[:length] != candidate[:length])
    if len(unequal):
        return int(unequal[0])
    return None if len(reference) == len(candidate) else length


def _logits(reference: dict[int, Floats], candidate: dict[int, Floats]) -> tuple[float | None, float | None]:
    """Largest absolute difference, and that over the reference's largest magnitude. Unequal shapes give NaN."""
    prompts = sorted(set(reference) & set(candidate))
    if not prompts:
        return None, None
    if any(reference[prompt].shape != candidate[prompt].shape for prompt in prompts):
        return math.nan, math.nan
    with np.errstate(invalid="ignore"):  # infinities of a broken model: their difference is NaN, which never passes
        difference = float(np.max([np.max(np.abs(reference[prompt] - candidate[prompt])) for prompt in prompts]))
    largest = float(np.max([np.max(np.abs(reference[prompt])) for prompt in prompts]))
    return difference, difference / largest if largest else difference


def _nll(reference: dict[int, Floats], candidate: dict[int, Floats]) -> tuple[float, float, float, float] | None:
    """Mean and p99 of the absolute difference, and both perplexities. Unequal shapes give NaN."""
    prompts = sorted(set(reference) & set(candidate))
    if not prompts:
        return None
    if any(reference[prompt].shape != candidate[prompt].shape for prompt in prompts):
        return math.nan, math.nan, math.nan, math.nan
    ours = np.concatenate([candidate[prompt] for prompt in prompts])
    theirs = np.concatenate([reference[prompt] for prompt in prompts])
    # A broken model can be so wrong that exp overflows: infinite perplexity is the right word for it.
    with np.errstate(over="ignore", invalid="ignore"):
        change = np.abs(ours - theirs)
        perplexities = float(np.exp(np.mean(theirs))), float(np.exp(np.mean(ours)))
        return float(np.mean(change)), float(np.percentile(change, 99)), *perplexities


def _word(verdict: Verdict) -> tuple[Word, str]:
    """The word and, where it is not `equal`, why. Written with <= so that NaN never passes."""
    tolerance, change = verdict.tolerance, verdict.perplexity_change
    logits_fine = verdict.logit_relative is None or verdict.logit_relative <= tolerance.logits
    perplexity_fine = change is None or abs(change) <= tolerance.perplexity
    if verdict.prompts_missing:
        return "differs", f"{plural(verdict.prompts_missing, 'prompt')} of the reference were not answered"
    if not logits_fine:
        return "differs", f"logits are off by more than {number(tolerance.logits, 1)} of the largest"
    if not perplexity_fine:
        return "differs", f"perplexity is off by more than {percent(tolerance.perplexity, 1)}"
    if verdict.prompts_equal == verdict.prompts:
        return "equal", ""
    if verdict.logit_relative is None and change is None:
        return "differs", "tokens differ, and there is neither a logit nor a likelihood to explain it as noise"
    return (
        "agrees",
        "tokens differ where rounding decides between near ties; logits and perplexity are within tolerance",
    )


def judge_experiment(study: StudyResult, experiment: PlannedExperiment) -> tuple[CellResult, list[Judged]]:
    """The reference cell, and every candidate judged against it."""
    assert experiment.points, f"experiment {experiment.name} has no points"
    named = next((point for point in experiment.points if point.baseline), experiment.points[0])
    base = study.cells[named.cell]
    reference = _read_answers(study, base)
    judged = []
    for point in experiment.points:
        if point is named:
            continue
        result = study.cells[point.cell]
        candidate = _read_answers(study, result)
        if reference is None or candidate is None:
            lacking = base if reference is None else result
            who = "the reference" if reference is None else "the cell"
            verdict = Verdict("not judged", f"{who} has no answers ({_state(lacking)})", TOLERANCES[result.cell.dtype])
        else:
            verdict = judge(reference, candidate, result.cell.dtype)
        judged.append(Judged(point.label, result, verdict))
    return base, judged


def _state(result: CellResult) -> str:
    return result.status.replace("_", " ")


def _first_completed(result: CellResult) -> Reading | None:
    return result.completed[min(result.completed)] if result.completed else None


def _read_answers(study: StudyResult, result: CellResult) -> Answers | None:
    """Answers of the first completed repeat (they are deterministic); None where there is none."""
    reading = _first_completed(result)
    if reading is None:
        return None
    path = (study.folder / reading.path).with_suffix(".npz")
    vocabulary = reading.figure("answer_vocabulary")
    samples = read_samples(path, ANSWER_COLUMNS)
    if not samples:
        return None
    try:
        return answers_of(samples, None if vocabulary is None else int(vocabulary))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def correctness_table(judged: list[Judged]) -> Table:
    """One row for each candidate."""
    return Table(
        (
            "answers of",
            "verdict",
            "prompts with every token equal",
            "first divergence",
            "largest logit difference",
            "over the largest logit",
            "mean change of likelihood, nats",
            "p99 of it",
            "perplexity, reference",
            "perplexity, here",
            "change",
        ),
        tuple(_row(item) for item in judged),
        text_columns=2,
    ).without_empty_columns()


def _row(item: Judged) -> tuple[str, ...]:
    verdict = item.verdict
    first = verdict.first_divergence
    return (
        escaped(item.label),
        f"**{verdict.word}**" + (f": {verdict.reason}" if verdict.reason else ""),
        f"{verdict.prompts_equal} of {verdict.prompts}" if verdict.prompts else UNKNOWN,
        UNKNOWN if first is None else f"prompt {first[0]}, token {first[1]}",
        number(verdict.logit_difference),
        number(verdict.logit_relative),
        number(verdict.nll_mean),
        number(verdict.nll_p99),
        number(verdict.perplexity_reference, 5),
        number(verdict.perplexity_candidate, 5),
        percent(verdict.perplexity_change),
    )


def tolerance_table() -> Table:
    """The thresholds in force."""
    rows = tuple((dtype, number(limit.logits, 1), percent(limit.perplexity, 1)) for dtype, limit in TOLERANCES.items())
    return Table(("dtype of the cell", "logits, over the largest", "perplexity"), rows)


def completions_table(study: StudyResult, base: CellResult, judged: list[Judged], count: int = 2) -> Table | None:
    """The first completions side by side, where the cells kept their texts."""
    columns = [("transformers" if base.cell.engine == "transformers" else base.name, _completions(study, base))]
    columns += [(item.label, _completions(study, item.result)) for item in judged]
    columns = [(label, texts) for label, texts in columns if texts]
    if len(columns) < 2:
        return None
    shared = sorted(set.intersection(*(set(texts) for _, texts in columns)))[:count]
    rows = tuple((str(prompt), *(escaped(shortened(texts[prompt], 240)) for _, texts in columns)) for prompt in shared)
    return (
        Table(("prompt", *(escaped(label) for label, _ in columns)), rows, text_columns=len(columns) + 1)
        if rows
        else None
    )


def _completions(study: StudyResult, result: CellResult) -> dict[int, str]:
    """Generated text by prompt, from the lines that ranks left beside the record."""
    reading = _first_completed(result)
    if reading is None:
        return {}
    path = study.folder / reading.path
    assert isinstance(result.cell.workload, GenerateWorkload)
    texts: dict[int, str] = {}
    for file in sorted(path.parent.glob(f"{path.stem}.completions_rank_*.jsonl")):
        texts |= _lines(file)
    return texts


def _lines(file: Path) -> dict[int, str]:
    texts = {}
    for position, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        try:
            data = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}: line {position + 1} is not JSON ({error})") from error
        texts[int(data["prompt_index"])] = str(data["completion"])
    return texts
