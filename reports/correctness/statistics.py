"""Distances of answers from the reference, in units of the reference's measured noise.

    noise = noise_errors(reference, noise_of(...))       # one Errors for each order
    own = candidate_errors(reference, answers.prefill)
    found = statistics(own, [each.at(own) for each in noise])       # {"logits": Statistic(1.1), ...}

Each statistic shows another kind of defect: the level over everything, single prompts, single positions, parts of
a prompt, single words of the vocabulary, a bias of one sign. Taken of one order of the noise by the other orders,
each is about 1 or, where it is the largest of many, a few.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats, Ints
from configs.common.differences import RowDifferences, row_differences
from reports.correctness.data import Answers, ReductionNoise, Scored

_STEP = 2.0**-24  # relative rounding of float32, in which logits are kept: no noise is smaller
_FIRST = 3
_STRETCH = 16
_OWN_WEIGHT = 0.5  # of a token's own few orders against its prompt's, where its noise is estimated


@dataclass(frozen=True)
class Statistic:
    """A number in units of noise, and the prompt and position where it was found, if it is of one.

    members: of how many likelihoods it is the root mean square; few of them may be far off by chance. None: of many.
    """

    value: float
    prompt: int | None = None
    position: int | None = None
    members: int | None = None


@dataclass(frozen=True)
class Errors:
    """Distances from the reference by row of logits [R] and by token [N]; `scale` is the rows' own spread [R].

    nll is signed. columns: mean square by word, [vocabulary], or empty. Rows may be hidden states or embeddings too,
    then kl is the cosine distance, which is of the second order as well, or empty, and there are no tokens.
    """

    row_prompts: Ints
    row_positions: Ints
    scale: Floats
    rms: Floats
    largest: Floats
    kl: Floats
    columns: Floats
    token_prompts: Ints
    token_positions: Ints
    nll: Floats

    def at(self, other: "Errors") -> "Errors":
        """Only the points that `other` has too."""
        rows = _shared(self.row_prompts, self.row_positions, other.row_prompts, other.row_positions)
        tokens = _shared(self.token_prompts, self.token_positions, other.token_prompts, other.token_positions)
        return Errors(
            row_prompts=self.row_prompts[rows],
            row_positions=self.row_positions[rows],
            scale=self.scale[rows],
            rms=self.rms[rows],
            largest=self.largest[rows],
            kl=self.kl[rows] if len(self.kl) else self.kl,
            # A mean over rows stands for most of them only.
            columns=self.columns if 2 * rows.sum() > len(rows) else np.empty(0),
            token_prompts=self.token_prompts[tokens],
            token_positions=self.token_positions[tokens],
            nll=self.nll[tokens],
        )


def _shared(prompts: Ints, positions: Ints, other_prompts: Ints, other_positions: Ints) -> NDArray[np.bool_]:
    return np.isin(prompts << 32 | positions, other_prompts << 32 | other_positions)


def candidate_errors(reference: Scored, candidate: Scored) -> Errors:
    """Distances at the points that both have. Rows of unequal length, and values that are no numbers, give NaN."""
    rows = [_rows(reference, candidate, prompt) for prompt in sorted(reference.logits) if prompt in candidate.logits]
    found = [each.found for each in rows]
    prompts = [prompt for prompt in sorted(reference.nll) if prompt in candidate.nll]
    tokens = [_tokens(reference, candidate, prompt) for prompt in prompts]
    count = sum(len(each.at) for each in rows)
    columns = [each.found.columns * len(each.at) for each in rows]
    return Errors(
        row_prompts=_repeated([each.prompt for each in rows], [len(each.at) for each in rows]),
        row_positions=_joined([each.at for each in rows]).astype(np.int64),
        scale=_joined([each.scale for each in found]),
        rms=_joined([each.rms for each in found]),
        largest=_joined([each.largest for each in found]),
        kl=_joined([each.kl for each in found]),
        columns=sum(columns[1:], columns[0]) / count if count else np.zeros(1),
        token_prompts=_repeated(prompts, [len(at) for at, _ in tokens]),
        token_positions=_joined([at for at, _ in tokens]).astype(np.int64),
        nll=_joined([change for _, change in tokens]),
    )


def _repeated(values: list[int], times: list[int]) -> Ints:
    return np.repeat(np.array(values, dtype=np.int64), times)


def _joined(parts: Sequence[Floats | Ints]) -> Floats:
    return np.concatenate(parts).astype(np.float64) if parts else np.empty(0)


@dataclass(frozen=True)
class _PromptRows:
    """Rows of one prompt that both have: their positions and differences."""

    prompt: int
    at: Ints
    found: RowDifferences


def _rows(reference: Scored, candidate: Scored, prompt: int) -> _PromptRows:
    at, mine, theirs = np.intersect1d(reference.positions[prompt], candidate.positions[prompt], return_indices=True)
    one, two = reference.logits[prompt][mine], candidate.logits[prompt][theirs]
    if one.shape != two.shape:
        two = np.full_like(one, np.nan)
    return _PromptRows(prompt, at, row_differences(one, two))


def _tokens(reference: Scored, candidate: Scored, prompt: int) -> tuple[Ints, Floats]:
    at, mine, theirs = np.intersect1d(
        reference.nll_positions[prompt], candidate.nll_positions[prompt], return_indices=True
    )
    with np.errstate(invalid="ignore"):  # infinities of a broken model: their difference is NaN
        return at, candidate.nll[prompt][theirs] - reference.nll[prompt][mine]


def noise_errors(reference: Answers, noise: ReductionNoise) -> list[Errors]:
    """The reference's own distances from itself, one for each order of reduction."""
    own = candidate_errors(reference.prefill, reference.prefill)
    rows, tokens = sorted(reference.prefill.logits), sorted(reference.prefill.nll)
    return [
        replace(
            own,
            rms=_joined([noise.rms[prompt][order] for prompt in rows]),
            largest=_joined([noise.largest[prompt][order] for prompt in rows]),
            kl=_joined([noise.kl[prompt][order] for prompt in rows]),
            columns=noise.columns[order],
            nll=_joined([noise.nll[prompt][order] for prompt in tokens]),
        )
        for order in range(noise.orders)
    ]


