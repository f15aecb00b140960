"""Memory that the reference of a correctness experiment needs: unmodified transformers in float32, and its noise.

    need = reference_memory(elements, vocabulary=32000, hidden=4096, layers=32, positions=2048, twin=True)
    need.total, need.working

The model answers one prompt at a time, but keeps the logits of all its positions. For noise in 16 bits a copy of the
model in 16 bits is made beside it.
"""

from dataclasses import dataclass

USED_SHARE = 0.8
"""Share of the memory that is planned with."""
STREAMED = "the reference exceeds the memory in float32: layers that do not fit are read from disk, which is slow"
_LOGITS_COPIES = 3
"""The logits, and the partial sums of the head where its reduction order is changed."""
_HIDDEN_COPIES = 16
"""Tensors of the width of the feed-forward or of the states that live at once, in units of positions x hidden."""
_SCORES_BYTES = 256 * 1024 * 1024
"""Attention scores, which `engine.correctness.reordered` computes explicitly below this."""


@dataclass(frozen=True)
class ReferenceMemory:
    """weights: in float32; twin: of the copy in 16 bits, 0 without; working: everything else, bytes."""

    weights: int
    twin: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.twin + self.working


def reference_memory(
    elements: int, vocabulary: int, hidden: int, layers: int, positions: int, twin: bool
) -> ReferenceMemory:
    """Return the need for sequences of at most `positions` tokens; elements: parameters of the model."""
    logits = _LOGITS_COPIES * 4 * vocabulary * positions
    cache = 2 * 4 * layers * hidden * positions  # no fewer heads of keys than of queries, at the most
    working = logits + cache + _HIDDEN_COPIES * 4 * hidden * positions + _SCORES_BYTES
    return ReferenceMemory(4 * elements, 2 * elements if twin else 0, working)
