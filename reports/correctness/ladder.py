"""Figures shown with a verdict: the ladder from logits to text, of a candidate and of the noise."""

from dataclasses import dataclass, replace

import numpy as np

from reports.correctness.data import Answers, ReductionNoise
from reports.correctness.statistics import Errors

_LARGEST_EXPONENT = 700.0  # a broken model can be so wrong that exp overflows


@dataclass(frozen=True)
class Ladder:
    """How far answers are from the reference. None: not kept, or no such figure for noise.

    logit_difference: largest, after centring; logit_relative: the same over the spread of the row's logits;
    cached_relative: of rows through the cache. kl_mean, kl_p99: nats, teacher-forced. top1: share of rows with the
    same most likely token. perplexity_error: standard error of the difference, paired by prompt.
    first_divergence: prompt and generated token; margin: the reference's largest logit less its second there.
    """

    rows: int
    logit_difference: float
    logit_relative: float
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity_reference: float
    perplexity_difference: float
    perplexity_error: float | None
    cached_relative: float | None = None
    prompts: int | None = None
    prompts_equal: int | None = None
    first_divergence: tuple[int, int] | None = None
    margin: float | None = None


@dataclass(frozen=True)
class EmbeddingLadder:
    """How far an encoder's answers are from the reference. None: no such figure for noise.

    state_difference: largest, of the last hidden states that are kept; state_relative: the same over the root mean
    square of the state. vector_difference: largest, of embeddings. cosine_mean, cosine_worst: 1 less the cosine of the
    angle between an embedding and the reference's. same_nearest: share of prompts whose nearest other prompt (by
    cosine) is the same.
    """

    prompts: int
    state_difference: float
    state_relative: float
    vector_difference: float
    cosine_mean: float
    cosine_worst: float
    same_nearest: float | None = None


def ladder_of(reference: Answers, candidate: Answers, prefill: Errors, cached: Errors) -> Ladder:
    """Figures of a candidate whose errors these are."""
    prompts = sorted(reference.tokens)
    apart = {prompt: np.flatnonzero(reference.tokens[prompt] != candidate.tokens[prompt]) for prompt in prompts}
    first = next(((prompt, int(apart[prompt][0])) for prompt in prompts if len(apart[prompt])), None)
    same = [
        reference.prefill.logits[prompt][at == position].argmax()
        == candidate.prefill.logits[prompt][candidate.prefill.positions[prompt] == position].argmax()
        for prompt, at in reference.prefill.positions.items()
        if prompt in candidate.prefill.positions
        for position in np.intersect1d(at, candidate.prefill.positions[prompt])
    ]
    margin = None
    if first is not None and first[0] in reference.top_logits:
        top = reference.top_logits[first[0]][first[1]]
        margin = float(top[0] - top[1]) if len(top) > 1 else None
    return replace(
        _figures(reference, prefill, float(np.mean(same))),
        cached_relative=_relative(cached) if len(cached.rms) else None,
        prompts=len(prompts),
        prompts_equal=sum(not len(places) for places in apart.values()),
        first_divergence=first,
        margin=margin,
    )


def noise_ladder(reference: Answers, noise: ReductionNoise, orders: list[Errors]) -> Ladder:
    """The largest of each figure over the orders of the noise."""
    flips = np.concatenate(list(noise.flips.values()), axis=1).mean(axis=1)
    ladders = [_figures(reference, order, float(1 - share)) for order, share in zip(orders, flips, strict=True)]
    worst = max(ladders, key=lambda each: abs(each.perplexity_difference))
    return replace(
        worst,
        logit_difference=max(each.logit_difference for each in ladders),
        logit_relative=max(each.logit_relative for each in ladders),
        kl_mean=max(each.kl_mean for each in ladders),
        kl_p99=max(each.kl_p99 for each in ladders),
        top1=min(each.top1 for each in ladders),
    )


def _figures(reference: Answers, errors: Errors, top1: float) -> Ladder:
    """The figures that a candidate and an order of the noise have alike."""
    known = np.concatenate([reference.prefill.nll[prompt] for prompt in sorted(reference.prefill.nll)])
    perplexity = float(np.exp(min(float(known.mean()), _LARGEST_EXPONENT)))
    change = float(errors.nll.mean())
    return Ladder(
        rows=len(errors.rms),
        logit_difference=float(errors.largest.max()),
        logit_relative=_relative(errors),
        kl_mean=float(errors.kl.mean()),
        kl_p99=float(np.percentile(errors.kl, 99)),
        top1=top1,
        perplexity_reference=perplexity,
        perplexity_difference=perplexity * float(np.expm1(min(change, _LARGEST_EXPONENT))),
        perplexity_error=_perplexity_error(errors, perplexity),
    )


def _relative(errors: Errors) -> float:
    return float(np.max(errors.largest / np.maximum(errors.scale, np.finfo(np.float64).tiny)))


def _perplexity_error(errors: Errors, perplexity: float) -> float | None:
    """Standard error of the perplexity difference: prompts are the sample, their sums of changes the values."""
    mean = float(errors.nll.mean())
    groups = np.unique(errors.token_prompts)
    if len(groups) < 2:
        return None
    sums = np.array([np.sum(errors.nll[errors.token_prompts == prompt] - mean) for prompt in groups])
    variance = len(groups) / (len(groups) - 1) * float(np.sum(sums**2)) / len(errors.nll) ** 2
    return perplexity * float(np.exp(min(mean, _LARGEST_EXPONENT)) * np.sqrt(variance))
