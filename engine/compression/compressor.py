"""Compress a model's products one by one during loading, so that the whole model is never in memory uncompressed.

    compressor = Compressor(cell.compression, torch.bfloat16, device)
    layer = compressor.pack([query, key, value], bias, "quick")
    figures = compressor.figures(dense_bytes, plain_bytes)

All matrix products are compressed, including the head; embedding tables, norms and biases are not.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from configs.common.execution import Dtype
from configs.hardware.quantised_products import why_not_multiplied
from configs.records.record import Figure
from engine.compression.passes import Hardware, hardware_of, resolve
from engine.compression.pruning import pruned
from engine.kernels.linear import PackedLinear, Packing, pack_linear
from engine.kernels.quantized import SCHEMES, quantize_linear


class Compressor:
    """The passes of a launch, and their figures so far. `passes` are the resolved ones; empty: `pack` only packs.

    Raises ValueError for a quantisation without a kernel for this device.
    """

    def __init__(
        self, asked: Sequence[str], dtype: torch.dtype, device: torch.device, hardware: Hardware | None = None
    ) -> None:
        self._hardware = hardware_of(device, dtype) if hardware is None else hardware
        self._asked = tuple(asked)
        self.passes = resolve(asked, self._hardware)
        self._pruning = next((one for one in self.passes if one.startswith("prune")), None)
        self._scheme = next((scheme for scheme in SCHEMES if scheme in self.passes), None)
        if self._scheme:
            _check_kernel(self._scheme, dtype, self._hardware)
        self._is_smaller = self._scheme is not None or ("prune_2_4" in self.passes and self._hardware.sparse_units)
        self._weights = self._nonzero = self._packed_bytes = 0
        self._seconds = 0.0

    @property
    def quantises(self) -> bool:
        """Whether products become a narrower format."""
        return self._scheme is not None

    def pack(
        self, parts: Sequence[Tensor], bias: Tensor | None, packing: Packing, first_input: int = 0
    ) -> PackedLinear:
        """Return one compressed layer from stacked weights [out, in], as `pack_linear`.

        first_input: index of their first input in the whole weight. With passes, nothing is memory-mapped.

        Raises ValueError if a share of the inputs cannot be pruned like the whole.
        """
        if not self.passes:
            return pack_linear(parts, bias, packing=packing)
        began = time.perf_counter()
        own: Packing = "quick" if packing == "memory_mapped" else packing
        if self._pruning:
            parts = [pruned(self._pruning, part.detach(), first_input) for part in parts]
            self._nonzero += sum(int(part.count_nonzero()) for part in parts)
        self._weights += sum(part.numel() for part in parts)
        layer: PackedLinear
        if self._scheme:
            layer = quantize_linear(parts, bias, self._scheme, own)
        elif self._is_smaller:
            layer = _SparseLinear(parts, bias)
        else:
            layer = pack_linear(parts, bias, packing=own)
        self._packed_bytes += layer.nbytes
        self._seconds += time.perf_counter() - began
        return layer

    def figures(self, dense_bytes: int, plain_bytes: int) -> dict[str, Figure]:
        """Return figures of the compression; empty if the cell requested none.

        dense_bytes: this rank's weights before compression. plain_bytes: weights outside of products, not compressed.
        weights_bytes: both kinds after compression; with a tied, quantised head the embedding table counts in addition;
        without a smaller form, they equal dense_bytes. nonzero_share: of the weights of all products, None without
        pruning. compression_seconds are part of the load's.
        """
        if not self._asked:
            return {}
        return {
            "compression_passes": "+".join(self.passes) or "none",
            "weights_bytes": plain_bytes + self._packed_bytes if self._is_smaller else dense_bytes,
            "dense_weights_bytes": dense_bytes,
            "nonzero_share": self._nonzero / self._weights if self._pruning and self._weights else None,
            "compression_seconds": self._seconds,
        }


def _check_kernel(scheme: str, dtype: torch.dtype, hardware: Hardware) -> None:
    name = cast("Dtype", str(dtype).removeprefix("torch."))
    reason = why_not_multiplied(scheme, name, hardware.device, hardware.capability)
    if reason is not None:
        raise ValueError(f"compression: {reason}")


class _SparseLinear(PackedLinear):
    """2:4 weights on a GPU's sparse units; dense if torch has no sparse form for their shape."""

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None) -> None:
        whole = torch.cat(list(parts))
        path, nbytes = "torch", whole.nbytes
        self._weight = whole
        with suppress(RuntimeError):
            self._weight = torch.sparse.to_sparse_semi_structured(whole)
            path, nbytes = "sparse_2_4", whole.nbytes // 2 + whole.numel() // 8  # two values of four, 2 bits for each
        self._bias = bias
        super().__init__(whole.shape, whole.dtype, path, nbytes + (0 if bias is None else bias.nbytes), None)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)
