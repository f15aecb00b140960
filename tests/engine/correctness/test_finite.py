"""Results that are not numbers are found, with their step."""

import numpy as np
import pytest
import torch

from engine.correctness.answers import Consume, sequences_of
from engine.correctness.finite import check_logits, check_tokens, check_vectors
from engine.kernels.rows import NO_WORD
from engine.prompts.decoded import Decoded, Encoded
from engine.prompts.tokens import Batch, Prompts, batches


def decoded(rows: list[list[int]]) -> Decoded:
    return Decoded(0.0, np.zeros(len(rows[0])), torch.tensor(rows))


def test_a_marked_token_names_its_step() -> None:
    check_tokens([])
    check_tokens([decoded([[1, 2, 3]]), decoded([[4, 5, 6]])])
    with pytest.raises(FloatingPointError, match=r"^decode step 2: the logits are not finite numbers"):
        check_tokens([decoded([[1, 2, 3]]), decoded([[4, 5, 6], [7, 8, NO_WORD]])])
    with pytest.raises(FloatingPointError, match=r"^prefill: the logits"):
        check_tokens([decoded([[1, NO_WORD, 3]]), decoded([[NO_WORD, 1, 1]])])


class Scores:
    """Logits that are finite but at one column of the last row."""

    def __init__(self, column: int, value: float) -> None:
        self.column, self.value = column, value

    def prefill(self, batch: Batch, consume: Consume) -> None:
        logits = torch.zeros(*batch.tokens.shape, 9)
        logits[-1, self.column, 3] = self.value
        for first in range(0, logits.shape[1], 2):
            consume(first, logits[:, first : first + 2])

    def cached(self, batch: Batch, steps: int, consume: Consume) -> None:
        raise AssertionError("not asked for")


@pytest.mark.parametrize(("column", "step"), [(4, "prefill"), (5, "decode step 1"), (6, "decode step 2"), (1, None)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_prefill_of_the_answers_finds_the_step(column: int, step: str | None, value: float) -> None:
    ids = [[1, 2, 3], [1, 2, 3, 4, 5], [6]]
    prompts = Prompts(0, ids[:2], [None, None], 3)
    piece = batches(ids[:2], 2, torch.device("cpu"))[0]
    sequences = sequences_of(prompts, torch.tensor([[5, 6, 7], [5, 6, 7]]))
    if step is None:  # in the prompt: later logits are what is measured
        check_logits(Scores(column, value), sequences, piece)
        return
    with pytest.raises(FloatingPointError, match=f"^{step}: the logits are not finite"):
        check_logits(Scores(column, value), sequences, piece)


def test_embeddings_name_their_request() -> None:
    fine, strange = Encoded(0.0, 1.0, torch.ones(2, 3), 2), torch.ones(2, 3)
    strange[1, 2] = float("nan")
    check_vectors([fine, Encoded(0.0, 1.0, None, 2)])
    with pytest.raises(FloatingPointError, match=r"^request 2: the embeddings are not finite numbers"):
        check_vectors([fine, Encoded(0.0, 1.0, strange, 2)])
