"""The correctness section: compare each cell's answers with those of unmodified transformers.

    base, judged = judge_experiment(study, experiment)
    print(correctness_table(judged).markdown())

The verdict is `correctness_judge`'s: noise of the order of reduction, or a defect. In 16 bits that noise is large
enough to hide small defects, so the same layout is judged in float32 too, and a cell whose float32 twin is a defect
is one itself.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from configs.common.execution import Dtype
from configs.common.files.reading import TEXT_BYTES, parse_json, read_bytes
from configs.common.printable import printable, shortened
from configs.plans.plan import PlannedExperiment
from configs.records.rates import Column
from configs.records.samples import read_samples
from configs.spec.cell import Cell
from reports.correctness.data import ANSWER_COLUMNS, Answers, ReductionNoise, answers_of, noise_columns, noise_of
from reports.correctness.embeddings import (
    EMBEDDING_COLUMNS,
    EmbeddingNoise,
    Embeddings,
    embedding_noise_columns,
    embedding_noise_of,
    embeddings_of,
)
from reports.correctness.embeddings_judge import judge_embeddings
from reports.correctness.judge import CorrectnessVerdict, judge_answers
from reports.correctness.ladder import EmbeddingLadder, Ladder
from reports.correctness.reach import Reach, reach_of
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.text import UNKNOWN, Table, escaped, number, percent

FIGURES = (
    "prompts with every token equal",
    "first divergence",
    "largest logit difference",
    "over the spread of the logits",
    "the same through the cache",
    "KL mean, nats",
    "KL p99, nats",
    "same most likely token",
    "perplexity of the reference",
    "perplexity difference",
)
EMBEDDING_FIGURES = (
    "prompts",
    "largest state difference",
    "over the size of the state",
    "largest embedding difference",
    "cosine distance, mean",
    "cosine distance of the worst embedding",
    "same nearest prompt",
)


_WITH_NOISE = {
    *FIGURES[2:8],
    "perplexity difference",
    *EMBEDDING_FIGURES[1:6],
}
"""Figures that have the noise in parentheses, which stand for an interval in all other tables."""
_UNFIT = (ValueError, IndexError)
"""What arrays raise that do not fit each other: a damaged archive, or one of another program."""


@dataclass(frozen=True)
class JudgedCell:
    """One candidate cell and its verdict. reach: what was compared; None: the cell has no answers."""

    label: str
    result: CellResult
    verdict: CorrectnessVerdict
    reach: Reach | None = None


@dataclass(frozen=True)
class _Reference:
    """The reference's answers, and its noise by dtype: of logits, or of an encoder."""

    answers: Answers | Embeddings
    logits: dict[Dtype, ReductionNoise | None]
    states: dict[Dtype, EmbeddingNoise | None]

    def verdict(self, answers: Answers | Embeddings, of: CellResult) -> CorrectnessVerdict:
        """Of a cell's answers."""
        dtype = of.cell.dtype
        if isinstance(self.answers, Embeddings):
            assert isinstance(answers, Embeddings)
            return judge_embeddings(self.answers, answers, self.states[dtype])
        assert isinstance(answers, Answers)
        own_stack = of.kind.model_form == "encoder_decoder"
        return judge_answers(self.answers, answers, self.logits[dtype], own_stack)


def judge_experiment(study: StudyResult, experiment: PlannedExperiment) -> tuple[CellResult, list[JudgedCell]]:
    """The reference cell, and every candidate judged against it."""
    assert experiment.points, f"experiment {experiment.name} has no points"
    named = next((point for point in experiment.points if point.baseline), experiment.points[0])
    base = study.cells[named.cell]
    candidates = [(point.label, study.cells[point.cell]) for point in experiment.points if point is not named]
    dtypes = list(dict.fromkeys(result.cell.dtype for _, result in candidates))
    try:
        reference = _read_reference(study, base, dtypes)
    except _UNFIT as error:
        why = f"the reference's answers cannot be read: {printable(str(error), 200)}"
        return base, [JudgedCell(label, of, CorrectnessVerdict("not judged", why)) for label, of in candidates]
    judged = [_judged(study, base, reference, label, result) for label, result in candidates]
    words = {item.result.cell.key: item.verdict for item in judged}
    return base, [replace(item, verdict=_with_twin(item, words.get(_twin(item.result).key))) for item in judged]


