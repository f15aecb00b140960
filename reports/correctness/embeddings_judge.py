"""Verdict on an encoder's hidden states and embeddings, analogous to `correctness_judge`.

verdict = judge_embeddings(reference, candidate, noise)
"""

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats, Ints
from configs.common.differences import VectorDifferences, vector_differences
from reports.correctness.embeddings import EmbeddingNoise, Embeddings
from reports.correctness.judge import LEAST_ORDERS, CorrectnessVerdict, compared, freedom_of, not_judged, verdict_of
from reports.correctness.ladder import EmbeddingLadder
from reports.correctness.statistics import EMBEDDINGS, STATES, Errors
from reports.text import plural

_MOST_NEIGHBOURS = 4096  # prompts among which the nearest is looked for
_TIE = 1e-6  # cosines that float32 cannot tell apart
_NONE = np.empty(0)
_NOWHERE: Ints = np.empty(0, dtype=np.int64)


def judge_embeddings(reference: Embeddings, candidate: Embeddings, noise: EmbeddingNoise | None) -> CorrectnessVerdict:
    """Compare answers; `noise` is of the candidate's dtype."""
    if not reference.states or not reference.vectors:
        return CorrectnessVerdict("not judged", "the reference kept no hidden states")
    for found in (reference.vectors, reference.states):
        strange = next((prompt for prompt, rows in found.items() if not np.isfinite(rows).all()), None)
        if strange is not None:
            return CorrectnessVerdict("not judged", f"the reference's states of prompt {strange} are not finite")
    if noise is None or noise.orders < LEAST_ORDERS:
        return not_judged(None if noise is None else noise.orders)
    broken = _broken(reference, candidate)
    if broken:
        return CorrectnessVerdict("defect", broken)
    states, vectors = _state_errors(reference, candidate), _vector_errors(reference, candidate)
    if not len(states.rms):
        return CorrectnessVerdict("not judged", "the cell kept no hidden states at the reference's positions")
    own_states, own_vectors = _state_errors(reference, reference), _vector_errors(reference, reference)
    state_orders = [
        _noisy(own_states, noise.state_rms[order], noise.state_largest[order], noise.state_columns[order], _NONE)
        for order in range(noise.orders)
    ]
    vector_orders = [
        _noisy(
            own_vectors,
            noise.vector_rms[order],
            noise.vector_largest[order],
            noise.vector_columns[order],
            noise.vector_cosine[order],
        )
        for order in range(noise.orders)
    ]
    freedom = freedom_of(noise.chain)
    verdict = verdict_of(
        compared(states, state_orders, "", freedom, STATES) + compared(vectors, vector_orders, "", freedom, EMBEDDINGS)
    )
    pairs = list(zip(state_orders, vector_orders, strict=True))
    return CorrectnessVerdict(
        verdict.word,
        verdict.reason,
        findings=verdict.findings,
        nearest=verdict.nearest,
        encoded=_ladder([(states, vectors)], _same_nearest(reference, candidate)),
        encoded_noise=_ladder(pairs, None),
    )


def _broken(reference: Embeddings, candidate: Embeddings) -> str:
    """What is wrong without any measure of noise."""
    missing = [prompt for prompt in reference.vectors if prompt not in candidate.vectors]
    if missing:
        return f"no answer to {plural(len(missing), 'prompt')} of the reference"
    for prompt, vector in reference.vectors.items():
        mine = candidate.vectors[prompt]
        if mine.shape != vector.shape:
            return f"prompt {prompt} has an embedding of {len(mine)} values, not {len(vector)}"
        if not np.isfinite(mine).all():
            return f"prompt {prompt} has an embedding that is not finite"
    for prompt, rows in candidate.states.items():
        if not np.isfinite(rows).all():
            return f"prompt {prompt} has hidden states that are not finite"
        at = reference.positions.get(prompt)
        if at is not None and candidate.positions[prompt].max() != at.max():
            return f"prompt {prompt} has other tokens than the reference's"
    return ""


