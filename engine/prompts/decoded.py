"""Results of decoding or encoding a batch, for all engines; and device synchronisation.

Decode = Callable[[Batch], list[Decoded]]
Encode = Callable[[Batch], list[Encoded]]
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.prompts.tokens import PromptBatch


@dataclass(frozen=True)
class Decoded:
    """Sequences decoded together: start time, time of each token (seconds), tokens [rows, new_tokens].

    Times are valid on the rank that reports for its replica; middle stages of a pipeline never receive tokens.
    """

    began: float
    stamps: np.ndarray
    tokens: torch.Tensor


Decode = Callable[[PromptBatch], list[Decoded]]
"""Decodes a batch: one result, or one for each micro-batch, in the order of its rows."""


@dataclass(frozen=True)
class Encoded:
    """Sequences encoded together: start time and time of their vectors (seconds); vectors [rows, size].

    Times are valid on the rank that reports for its replica. Ranks without the vectors have None.
    """

    began: float
    ended: float
    vectors: torch.Tensor | None
    rows: int


Encode = Callable[[PromptBatch], list[Encoded]]
"""Encodes a batch: one result."""


def synchroniser(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the device; a no-op on a CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