def _judged(
    study: StudyResult, base: CellResult, reference: _Reference | None, label: str, of: CellResult
) -> JudgedCell:
    if reference is None:
        return JudgedCell(label, of, CorrectnessVerdict("not judged", f"the reference has no answers ({_state(base)})"))
    try:
        answers = _answers(study, of)
        if answers is None:
            return JudgedCell(label, of, CorrectnessVerdict("not judged", f"the cell has no answers ({_state(of)})"))
        return JudgedCell(label, of, reference.verdict(answers, of), reach_of(study, of, answers))
    except _UNFIT as error:
        why = f"the answers cannot be compared: {printable(str(error), 200)}"
        return JudgedCell(label, of, CorrectnessVerdict("not judged", why))


def _twin(result: CellResult) -> Cell:
    """The same cell in float32."""
    return result.cell.model_copy(update={"dtype": "float32"})


def _with_twin(item: JudgedCell, twin: CorrectnessVerdict | None) -> CorrectnessVerdict:
    """The verdict, with what that of the same cell in float32 adds."""
    verdict = item.verdict
    if item.result.cell.dtype == "float32" or twin is None:
        return verdict
    verdict = replace(verdict, in_float32=twin.word)
    if verdict.word == "agrees" and twin.word == "defect":
        return replace(verdict, word="defect", reason=f"the same in float32 is a defect: {twin.reason}")
    return verdict


def _state(result: CellResult) -> str:
    return result.status.replace("_", " ")


def _first_completed(result: CellResult) -> Reading | None:
    return result.completed[min(result.completed)] if result.completed else None


def _read(study: StudyResult, result: CellResult, columns: tuple[str, ...]) -> dict[str, Column] | None:
    """Columns of the first completed repeat (answers are deterministic); None where there is none."""
    reading = _first_completed(result)
    return (read_samples(_samples_path(study, reading), columns) or None) if reading is not None else None


def _samples_path(study: StudyResult, reading: Reading) -> Path:
    return (study.folder / reading.path).with_suffix(".npz")


def _answers(study: StudyResult, result: CellResult) -> Answers | Embeddings | None:
    encodes = result.kind.answers == "vectors"
    samples = _read(study, result, EMBEDDING_COLUMNS if encodes else ANSWER_COLUMNS)
    if samples is None:
        return None
    reading = _first_completed(result)
    assert reading is not None
    vocabulary = reading.figure("answer_vocabulary")
    try:
        return (
            embeddings_of(samples) if encodes else answers_of(samples, None if vocabulary is None else int(vocabulary))
        )
    except ValueError as error:
        raise ValueError(f"{_samples_path(study, reading)}: {error}") from error


def _read_reference(study: StudyResult, base: CellResult, dtypes: list[Dtype]) -> _Reference | None:
    answers = _answers(study, base)
    if answers is None:
        return None
    if isinstance(answers, Embeddings):
        wanted = tuple(name for dtype in dtypes for name in embedding_noise_columns(dtype))
        samples = _read(study, base, wanted) or {}
        return _Reference(answers, {}, {dtype: embedding_noise_of(samples, answers, dtype) for dtype in dtypes})
    wanted = tuple(name for dtype in dtypes for name in noise_columns(dtype))
    samples = _read(study, base, wanted) or {}
    return _Reference(answers, {dtype: noise_of(samples, answers, dtype) for dtype in dtypes}, {})


def reference_sentence(base: CellResult) -> str:
    """Where the reference's answers come from: this run, a saved file, or a model larger than the memory."""
    reading = _first_completed(base)
    figures = {} if reading is None else reading.record.figures
    if "reference_file" in figures:
        return (
            f"The reference was saved before, in {figures['reference_file']}, from {figures['reference_model']}: "
            "unmodified transformers on one rank in float32."
        )
    sentence = f"The reference is {base.name}: unmodified, in a launch of its own."
    placed = figures.get("reference_placement", "in memory")
    return sentence if placed == "in memory" else f"{sentence} Its weights exceed the memory: {placed}."


def correctness_table(judged: list[JudgedCell]) -> Table:
    """One row for each candidate, the noise in parentheses beside each figure."""
    encodes = any(item.result.kind.answers == "vectors" for item in judged)
    figures = EMBEDDING_FIGURES if encodes else FIGURES
    rows = tuple(_row(item, len(figures)) for item in judged)
    titles = (f"{name} (noise)" if name in _WITH_NOISE else name for name in figures)
    return Table(("answers of", "verdict", *titles), rows, text_columns=2).without_empty_columns()