@dataclass(frozen=True)
class Names:
    """What rows of numbers are called: all of them, one value, one column, their distance of the second order.

    by_position: whether a prompt has several rows.
    """

    rows: str
    single: str
    column: str
    divergence: str
    by_position: bool = True


LOGITS = Names("logits", "a single logit", "logits of a word", "divergence")
STATES = Names("states", "a single value of a state", "a channel of states", "directions of states")
EMBEDDINGS = Names(
    "embeddings", "a single value of an embedding", "a channel of embeddings", "directions", by_position=False
)


def statistics(own: Errors, others: list[Errors], names: Names = LOGITS) -> dict[str, Statistic]:
    """Every statistic that the points allow, of `own` in units of `others`, which have the same points."""
    found: dict[str, Statistic] = {}
    if len(own.rms):
        found |= dict(_of_rows(own, others, names))
    if len(own.nll):
        found |= dict(_of_tokens(own, others))
    return found


def _unit(others: list[Errors], name: str, least: Floats | float) -> Floats:
    """Root mean square over orders, and no less than what rounding the kept values gives."""
    squares = np.mean([getattr(each, name) ** 2 for each in others], axis=0)
    unit: Floats = np.sqrt(squares + np.asarray(least) ** 2)
    return unit


def _of_rows(own: Errors, others: list[Errors], names: Names) -> Iterator[tuple[str, Statistic]]:
    rows = names.rows
    floor = _STEP * own.scale + np.finfo(np.float64).tiny
    ratios = own.rms / _unit(others, "rms", floor)
    singles = own.largest / _unit(others, "largest", floor)
    yield f"typical {rows}", Statistic(float(np.median(ratios)))
    yield rows, Statistic(_rms(ratios))
    yield f"{rows} of a prompt", replace(_worst_group(ratios, own.row_prompts), members=None)
    single = _worst(singles, own.row_prompts, own.row_positions)
    yield names.single, single if names.by_position else replace(single, position=None)
    if names.by_position:
        yield f"{rows} at a position", _worst(ratios, own.row_prompts, own.row_positions)
    first = own.row_positions < _FIRST
    if names.by_position and first.any():
        yield f"{rows} at the first positions", Statistic(_rms(ratios[first]))
    if len(own.kl):
        divergence = np.mean([each.kl.mean() for each in others]) + float(np.mean(floor**2))
        yield names.divergence, Statistic(float(np.sqrt(np.abs(own.kl.mean()) / divergence)))
    if len(own.columns) and len(own.columns) == len(others[0].columns):
        known = np.mean([each.columns for each in others], axis=0)
        found = own.columns / (known + 0.1 * known.mean() + float(np.mean(floor**2)))
        yield names.column, Statistic(float(np.sqrt(found.max())))