def _state_errors(reference: Embeddings, candidate: Embeddings) -> Errors:
    """Distances at the rows that both have."""
    prompts, positions, found = [], [], []
    for prompt in sorted(reference.states):
        if prompt not in candidate.states:
            continue
        at, mine, theirs = np.intersect1d(reference.positions[prompt], candidate.positions[prompt], return_indices=True)
        prompts.append(np.full(len(at), prompt, dtype=np.int64))
        positions.append(at.astype(np.int64))
        found.append((reference.states[prompt][mine], candidate.states[prompt][theirs]))
    if not found:
        return _errors(_NOWHERE, _NOWHERE, vector_differences(np.empty((0, 0)), np.empty((0, 0))), _NONE)
    ours, others = (np.concatenate(each) for each in zip(*found, strict=True))
    return _errors(np.concatenate(prompts), np.concatenate(positions), vector_differences(ours, others), _NONE)


def _vector_errors(reference: Embeddings, candidate: Embeddings) -> Errors:
    prompts = np.array(sorted(reference.vectors), dtype=np.int64)
    found = vector_differences(_stacked(reference), _stacked(candidate, prompts))
    return _errors(prompts, np.zeros(len(prompts), dtype=np.int64), found, found.cosine)


def _stacked(answers: Embeddings, prompts: Ints | None = None) -> NDArray[np.float32]:
    wanted = sorted(answers.vectors) if prompts is None else prompts.tolist()
    return np.stack([answers.vectors[prompt] for prompt in wanted])


def _errors(prompts: Ints, positions: Ints, found: VectorDifferences, second: Floats) -> Errors:
    return Errors(
        row_prompts=prompts,
        row_positions=positions,
        scale=found.scale,
        rms=found.rms,
        largest=found.largest,
        kl=second,
        columns=found.columns,
        token_prompts=_NOWHERE,
        token_positions=_NOWHERE,
        nll=_NONE,
    )


def _noisy(own: Errors, rms: Floats, largest: Floats, columns: Floats, second: Floats) -> Errors:
    """One order of the noise, at the reference's own rows."""
    found = VectorDifferences(own.scale, rms, largest, second, columns)
    return _errors(own.row_prompts, own.row_positions, found, second)


def _ladder(pairs: list[tuple[Errors, Errors]], same_nearest: float | None) -> EmbeddingLadder:
    """The largest of each figure over pairs of states and vectors."""
    least = np.finfo(np.float64).tiny
    return EmbeddingLadder(
        prompts=len(pairs[0][1].rms),
        state_difference=max(float(states.largest.max()) for states, _ in pairs),
        state_relative=max(float(np.max(states.largest / np.maximum(states.scale, least))) for states, _ in pairs),
        vector_difference=max(float(vectors.largest.max()) for _, vectors in pairs),
        cosine_mean=max(float(vectors.kl.mean()) for _, vectors in pairs),
        cosine_worst=max(float(vectors.kl.max()) for _, vectors in pairs),
        same_nearest=same_nearest,
    )


def _same_nearest(reference: Embeddings, candidate: Embeddings) -> float | None:
    """Share of prompts whose nearest other prompt is the same; None of fewer than three, and of very many.

    A prompt that another repeats exactly as near counts as the same.
    """
    prompts = np.array(sorted(reference.vectors), dtype=np.int64)
    if not 3 <= len(prompts) <= _MOST_NEIGHBOURS:
        return None
    one, two = (_cosines(_stacked(each, prompts)) for each in (reference, candidate))
    chosen = two.argmax(axis=1)
    rows = np.arange(len(prompts))
    same = one[rows, chosen] >= one.max(axis=1) - _TIE
    return float(same.mean())


def _cosines(vectors: NDArray[np.float32]) -> Floats:
    rows = vectors.astype(np.float64)
    rows /= np.maximum(np.sqrt(np.sum(rows * rows, axis=1, keepdims=True)), np.finfo(np.float64).tiny)
    found: Floats = rows @ rows.T
    np.fill_diagonal(found, -np.inf)
    return found