def verdict_text(verdict: CorrectnessVerdict) -> str:
    """Word and reason, with the word of the float32 twin."""
    parts = [verdict.reason] if verdict.reason else []
    if verdict.in_float32 is not None and not verdict.reason.startswith("the same in float32"):
        parts.append(f"in float32: {verdict.in_float32}")
    return f"**{verdict.word}**" + (f": {escaped('; '.join(parts))}" if parts else "")


def _row(item: JudgedCell, count: int) -> tuple[str, ...]:
    figures = tuple(_named_figures(item.verdict).values()) or (UNKNOWN,) * count
    missed = item.reach.missed_text if item.reach is not None else ""
    verdict = verdict_text(item.verdict) + (f" {escaped(f'(not reached: {missed})')}" if missed else "")
    return (escaped(item.label), verdict, *figures)


def _named_figures(verdict: CorrectnessVerdict) -> dict[str, str]:
    """Name of each figure -> what it is; nothing where none could be taken."""
    if verdict.ladder is not None and verdict.noise is not None:
        return dict(zip(FIGURES, _figures(verdict.ladder, verdict.noise), strict=True))
    if verdict.encoded is not None and verdict.encoded_noise is not None:
        return dict(zip(EMBEDDING_FIGURES, _embedding_figures(verdict.encoded, verdict.encoded_noise), strict=True))
    return {}


def _embedding_figures(own: EmbeddingLadder, noise: EmbeddingLadder) -> tuple[str, ...]:
    return (
        str(own.prompts),
        _beside(number(own.state_difference), number(noise.state_difference)),
        _beside(number(own.state_relative), number(noise.state_relative)),
        _beside(number(own.vector_difference), number(noise.vector_difference)),
        _beside(number(own.cosine_mean), number(noise.cosine_mean)),
        _beside(number(own.cosine_worst), number(noise.cosine_worst)),
        UNKNOWN if own.same_nearest is None else percent(own.same_nearest),
    )


def _figures(own: Ladder, noise: Ladder) -> tuple[str, ...]:
    return (
        f"{own.prompts_equal} of {own.prompts}",
        _divergence(own),
        _beside(number(own.logit_difference), number(noise.logit_difference)),
        _beside(number(own.logit_relative), number(noise.logit_relative)),
        UNKNOWN if own.cached_relative is None else _beside(number(own.cached_relative), number(noise.logit_relative)),
        _beside(number(own.kl_mean), number(noise.kl_mean)),
        _beside(number(own.kl_p99), number(noise.kl_p99)),
        _beside(percent(own.top1), percent(noise.top1)),
        number(own.perplexity_reference, 5),
        _beside(_difference(own), number(noise.perplexity_difference)),
    )


def _beside(figure: str, noise: str) -> str:
    return f"{figure} ({noise})"


def _difference(own: Ladder) -> str:
    error = "" if own.perplexity_error is None else f" ± {number(own.perplexity_error, 2)}"
    return number(own.perplexity_difference) + error


def _divergence(own: Ladder) -> str:
    if own.first_divergence is None:
        return UNKNOWN
    prompt, token = own.first_divergence
    return f"prompt {prompt}, token {token}, margin {number(own.margin)}"


def ladder_lines(verdict: CorrectnessVerdict) -> list[str]:
    """The figures as lines of text, the noise beside each; nothing where none could be taken."""
    return [f"{name}: {figure}" for name, figure in _named_figures(verdict).items() if figure != UNKNOWN]


def completions_table(study: StudyResult, base: CellResult, judged: list[JudgedCell], count: int = 2) -> Table | None:
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
    texts: dict[int, str] = {}
    for file in sorted(path.parent.glob(f"{path.stem}.completions_rank_*.jsonl")):
        texts |= _lines(file)
    return texts


def _lines(file: Path) -> dict[int, str]:
    """Examples for people: of a damaged file what can be read."""
    texts = {}
    with suppress(OSError, ValueError):
        for line in read_bytes(file, TEXT_BYTES).splitlines():
            with suppress(ValueError, TypeError, KeyError):
                data = parse_json(line, file.name)
                texts[int(data["prompt_index"])] = str(data["completion"])
    return texts