def _of_tokens(own: Errors, others: list[Errors]) -> Iterator[tuple[str, Statistic]]:
    unit = _token_unit(own, others)
    ratios = np.abs(own.nll) / unit
    yield "likelihoods", Statistic(_rms(ratios), members=len(ratios))
    yield "typical likelihoods", Statistic(float(np.median(ratios)), members=-(-len(ratios) // 2))
    yield "likelihoods of a prompt", _worst_group(ratios, own.token_prompts)
    yield "likelihood of a token", replace(_worst(ratios, own.token_prompts, own.token_positions), members=1)
    stretches = own.token_prompts << 32 | own.token_positions // _STRETCH
    worst = _worst_group(ratios, stretches)
    assert worst.prompt is not None
    place = worst.prompt & 0xFFFFFFFF
    yield "likelihoods of a stretch", Statistic(worst.value, worst.prompt >> 32, place * _STRETCH, worst.members)
    shift = own.nll - np.mean([each.nll for each in others], axis=0)
    # Noise itself has a mean of the second order, as large as its divergence, which depends on where one rounds.
    second = float(np.mean(unit**2)) / 2
    yield "mean likelihood", Statistic(abs(float(shift.mean())) / (_rms(unit) / np.sqrt(len(shift)) + second))
    yield "mean likelihood of a prompt", _worst_mean(shift, unit, own.token_prompts)


def _token_unit(own: Errors, others: list[Errors]) -> Floats:
    """Noise of each token's likelihood: what its few orders show, together with its prompt's level."""
    squares = np.mean([each.nll**2 for each in others], axis=0)
    levels = np.empty_like(squares)
    for prompt in np.unique(own.token_prompts):
        mine = own.token_prompts == prompt
        levels[mine] = squares[mine].mean()
    scale = float(own.scale.mean()) if len(own.scale) else 1.0
    unit: Floats = np.sqrt(_OWN_WEIGHT * squares + (1 - _OWN_WEIGHT) * levels + (_STEP * max(scale, 1.0)) ** 2)
    return unit


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _worst(values: Floats, prompts: Ints, positions: Ints) -> Statistic:
    place = int(np.argmax(values))  # the first NaN, where there is one
    return Statistic(float(values[place]), int(prompts[place]), int(positions[place]))


def _worst_group(values: Floats, groups: Ints) -> Statistic:
    """The group whose root mean square is the furthest beyond what so few values reach by chance."""
    found = {int(group): (_rms(values[groups == group]), int(np.sum(groups == group))) for group in np.unique(groups)}
    worst = max(found, key=lambda group: found[group][0] / by_chance(found[group][1]))
    value, members = found[worst]
    return Statistic(value, worst, members=members)


def by_chance(members: int) -> float:
    """The root mean square that so many standard normal values exceed once in millions of times.

    Quantile of chi-squared at five standard deviations, by the approximation of Wilson and Hilferty.
    """
    part = 2 / (9 * members)
    return float((1 - part + 5 * part**0.5) ** 1.5)


def _worst_mean(shift: Floats, unit: Floats, prompts: Ints) -> Statistic:
    found = {}
    for prompt in np.unique(prompts).tolist():
        mine = prompts == prompt
        expected = _rms(unit[mine]) / np.sqrt(mine.sum()) + float(np.mean(unit[mine] ** 2)) / 2
        found[prompt] = abs(float(shift[mine].mean())) / expected
    worst = max(found, key=lambda prompt: found[prompt])
    return Statistic(found[worst], worst)
