"""Reject results that are not finite numbers, outside of timed work: a measurement of them is worth nothing.

    check_tokens(results)                           # of our engine on a CPU: its kernels mark them (`NO_WORD`)
    check_logits(scorer, sequences, piece)          # of any engine: scores the first batch once more
    check_vectors(results)                          # of an encoder

Each raises FloatingPointError naming the step: the prefill, or a decode step, counted from 1.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from engine.correctness.answers import Scorer, Sequence, fed_batch
from engine.kernels.rows import NO_WORD
from engine.prompts.decoded import Decoded, Encoded
from engine.prompts.tokens import PromptBatch

_REMEDY = "Check the weights and config.json of the model; in 16 bits, try dtype float32"


def check_tokens(results: Rows[Decoded]) -> None:
    """Raise FloatingPointError for the first step whose largest logit was NaN or infinite."""
    chosen = [result.tokens for result in results]
    if not chosen or min(int(tokens.min()) for tokens in chosen) != NO_WORD:
        return
    step = min(int((tokens == NO_WORD).any(0).int().argmax()) for tokens in chosen if (tokens == NO_WORD).any())
    _fail(step)


def check_logits(scorer: Scorer, sequences: list[Sequence], piece: PromptBatch) -> None:
    """Raise FloatingPointError for the first step of a batch at which a logit is NaN or infinite.

    The prompts and their answers are scored by one prefill, then the answers token by token through the cache. Ranks
    that receive no logits find nothing. All ranks of a replica call it.
    """
    part = [each.parts()[-1] for each in sequences[: len(piece.tokens)]]
    batch = fed_batch(part, piece)
    steps = len(part[0].decoded) - 1
    prefilled = batch.tokens.shape[1] - steps - 1
    strange: list[int] = []

    def consume(first: int, logits: Tensor) -> None:
        # Rows are padded at the left, so that the answers of all begin in one column.
        found = ~torch.isfinite(logits).all(-1).all(0)
        strange.extend(first + column for column in found.nonzero()[:, 0].tolist() if first + column >= prefilled)

    scorer.prefill(batch, consume)
    if steps:
        scorer.cached(batch, steps, consume)
    if strange:
        _fail(min(strange) - prefilled)


def check_vectors(results: Rows[Encoded]) -> None:
    """Raise FloatingPointError for embeddings that are NaN or infinite."""
    for number, result in enumerate(results):
        if result.vectors is not None and not bool(torch.isfinite(result.vectors).all()):
            raise FloatingPointError(f"request {number + 1}: the embeddings are not finite numbers. {_REMEDY}")


def _fail(step: int) -> None:
    where = f"decode step {step}" if step else "prefill"
    raise FloatingPointError(f"{where}: the logits are not finite numbers. {_REMEDY}")
