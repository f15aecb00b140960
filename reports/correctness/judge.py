"""Verdict on a cell's answers: noise or defect.

    verdict = judge(reference, candidate, noise)

The noise is what the order of reduction changes in the reference's own model (engine/correctness/noise.py). Every
statistic of `correctness_statistics` is taken of the candidate, and of each order of the noise by the other orders; the
candidate may exceed the largest of those by their spread, and by the freedom that a correct program has.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from configs.common.arrays import Floats, Ints
from reports.correctness.data import Answers, ReductionNoise
from reports.correctness.ladder import EmbeddingLadder, Ladder, ladder_of, noise_ladder
from reports.correctness.statistics import (
    LOGITS,
    Errors,
    Names,
    Statistic,
    by_chance,
    candidate_errors,
    noise_errors,
    statistics,
)
from reports.text import number, plural

CorrectnessWord = Literal["agrees", "defect", "not judged"]

FREEDOM = 2.0
"""A correct program may round in other places than the one that the noise was measured with; that much is allowed."""

LEAST_ORDERS = 3
_MOST_SPREAD = 3.0
_LEAST_ERRORS = 2.75  # standard errors of a mean, whatever few orders of noise say


@dataclass(frozen=True)
class Finding:
    """A statistic and its limit, both in units of noise."""

    name: str
    statistic: Statistic
    limit: float

    @property
    def limited(self) -> bool:
        """Whether the noise gives a limit: zero or non-finite noise gives none."""
        return math.isfinite(self.limit) and self.limit > 0

    @property
    def excess(self) -> float:
        """How many times the limit, which there is; infinite for what is no number."""
        return self.statistic.value / self.limit if math.isfinite(self.statistic.value) else math.inf

    def __str__(self) -> str:
        at = "" if self.statistic.prompt is None else f" (prompt {self.statistic.prompt}"
        at += "" if self.statistic.position is None else f", position {self.statistic.position}"
        value = number(self.statistic.value, 2) if math.isfinite(self.statistic.value) else "no number of"
        return f"{self.name}: {value} times the noise, at most {number(self.limit, 2)} expected{at + ')' if at else ''}"


@dataclass(frozen=True)
class CorrectnessVerdict:
    """The comparison of a candidate with its reference.

    findings: the statistics that exceed their limits, the worst first; nearest: the worst of all. ladder: the
    candidate against the reference; noise: the largest of the same figures of the noise; of an encoder's embeddings:
    encoded and encoded_noise. in_float32: the word of the same cell in float32, where there is one.
    """

    word: CorrectnessWord
    reason: str
    in_float32: CorrectnessWord | None = None
    findings: tuple[Finding, ...] = ()
    nearest: Finding | None = None
    ladder: Ladder | None = None
    noise: Ladder | None = None
    encoded: EmbeddingLadder | None = None
    encoded_noise: EmbeddingLadder | None = None

    @property
    def perplexity_candidate(self) -> float | None:
        """The cell's own perplexity on the prompts."""
        return None if self.ladder is None else self.ladder.perplexity_reference + self.ladder.perplexity_difference


def judge_answers(
    reference: Answers, candidate: Answers, noise: ReductionNoise | None, own_stack: bool = False
) -> CorrectnessVerdict:
    """Compare answers; `noise` is of the candidate's dtype.

    own_stack: decoded tokens have positions of their own, after the decoder's first token, and not after the prompt.
    """
    if not reference.prefill.logits:
        return CorrectnessVerdict("not judged", "the reference kept no logits")
    if not reference.prefill.nll:
        return CorrectnessVerdict("not judged", "every prompt is a single token, which has no likelihood")
    strange = _not_finite(reference)
    if strange is not None:
        return CorrectnessVerdict("not judged", f"the reference's logits of prompt {strange} are not finite")
    if noise is None or noise.orders < LEAST_ORDERS:
        return not_judged(None if noise is None else noise.orders)
    broken = _broken(reference, candidate)
    if broken:
        return CorrectnessVerdict("defect", broken)
    orders = noise_errors(reference, noise)
    prefill = candidate_errors(reference.prefill, candidate.prefill)
    cached = candidate_errors(reference.prefill, candidate.cached)
    if not len(prefill.rms):
        return CorrectnessVerdict("not judged", "the cell kept no logits at the reference's positions")
    freedom = freedom_of(noise.chain)
    found = compared(prefill, orders, "", freedom) + compared(cached, orders, " through the cache", freedom)
    return replace(
        verdict_of([*found, *_tokens(reference, candidate, noise, freedom, own_stack)]),
        ladder=ladder_of(reference, candidate, prefill, cached),
        noise=noise_ladder(reference, noise, orders),
    )


def not_judged(orders: int | None) -> CorrectnessVerdict:
    """The word where the noise was measured in so few orders, or for None not at all."""
    reason = "the reference measured no noise of this dtype"
    if orders is not None:
        reason = f"noise was measured in fewer than {LEAST_ORDERS} orders"
    return CorrectnessVerdict("not judged", reason)


def verdict_of(found: list[Finding]) -> CorrectnessVerdict:
    """The word on statistics with their limits: a defect where one exceeds its own.

    Not judged where a difference has no limit, because the noise of that statistic is zero or not finite.
    """
    limited = sorted((finding for finding in found if finding.limited), key=lambda finding: -finding.excess)
    findings = tuple(finding for finding in limited if finding.excess > 1)
    nearest = limited[0] if limited else None
    if findings:
        return CorrectnessVerdict("defect", str(findings[0]), findings=findings, nearest=nearest)
    without = [finding for finding in found if not finding.limited and (finding.statistic.value or not limited)]
    if without:
        noise = "zero" if without[0].limit == 0 else "not finite"
        reason = f"{without[0].name}: the noise of the reference is {noise}, so a difference cannot be judged by it"
        return CorrectnessVerdict("not judged", reason, nearest=nearest)
    return CorrectnessVerdict("agrees", "", nearest=nearest)


