"""The residual stream of tensor-parallel ranks: sums of what each rank computed go in, norms come out.

    stream = Residual(hidden, group, epsilon)        # [batch, length, width], the same on all ranks
    normed = stream.norm(weight)
    normed = stream.add(part, weight)                # part: this rank's share of a sum, of the same shape
    hidden = stream.whole(part)                      # without a norm

Few rows are summed on every rank, and every rank norms all of them. Many rows are shared out: a rank holds the stream
of its own rows, sums and norms those, and gets the other ranks' norms (sequence parallelism, Korthikanti et al., arXiv
2205.05198). As much is sent, the rest is done once instead of by every rank, and the bits are the same: a norm is one
row's, and a sum is made in the order of ranks either way.
"""

from torch import Tensor

from engine.kernels.operators import add_rms_norm, rms_norm
from engine.parallel.communicator import Communicator
from engine.parallel.transports import SharedTransport

_LEAST_ELEMENTS = 1 << 17
"""Below that two messages cost more than the norms of the other ranks' rows."""


class Residual:
    """The stream between two points of a forward pass, on one rank."""

    def __init__(self, hidden: Tensor, group: Communicator, epsilon: float) -> None:
        self._group, self._epsilon, self._shape = group, epsilon, hidden.shape
        rows = hidden.shape[0] * hidden.shape[1]
        # Over gloo a reduce-scatter is a whole sum of which the rest is thrown away.
        self._by_rows = (
            group.transport == SharedTransport.name and hidden.numel() >= _LEAST_ELEMENTS and rows % group.size == 0
        )
        self._hidden = hidden
        if self._by_rows:
            self._hidden = hidden.reshape(group.size, rows // group.size, -1)[group.index]

    def norm(self, weight: Tensor) -> Tensor:
        """The norm of the stream, whole."""
        return self._gathered(rms_norm(self._hidden, weight, self._epsilon))

    def add(self, part: Tensor, weight: Tensor) -> Tensor:
        """Add the sum of all ranks' parts; the norm of what comes of it, whole. The part may be written over."""
        self._hidden, normed = add_rms_norm(self._hidden, self._summed(part), weight, self._epsilon)
        return self._gathered(normed)

    def whole(self, part: Tensor) -> Tensor:
        """The stream with the sum of all ranks' parts added, on every rank."""
        return self._gathered(self._hidden + self._summed(part))

    def _summed(self, part: Tensor) -> Tensor:
        """All rows of the sum, or this rank's."""
        if self._by_rows:
            return self._group.reduce_scatter(part.view(self._group.size, *self._hidden.shape))
        return self._group.all_reduce(part)

    def _gathered(self, rows: Tensor) -> Tensor:
        return self._group.all_gather(rows).view(self._shape) if self._by_rows else rows
