"""Score transformers' models: logits and hidden states for `engine.correctness.answers` and
`engine.correctness.embeddings`.

read_prefill(ModelScorer(model), sequences, pieces, total)      # a decoder
read_prefill(Seq2SeqScorer(model), sequences, pieces, total)    # an encoder-decoder
EncodeScorer(model).states(batch)                               # an encoder
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from configs.families.positions import unused_positions
from engine.correctness.answers import Consume
from engine.prompts.tokens import PromptBatch

_PIECE_BYTES = 32 * 1024 * 1024  # of float32 logits passed on at once


class ModelScorer:
    """`engine.correctness.answers.Scorer` by a causal language model of transformers, on one rank.

    A model without a key-value cache (of a state-space family) gives nothing through it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def prefill(self, batch: PromptBatch, consume: Consume) -> None:
        """Compute logits of all columns, by one prefill of the batch."""
        give_in_pieces(self._run(batch.tokens, batch.padding, None, cache=False).logits, 0, consume)

    def cached(self, batch: PromptBatch, steps: int, consume: Consume) -> None:
        """Compute logits of the last `steps` columns: the others are prefilled, then one token a call."""
        length = batch.tokens.shape[1]
        first = self._run(batch.tokens[:, : length - steps], batch.padding, None, cache=True)
        past = getattr(first, "past_key_values", None)
        if past is None:
            return
        for column in range(length - steps, length):
            found = self._run(batch.tokens[:, column : column + 1], batch.padding, past, cache=True, known=column)
            past = found.past_key_values
            give_in_pieces(found.logits, column, consume)

    def _run(self, tokens: Tensor, padding: Tensor | None, past: Any, cache: bool, known: int = 0) -> Any:
        """Run the model on tokens that follow those of `past`, of which `known` are known."""
        seen = {} if past is None else {"past_key_values": past}
        if padding is None:
            return self.model(input_ids=tokens, use_cache=cache, **seen)
        columns = torch.arange(known + tokens.shape[1], device=tokens.device)[None]
        places = (columns - padding[:, None]).clamp(min=0)[:, known:]
        return self.model(
            input_ids=tokens,
            attention_mask=(columns >= padding[:, None]).long(),
            use_cache=cache,
            **seen,
            **({"position_ids": places} if self._takes_positions else {}),
        )


def give_in_pieces(logits: Tensor, first: int, consume: Consume) -> None:
    """Pass on logits [rows, n, vocabulary] of the columns from `first` on, in pieces, because readers work in
    float64.
    """
    width = max(1, _PIECE_BYTES // (4 * len(logits) * logits.shape[-1]))
    for start in range(0, logits.shape[1], width):
        consume(first + start, logits[:, start : start + width].float())


class Seq2SeqScorer:
    """`engine.correctness.answers.Scorer` by an encoder-decoder of transformers, on one rank; batches have a source."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, batch: PromptBatch, consume: Consume) -> None:
        """Compute logits of all columns, by one prefill of the batch."""
        give_in_pieces(self._run(batch.tokens, batch, self._encoded(batch), None).logits, 0, consume)

    def cached(self, batch: PromptBatch, steps: int, consume: Consume) -> None:
        """Compute logits of the last `steps` columns: the others are prefilled, then one token a call."""
        length, encoded = batch.tokens.shape[1], self._encoded(batch)
        past = self._run(batch.tokens[:, : length - steps], batch, encoded, None, cache=True).past_key_values
        for column in range(length - steps, length):
            found = self._run(batch.tokens[:, column : column + 1], batch, encoded, past, cache=True)
            past = found.past_key_values
            give_in_pieces(found.logits, column, consume)

    def _encoded(self, batch: PromptBatch) -> Any:
        assert batch.source is not None
        return self.model.get_encoder()(input_ids=batch.source.tokens, attention_mask=_mask(batch.source))

    def _run(self, tokens: Tensor, batch: PromptBatch, encoded: Any, past: Any, cache: bool = False) -> Any:
        """Run the decoder on tokens that follow those of `past`."""
        assert batch.source is not None
        seen = None
        if batch.padding is not None:
            known = 0 if past is None else past.get_seq_length()
            seen = batch.real.long()[:, : known + tokens.shape[1]]
        return self.model(
            encoder_outputs=encoded,
            attention_mask=_mask(batch.source),
            decoder_input_ids=tokens,
            decoder_attention_mask=seen,
            past_key_values=past,
            use_cache=cache,
        )


class ModelEncodeScorer:
    """`engine.correctness.embeddings.EncodeScorer` by an encoder of transformers (its body, without pooler), on one
    rank."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._first = _first_position(model)

    def states(self, batch: PromptBatch) -> Tensor:
        """Return last hidden states [rows, length, hidden] in float32."""
        if batch.padding is None:
            states: Tensor = self.model(input_ids=batch.tokens).last_hidden_state
            return states.float()
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        positions = (columns - batch.padding[:, None]).clamp(min=0) + self._first
        states = self.model(
            input_ids=batch.tokens, attention_mask=_mask(batch), position_ids=positions
        ).last_hidden_state
        return states.float()


def _first_position(model: Any) -> int:
    """Return the position that a model of transformers gives its first token when it is not told: 2 of a RoBERTa.

    Some models compute positions from the padding token, others keep those of all columns.
    """
    kept = [int(table.flatten()[0]) for name, table in model.named_buffers() if name.endswith("position_ids")]
    return max([unused_positions(model.config.to_dict()), *kept])


def _mask(batch: PromptBatch) -> Tensor | None:
    return None if batch.padding is None else batch.real.long()
