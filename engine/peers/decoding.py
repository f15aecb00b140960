"""Greedy decoding by the `generate` of transformers, with a timestamp for every token; the model is unchanged."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.prompts.decoded import Decode, Decoded, synchroniser
from engine.prompts.tokens import PromptBatch

Settings = Callable[[Any, int, int], dict[str, Any]]


def _plain(model: Any, rows: int, capacity: int) -> dict[str, Any]:
    return {}


def _padded_at_right(batch: PromptBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and their mask, as encoders that count positions from the first column need sources."""
    if batch.padding is None:
        return batch.tokens, batch.real.long()
    length = batch.tokens.shape[1]
    columns = torch.arange(length, device=batch.tokens.device)[None]
    places = (columns + batch.padding[:, None]) % length
    return batch.tokens.gather(1, places), batch.real.long().gather(1, places)


def generate_decoder(
    model: Any, new_tokens: int, capacity: int, device: torch.device, settings: Settings = _plain
) -> Decode:
    """Return a function that decodes one batch with `generate`; a streamer records the time of each token.

    A batch holds prompts, or sources for an encoder-decoder.
    settings: (model, rows, capacity) -> further arguments of `generate`; capacity: positions of the longest sequence.
    """
    from transformers.generation.streamers import BaseStreamer

    synchronise = synchroniser(device)

    class Clock(BaseStreamer):  # type: ignore[misc]
        """Called first with the decoder's initial tokens, then with every token."""

        def __init__(self) -> None:
            self.stamps: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            synchronise()
            self.stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    def decode(batch: PromptBatch) -> list[Decoded]:
        clock = Clock()
        chosen = settings(model, len(batch.tokens), capacity)
        tokens, real = batch.tokens, batch.real.long()
        if model.config.is_encoder_decoder:
            tokens, real = _padded_at_right(batch)
        synchronise()
        began = time.perf_counter()
        tokens = model.generate(
            input_ids=tokens,
            attention_mask=real,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            streamer=clock,
            **chosen,
        )
        assert len(clock.stamps) == new_tokens + 1
        return [Decoded(began, np.array(clock.stamps[1:]), tokens[:, -new_tokens:])]

    return decode