def _broken(reference: Answers, candidate: Answers) -> str:
    """What is wrong without any measure of noise."""
    missing = [prompt for prompt in reference.tokens if prompt not in candidate.tokens]
    missing += [prompt for prompt in reference.prefill.nll if prompt not in candidate.prefill.nll]
    if missing:
        return f"no answer to {plural(len(set(missing)), 'prompt')} of the reference"
    if candidate.unequal:
        return f"ranks of a replica answer prompt {candidate.unequal[0]} with different tokens"
    for prompt, nll in reference.prefill.nll.items():
        if len(candidate.prefill.nll[prompt]) != len(nll):
            return f"prompt {prompt} has other tokens than the reference's"
    for prompt, tokens in reference.tokens.items():
        if len(candidate.tokens[prompt]) != len(tokens):
            return f"prompt {prompt} was answered with {len(candidate.tokens[prompt])} tokens, not {len(tokens)}"
    strange = _not_finite(candidate)
    return "" if strange is None else f"prompt {strange} has logits that are not finite"


def _not_finite(answers: Answers) -> int | None:
    """The first prompt with logits or likelihoods that are NaN or infinite."""
    for scored in (answers.prefill, answers.cached):
        for values in (scored.nll, scored.logits):
            for prompt, array in values.items():
                if not np.isfinite(array).all():
                    return prompt
    return None


def compared(own: Errors, orders: list[Errors], where: str, freedom: float, names: Names = LOGITS) -> list[Finding]:
    """The statistics of `own` with their limits."""
    same = [order.at(own) for order in orders]
    found = statistics(own, same, names)
    usual = [statistics(order, [*same[:place], *same[place + 1 :]], names) for place, order in enumerate(same)]
    findings = []
    for name, statistic in found.items():
        limit = limit_of(np.array([each[name].value for each in usual]), freedom)
        if name.startswith("mean"):
            limit = max(limit, freedom * _LEAST_ERRORS)
        if statistic.members is not None:
            limit = max(limit, freedom * by_chance(statistic.members))
        findings.append(Finding(name + where, statistic, limit))
    return findings


def freedom_of(chain: Floats) -> float:
    """How much more noise a correct program may have: where it rounds, and how long its sums' chains are."""
    return FREEDOM * max(1.0, float(chain.max()))


def limit_of(usual: Floats, freedom: float) -> float:
    """The most that a statistic may be, from what it is of the orders of the noise."""
    spread = min(float(usual.max() / usual.min()), _MOST_SPREAD) if usual.min() > 0 else _MOST_SPREAD
    return freedom * spread * float(usual.max())


def _tokens(
    reference: Answers, candidate: Answers, noise: ReductionNoise, freedom: float, own_stack: bool
) -> list[Finding]:
    """Decoded tokens that are not the most likely ones, by more than noise: by the reference, and by the cell itself.

    Leads are in units of the prompt's noise of leads; the limit is from the largest of those.
    """
    units = {prompt: float(np.sqrt(np.mean(each**2))) for prompt, each in noise.gaps.items() if each.size}
    if not units:
        return []
    floor = 1e-3 * float(np.mean(list(units.values()))) + float(np.finfo(np.float32).eps)
    usual = [_largest_lead(noise, order, floor) for order in range(noise.orders)]
    limit = math.sqrt(2) * limit_of(np.array(usual), freedom)  # two computations meet here, each with its noise
    worst: dict[str, Statistic] = {}

    def note(name: str, value: float, prompt: int, position: int) -> None:
        if name not in worst or not value <= worst[name].value:
            worst[name] = Statistic(value, prompt, position)

    for prompt, unit in units.items():
        start = 1 if own_stack else len(reference.prefill.nll.get(prompt, ())) + 1
        at = divergence(reference.tokens[prompt], candidate.tokens[prompt])
        if at is not None:
            lead = reference_lead(reference, prompt, at, int(candidate.tokens[prompt][at]))
            note("lead of the reference's token", lead / (unit + floor), prompt, start + at)
        for place, gap in enumerate(candidate.gaps.get(prompt, ())):
            note("lead over the decoded token", float(gap) / (unit + floor), prompt, start + place)
    return [Finding(name, found, limit) for name, found in worst.items()]


def _largest_lead(noise: ReductionNoise, order: int, floor: float) -> float:
    found = []
    for gaps in noise.gaps.values():
        if gaps.size:
            others = np.delete(gaps, order, axis=0)
            found.append(float(np.abs(gaps[order]).max()) / (float(np.sqrt(np.mean(others**2))) + floor))
    return max(found)


def divergence(reference: Ints, candidate: Ints) -> int | None:
    """The first place at which two rows of tokens of equal length differ."""
    unequal = np.flatnonzero(reference != candidate)
    return int(unequal[0]) if len(unequal) else None


def reference_lead(reference: Answers, prompt: int, at: int, token: int) -> float:
    """By how much the reference's largest logit exceeds that of `token` there; of one not kept, at least so much."""
    top = reference.top_tokens[prompt][at]
    place = np.flatnonzero(top == token)
    logits = reference.top_logits[prompt][at]
    return float(logits[0] - (logits[place[0]] if len(place) else logits[-1]))
