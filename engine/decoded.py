"""What decoding or encoding a batch gives, whichever engine does it; and how one waits for a device.

Decode = Callable[[Batch], list[Decoded]]
Encode = Callable[[Batch], list[Encoded]]
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.tokens import Batch


@dataclass(frozen=True)
class Decoded:
    """Sequences decoded together: when they began, when each token was there (seconds), tokens [rows, new_tokens].

    Times count on the rank that speaks for its replica; stages in the middle of a pipeline never see tokens.
    """

    began: float
    stamps: np.ndarray
    tokens: torch.Tensor


Decode = Callable[[Batch], list[Decoded]]
"""Decodes a batch: one result, or one for each micro-batch, in the order of its rows."""


@dataclass(frozen=True)
class Encoded:
    """Sequences encoded together: when they began and when their vectors were there (seconds); vectors [rows, size].

    Times count on the rank that speaks for its replica. Ranks that never see the vectors have None.
    """

    began: float
    ended: float
    vectors: torch.Tensor | None
    rows: int


Encode = Callable[[Batch], list[Encoded]]
"""Encodes a batch: one result."""


def synchroniser(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done its work; nothing to do on a CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
