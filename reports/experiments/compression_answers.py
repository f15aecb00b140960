"""Answers of compressed models relative to the uncompressed model: text by the ladder, embeddings by angle.

quality = quality_of(study, uncompressed, compressed)      # None where either has no answers
quality.loss, quality.text()                               # 0.0012, "+0.12 % perplexity (± 0.03 %)"
"""

from dataclasses import dataclass
from math import isfinite

import numpy as np

from configs.common.arrays import Floats
from configs.common.differences import vector_differences
from reports.correctness.data import ANSWER_COLUMNS, Answers, answers_of
from reports.correctness.ladder import Ladder, ladder_of
from reports.correctness.statistics import candidate_errors
from reports.reading.load import CellResult, StudyResult
from reports.text import UNKNOWN, number, percent

VECTOR_COLUMNS = ("answer_prompts", "answer_vectors")


@dataclass(frozen=True)
class Quality:
    """One of the two is there. cosine: 1 less the cosine of the angle between the embeddings, by prompt."""

    ladder: Ladder | None = None
    cosine: Floats | None = None

    @property
    def loss(self) -> float:
        """Relative change of perplexity (below 0 it is better), or the mean cosine distance."""
        if self.ladder is None:
            assert self.cosine is not None
            return float(self.cosine.mean())
        return self.ladder.perplexity_difference / self.ladder.perplexity_reference

    @property
    def finite(self) -> bool:
        """Whether the loss is a number: not so where logits or embeddings are not finite."""
        return isfinite(self.loss)

    @property
    def error(self) -> float | None:
        """Standard error of the loss; prompts are the sample. None: unknown, or of vectors."""
        if self.ladder is None or self.ladder.perplexity_error is None:
            return None
        return self.ladder.perplexity_error / self.ladder.perplexity_reference

    def text(self) -> str:
        """`+0.12 % perplexity (± 0.03 %)`, or `a cosine distance of 0.0021`."""
        if self.ladder is None:
            return f"a cosine distance of {number(self.loss)}"
        return f"{_signed(self.loss)} perplexity" + ("" if self.error is None else f" (± {percent(self.error, 2)})")

    def cells(self) -> tuple[str, ...]:
        """Perplexity, its change, KL mean and p99, same most likely token, first divergence; cosine mean and worst."""
        own = self.ladder
        if not self.finite:
            return ("not finite", *(UNKNOWN,) * 7) if own else (*(UNKNOWN,) * 6, "not finite", UNKNOWN)
        if own is None:
            assert self.cosine is not None
            return (*(UNKNOWN,) * 6, number(float(self.cosine.mean())), number(float(self.cosine.max())))
        error = "" if self.error is None else f" ± {percent(self.error, 2)}"
        apart = "none"
        if own.first_divergence is not None:
            apart = "prompt {}, token {}".format(*own.first_divergence)
        return (
            number(own.perplexity_reference + own.perplexity_difference, 4),
            f"{_signed(self.loss)}{error}",
            number(own.kl_mean),
            number(own.kl_p99),
            percent(own.top1),
            apart,
            UNKNOWN,
            UNKNOWN,
        )


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else ''}{percent(share)}"


def quality_of(study: StudyResult, base: CellResult | None, own: CellResult | None) -> Quality | None:
    """The answers of one cell against another's; None where one has none, or none of the same prompts."""
    if base is None or own is None or not base.completed or not own.completed:
        return None
    if base.kind.answers == "vectors":
        known, found = _vectors(study, base), _vectors(study, own)
        shared = sorted(known.keys() & found.keys())
        if not shared:
            return None
        pair = (np.stack([vectors[prompt] for prompt in shared]) for vectors in (known, found))
        return Quality(cosine=vector_differences(*pair).cosine)
    reference, candidate = _answers(study, base), _answers(study, own)
    if reference is None or candidate is None or reference.tokens.keys() - candidate.tokens.keys():
        return None
    prefill = candidate_errors(reference.prefill, candidate.prefill)
    if not len(prefill.rms) or not len(prefill.nll):
        return None
    return Quality(ladder_of(reference, candidate, prefill, candidate_errors(reference.prefill, candidate.cached)))


def _answers(study: StudyResult, result: CellResult) -> Answers | None:
    """Of the first completed repeat: answers are deterministic."""
    measurement = result.completed[min(result.completed)]
    samples, vocabulary = study.samples(measurement, ANSWER_COLUMNS), measurement.figure("answer_vocabulary")
    return answers_of(samples, None if vocabulary is None else int(vocabulary)) if samples else None


def _vectors(study: StudyResult, result: CellResult) -> dict[int, Floats]:
    """Embedding by prompt, [size]. Raises ValueError naming the file where columns do not fit each other."""
    measurement = result.completed[min(result.completed)]
    samples, found = study.samples(measurement, VECTOR_COLUMNS), {}
    for key, flat in samples.items():
        rank, _, name = key.partition("/")
        if name == "answer_vectors":
            prompts = samples.get(f"{rank}/answer_prompts", np.empty(0)).tolist()
            if not prompts or len(flat) % len(prompts):
                raise ValueError(
                    f"{measurement.path}: {key} has {len(flat)} values, no multiple of its {len(prompts)} prompts"
                )
            rows = np.asarray(flat, dtype=np.float64).reshape(len(prompts), -1)
            found.update({int(prompt): row for prompt, row in zip(prompts, rows, strict=True)})
    return found
