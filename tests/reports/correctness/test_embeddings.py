"""The judge of embeddings on made-up answers: noise of a known size agrees, everything beyond it is a defect."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from configs.common.differences import vector_differences
from engine.correctness.embeddings import KeptStates, embedding_columns
from reports.correctness.embeddings import (
    EmbeddingNoise,
    Embeddings,
    embedding_noise_columns,
    embedding_noise_of,
    embeddings_of,
)
from reports.correctness.embeddings_judge import judge_embeddings
from reports.correctness.section import EMBEDDING_FIGURES, ladder_lines

SIZE, ROWS, PROMPTS, ORDERS = 32, 10, 8, 4
LEVEL = 1e-3


def made_reference() -> Embeddings:
    """Hidden states at 10 positions of each of 8 prompts, and their vectors."""
    random = np.random.default_rng(5)
    return Embeddings(
        vectors={prompt: random.normal(0, 0.2, SIZE).astype(np.float32) for prompt in range(PROMPTS)},
        states={prompt: random.normal(0, 1, (ROWS, SIZE)).astype(np.float32) for prompt in range(PROMPTS)},
        positions={prompt: np.arange(0, 2 * ROWS, 2) for prompt in range(PROMPTS)},
    )


def noisy(reference: Embeddings, seed: int, level: float = LEVEL) -> Embeddings:
    random = np.random.default_rng(seed)

    def moved(rows: dict[int, np.ndarray], size: float) -> dict[int, np.ndarray]:
        return {p: (each + random.normal(0, size, each.shape)).astype(np.float32) for p, each in rows.items()}

    return replace(
        reference,
        vectors=moved(reference.vectors, level / 10),
        states=moved(reference.states, level),
        positions=dict(reference.positions),
    )


def noise_samples(reference: Embeddings, orders: int = ORDERS) -> dict[str, np.ndarray]:
    """Columns of noise as the engine would have left them."""
    found: dict[str, list[np.ndarray]] = {}
    for order in range(orders):
        other = noisy(reference, 100 + order)
        states = vector_differences(
            np.concatenate(list(reference.states.values())), np.concatenate(list(other.states.values()))
        )
        vectors = vector_differences(np.stack(list(reference.vectors.values())), np.stack(list(other.vectors.values())))
        columns = {
            "state_rms": states.rms,
            "state_largest": states.largest,
            "state_columns": states.columns,
            "vector_rms": vectors.rms,
            "vector_largest": vectors.largest,
            "vector_cosine": vectors.cosine,
            "vector_columns": vectors.columns,
            "chain": np.ones(1),
        }
        for name, values in columns.items():
            found.setdefault(f"0/noise_float32_{name}", []).append(values)
    return {name: np.concatenate(parts) for name, parts in found.items()}


REFERENCE = made_reference()
NOISE = embedding_noise_of(noise_samples(REFERENCE), REFERENCE, "float32")


def test_noise_agrees_whatever_its_seed() -> None:
    for seed in range(40):
        verdict = judge_embeddings(REFERENCE, noisy(REFERENCE, seed), NOISE)
        assert verdict.word == "agrees" and verdict.reason == "" and not verdict.findings, verdict.reason
        assert verdict.nearest is not None and verdict.nearest.excess < 0.9
    assert judge_embeddings(REFERENCE, REFERENCE, NOISE).word == "agrees"


def moved_prompt(answers: Embeddings) -> None:
    answers.states[3] += np.random.default_rng(0).normal(0, 8 * LEVEL, (ROWS, SIZE)).astype(np.float32)


def moved_position(answers: Embeddings) -> None:
    answers.states[2][4] += np.random.default_rng(0).normal(0, 12 * LEVEL, SIZE).astype(np.float32)


def moved_value(answers: Embeddings) -> None:
    answers.states[5][1][7] += 30 * LEVEL


def moved_channel(answers: Embeddings) -> None:
    for rows in answers.states.values():
        rows[:, 9] += 6 * LEVEL


def shifted_states(answers: Embeddings) -> None:
    """A constant on all channels changes no probability of a head, but it changes a state."""
    for rows in answers.states.values():
        rows += 3.5 * LEVEL


def moved_vector(answers: Embeddings) -> None:
    answers.vectors[6] += np.random.default_rng(0).normal(0, LEVEL, SIZE).astype(np.float32)


def longer_vectors(answers: Embeddings) -> None:
    for vector in answers.vectors.values():
        vector *= 1 + 10 * LEVEL


@pytest.mark.parametrize(
    ("change", "name", "prompt"),
    [
        (moved_prompt, "states", 3),
        (moved_position, "states at a position", 2),
        (moved_value, "a single value of a state", 5),
        (moved_channel, "a channel of states", None),
        (shifted_states, "typical states", None),
        (moved_vector, "an embedding", 6),
        (longer_vectors, "embeddings", None),
    ],
)
def test_what_exceeds_noise_is_a_defect(change: Callable[[Embeddings], None], name: str, prompt: int | None) -> None:
    answers = noisy(REFERENCE, 1)
    change(answers)
    verdict = judge_embeddings(REFERENCE, answers, NOISE)
    assert verdict.word == "defect" and "times the noise" in verdict.reason
    assert any(name in finding.name for finding in verdict.findings)
    if prompt is not None:
        assert verdict.findings[0].statistic.prompt == prompt


def test_more_noise_than_a_correct_program_may_have_is_a_defect() -> None:
    assert judge_embeddings(REFERENCE, noisy(REFERENCE, 1, 1.4 * LEVEL), NOISE).word == "agrees"
    assert judge_embeddings(REFERENCE, noisy(REFERENCE, 1, 3.5 * LEVEL), NOISE).word == "defect"


def test_what_is_broken_needs_no_noise() -> None:
    missing = noisy(REFERENCE, 1)
    del missing.vectors[4]
    assert "no answer to 1 prompt of the reference" in judge_embeddings(REFERENCE, missing, NOISE).reason
    nan = noisy(REFERENCE, 1)
    nan.states[2][0, 0] = math.nan
    verdict = judge_embeddings(REFERENCE, nan, NOISE)
    assert verdict.word == "defect" and "not finite" in verdict.reason
    verdict = judge_embeddings(nan, nan, NOISE)
    assert (verdict.word, verdict.reason) == ("not judged", "the reference's states of prompt 2 are not finite")
    short = noisy(REFERENCE, 1)
    short.vectors[0] = short.vectors[0][:5]
    assert "an embedding of 5 values, not 32" in judge_embeddings(REFERENCE, short, NOISE).reason
    cut = noisy(REFERENCE, 1)
    cut.positions[1] = cut.positions[1][:-1]
    cut.states[1] = cut.states[1][:-1]
    assert "prompt 1 has other tokens" in judge_embeddings(REFERENCE, cut, NOISE).reason


def test_without_noise_nothing_is_judged() -> None:
    assert judge_embeddings(REFERENCE, REFERENCE, None).word == "not judged"
    assert judge_embeddings(Embeddings(), REFERENCE, NOISE).word == "not judged"
    two = embedding_noise_of(noise_samples(REFERENCE, 2), REFERENCE, "float32")
    assert isinstance(two, EmbeddingNoise) and two.orders == 2
    assert "fewer than 3 orders" in judge_embeddings(REFERENCE, REFERENCE, two).reason
    assert embedding_noise_of({}, REFERENCE, "float32") is None


def test_the_ladder_beside_the_noise() -> None:
    answers = noisy(REFERENCE, 1)
    answers.vectors[6] = -answers.vectors[6]
    verdict = judge_embeddings(REFERENCE, answers, NOISE)
    assert verdict.encoded is not None and verdict.encoded_noise is not None and verdict.ladder is None
    assert verdict.encoded.cosine_worst == pytest.approx(2, abs=1e-3)
    assert verdict.encoded.cosine_mean == pytest.approx(2 / PROMPTS, abs=1e-3)
    assert verdict.encoded_noise.cosine_worst < 1e-4 and verdict.encoded_noise.state_difference < 10 * LEVEL
    nearest = verdict.encoded.same_nearest
    assert nearest is not None and 0 < nearest < 1
    lines = ladder_lines(verdict)
    assert [line.partition(":")[0] for line in lines] == list(EMBEDDING_FIGURES)
    agreeing = judge_embeddings(REFERENCE, noisy(REFERENCE, 1), NOISE)
    assert agreeing.encoded is not None and agreeing.encoded.same_nearest == 1.0


def test_a_replica_whose_prompts_keep_no_states_is_judged_by_its_vectors() -> None:
    """States are kept of the first prompts alone, where there are so many that their bytes have a bound."""
    first, total = PROMPTS // 2, PROMPTS
    answers, samples = noisy(REFERENCE, 1), {}
    for rank, prompts in enumerate((range(first), range(first, total))):
        kept = [KeptStates(p, REFERENCE.positions[p].tolist() if p < first else [], answers.states[p]) for p in prompts]
        columns = embedding_columns(prompts.start, np.stack([answers.vectors[p] for p in prompts]), kept)
        samples |= {f"{rank}/{name}": column for name, column in columns.items()}
    found = embeddings_of(samples)
    assert sorted(found.vectors) == list(range(total)) and sorted(found.states) == list(range(first))
    assert judge_embeddings(REFERENCE, found, NOISE).word == "agrees"


def test_columns_that_do_not_fit_are_named() -> None:
    states = np.concatenate([REFERENCE.states[p] for p in range(PROMPTS)])
    samples = {
        "0/answer_prompts": np.arange(PROMPTS),
        "0/answer_vectors": np.concatenate([REFERENCE.vectors[p] for p in range(PROMPTS)]),
        "0/answer_states": states.ravel(),
        "0/answer_state_prompts": np.repeat(np.arange(PROMPTS), ROWS),
        "0/answer_state_positions": np.concatenate([REFERENCE.positions[p] for p in range(PROMPTS)]),
    }
    read = embeddings_of(samples)
    assert np.array_equal(read.states[4], REFERENCE.states[4]) and np.array_equal(read.vectors[7], REFERENCE.vectors[7])
    with pytest.raises(ValueError, match="answer_state_positions"):
        embeddings_of({name: column for name, column in samples.items() if not name.endswith("positions")})
    with pytest.raises(ValueError, match="no multiple of 8 rows"):
        embeddings_of(samples | {"0/answer_vectors": np.ones(9)})
    with pytest.raises(ValueError, match="no multiple of 0 rows"):
        embeddings_of(samples | {f"0/answer_state_{name}": np.empty(0) for name in ("prompts", "positions")})
    noise = noise_samples(REFERENCE)
    assert set(noise) == {f"0/{name}" for name in embedding_noise_columns("float32")}
    with pytest.raises(ValueError, match="noise_float32_vector_rms has 3 values instead of 4 x 8"):
        embedding_noise_of(noise | {"0/noise_float32_vector_rms": np.ones(3)}, REFERENCE, "float32")


def test_cosines_keep_their_digits() -> None:
    base = np.array([[1.0, 0.0], [3.0, 4.0]])
    found = vector_differences(base, base + np.array([[0.0, 1e-9], [3.0, 4.0]]))
    assert found.cosine == pytest.approx([1e-18 / 2, 0.0], rel=1e-6, abs=1e-30)
    assert found.rms == pytest.approx([1e-9 / np.sqrt(2), 5 / np.sqrt(2)])
    assert vector_differences(base, -base).cosine == pytest.approx([2.0, 2.0])
