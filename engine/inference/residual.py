"""Residual stream of tensor-parallel ranks: partial sums in, norms out.

    stream = Residual(hidden, group, rule)           # [batch, length, width], the same on all ranks
    normed = stream.norm(norm)
    normed = stream.add(part, norm)                  # part: this rank's share of a sum, of the same shape
    hidden = stream.replace(part, norm)              # the norm of the sum becomes the stream
    hidden = stream.whole(part)                      # without a norm

Few rows are summed and normalised on every rank. Many rows are split: a rank holds, sums and normalises the stream of
its rows, and gathers the other ranks' norms (sequence parallelism, Korthikanti et al., arXiv 2205.05198). Traffic is
equal, the other work is done once instead of by every rank, and the bits are the same, because norms are per row and
sums are in the order of ranks either way.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engine.inference.layer import Norm
from engine.kernels.operators import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from engine.kernels.rows import add
from engine.parallel.communicator import Communicator
from engine.parallel.transports import SharedTransport

_LEAST_ELEMENTS = 1 << 18
"""Below this, two messages cost more than normalising the other ranks' rows."""


@dataclass(frozen=True, slots=True)
class NormRule:
    """Parameters shared by all norms of a model."""

    kind: Literal["rms", "layer"]
    epsilon: float

    def norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Return the norm of [.., width]."""
        if self.kind == "rms":
            return rms_norm(hidden, norm.weight, self.epsilon)
        return layer_norm(hidden, norm.weight, norm.bias, self.epsilon)

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the sum of two, and its norm."""
        if self.kind == "rms":
            return add_rms_norm(hidden, update, norm.weight, self.epsilon)
        return add_layer_norm(hidden, update, norm.weight, norm.bias, self.epsilon)


def splits_rows(group: Communicator, rows: int, width: int) -> bool:
    """Return whether the ranks split the rows of a stream [rows, width] among them."""
    # Over gloo a reduce-scatter is a full all-reduce of which the rest is discarded.
    large = rows * width >= _LEAST_ELEMENTS and rows % group.size == 0
    return large and group.transport == SharedTransport.name


class Residual:
    """The stream on one rank, between two points of a forward pass."""

    def __init__(self, hidden: Tensor, group: Communicator, rule: NormRule) -> None:
        self._group, self._rule, self._shape = group, rule, hidden.shape
        rows = hidden.shape[0] * hidden.shape[1]
        self._by_rows = splits_rows(group, rows, hidden.shape[2])
        self._hidden = hidden
        if self._by_rows:
            self._hidden = hidden.reshape(group.size, rows // group.size, -1)[group.index]

    def norm(self, norm: Norm) -> Tensor:
        """Return the norm of the whole stream."""
        return self._gathered(self._rule.norm(self._hidden, norm))

    def add(self, part: Tensor, norm: Norm) -> Tensor:
        """Add the sum of all ranks' parts; return the norm of the whole stream. The part may be overwritten."""
        self._hidden, normed = self._rule.add_norm(self._hidden, self._summed(part), norm)
        return self._gathered(normed)

    def replace(self, part: Tensor, norm: Norm) -> Tensor:
        """As `add`, and the norm becomes the stream."""
        _, self._hidden = self._rule.add_norm(self._hidden, self._summed(part), norm)
        return self._gathered(self._hidden)

    def whole(self, part: Tensor) -> Tensor:
        """Return the stream with the sum of all ranks' parts added, on every rank."""
        return self._gathered(add(self._hidden, self._summed(part)))

    def _summed(self, part: Tensor) -> Tensor:
        """Return all rows of the sum, or this rank's."""
        if self._by_rows:
            return self._group.reduce_scatter(part.view(self._group.size, *self._hidden.shape))
        return self._group.all_reduce(part)

    def _gathered(self, rows: Tensor) -> Tensor:
        return self._group.all_gather(rows).view(self._shape) if self._by_rows else rows
