"""Collect an encoder's answers for later checks: one vector per prompt, pooled from its last hidden states.

    vectors = pooled(states, padding, "mean", normalize=True)
    figures, samples = collect_embeddings(prompts, vectors, scorer, pieces, context)

Called after all timed work. The vectors are those of the last timed pass; the hidden states come from another run over
the same batches (`EncodeScorer`), on all ranks of a replica. Columns of the rank that reports for its replica (P
prompts, index counted over all replicas; E and H are the model's hidden size):

  answer_prompts [P] int32                index of each prompt
  answer_vectors [P x E] float32          pooled, and of length 1 if the workload normalises
  answer_states [R x H] float32           last hidden states at chosen positions
  (`engine.correctness.answers.kept_positions`) answer_state_prompts, answer_state_positions [R] int32
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from configs.records.record import Figure
from configs.workloads.encode import Pooling
from engine.context import Context, Samples
from engine.correctness.answers import Rows, kept_positions
from engine.prompts.tokens import PromptBatch, Prompts


class EncodeScorer(Protocol):
    """Interface of an engine for scoring hidden states. Batches are padded at the left."""

    def states(self, batch: PromptBatch) -> Tensor | None:
        """Return last hidden states [rows, length, hidden]; None on ranks without them. Padding is undefined."""


@dataclass(frozen=True)
class KeptStates:
    """Hidden states of one prompt at some of its positions: values [positions, hidden]."""

    prompt: int
    positions: list[int]
    values: np.ndarray


def pooled(states: Tensor, padding: Tensor | None, pooling: Pooling, normalize: bool) -> Tensor:
    """Return embeddings [rows, hidden] in float32 of hidden states [rows, length, hidden], padded at the left.

    mean: of all tokens except padding, special ones included, as sentence-transformers does; first: the first token's.
    normalize: to length 1 (a zero vector is unchanged).
    """
    states = states.float()
    if padding is None:
        vectors = states.mean(1) if pooling == "mean" else states[:, 0]
    elif pooling == "first":
        vectors = states[torch.arange(len(states), device=states.device), padding]
    else:
        real = torch.arange(states.shape[1], device=states.device)[None] >= padding[:, None]
        # Padding may hold non-finite values, whose product with zero is not zero.
        total = states.masked_fill(~real[..., None], 0).sum(1)
        vectors = total / (states.shape[1] - padding)[:, None]
    return functional.normalize(vectors, dim=1) if normalize else vectors


def read_states(scorer: EncodeScorer, prompts: Prompts, pieces: list[PromptBatch]) -> list[KeptStates]:
    """Return the kept hidden states of each prompt; `pieces` are batches of the prompts, in order."""
    found: list[KeptStates] = []
    place = 0
    for piece in pieces:
        states = scorer.states(piece)
        for row in range(len(piece.tokens)):
            if states is not None:
                ids = prompts.tokens[place]
                found.append(kept_states(prompts.first + place, states[row, -len(ids) :], prompts.total))
            place += 1
    return found


def kept_states(prompt: int, states: Tensor, total: int) -> KeptStates:
    """Return the kept part of one prompt's states [length, hidden], of `total` prompts."""
    rows = Rows.of(states.shape[-1], total)
    positions = kept_positions(len(states), rows) if prompt < rows.prompts else []
    return KeptStates(prompt, positions, states[positions].float().cpu().numpy().copy())


def collect_embeddings(
    prompts: Prompts, vectors: Tensor | None, scorer: EncodeScorer, pieces: list[PromptBatch], context: Context
) -> tuple[dict[str, Figure], Samples]:
    """Return figures and columns of one rank. vectors [P, hidden]: of the timed pass; None if the rank has none."""
    kept = read_states(scorer, prompts, pieces)
    if not context.grid.reports_results:
        return {}, {}
    assert vectors is not None
    samples = embedding_columns(prompts.first, vectors.float().cpu().numpy(), kept)
    return {"answer_state_rows": len(samples["answer_state_prompts"])}, samples


def embedding_columns(first: int, vectors: np.ndarray, kept: list[KeptStates]) -> Samples:
    """Return flat columns of the vectors [P, E] of prompts from `first` on, and of their states."""
    states = [each.values for each in kept if each.positions]
    return {
        "answer_prompts": np.arange(first, first + len(vectors), dtype=np.int32),
        "answer_vectors": vectors.astype(np.float32).ravel(),
        "answer_states": np.concatenate(states or [np.empty((0, 0))]).astype(np.float32).ravel(),
        "answer_state_prompts": np.repeat(
            [each.prompt for each in kept], [len(each.positions) for each in kept]
        ).astype(np.int32),
        "answer_state_positions": np.array([at for each in kept for at in each.positions], dtype=np.int32),
    }
