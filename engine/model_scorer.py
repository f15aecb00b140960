"""Logits of a causal language model of transformers, as `engine.answers` asks for them.

read_prefill(ModelScorer(model), sequences, pieces, total)
"""

from typing import Any

import torch
from torch import Tensor

from engine.answers import Consume
from engine.tokens import Batch

_PIECE_BYTES = 32 * 1024 * 1024  # of float32 logits that are handed on at once


class ModelScorer:
    """`engine.answers.Scorer` by a causal language model of transformers, on one rank."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, batch: Batch, consume: Consume) -> None:
        """Logits of all columns, by one prefill of the batch."""
        self._give(self._run(batch.tokens, batch.padding, None, cache=False).logits, 0, consume)

    def cached(self, batch: Batch, steps: int, consume: Consume) -> None:
        """Logits of the last `steps` columns: the others are prefilled, then one token a call."""
        length = batch.tokens.shape[1]
        past = self._run(batch.tokens[:, : length - steps], batch.padding, None, cache=True).past_key_values
        for column in range(length - steps, length):
            found = self._run(batch.tokens[:, column : column + 1], batch.padding, past, cache=True)
            past = found.past_key_values
            self._give(found.logits, column, consume)

    def _run(self, tokens: Tensor, padding: Tensor | None, past: Any, cache: bool) -> Any:
        """What the model makes of tokens that follow those of `past`."""
        if padding is None:
            return self.model(input_ids=tokens, past_key_values=past, use_cache=cache)
        known = 0 if past is None else past.get_seq_length()
        columns = torch.arange(known + tokens.shape[1], device=tokens.device)[None]
        return self.model(
            input_ids=tokens,
            attention_mask=(columns >= padding[:, None]).long(),
            position_ids=(columns - padding[:, None]).clamp(min=0)[:, known:],
            past_key_values=past,
            use_cache=cache,
        )

    def _give(self, logits: Tensor, first: int, consume: Consume) -> None:
        """In pieces: what reads them works in float64."""
        width = max(1, _PIECE_BYTES // (4 * len(logits) * logits.shape[-1]))
        for start in range(0, logits.shape[1], width):
            consume(first + start, logits[:, start : start + width].float())
