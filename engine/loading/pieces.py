"""Pieces: parts of stored tensors that a rank keeps, and their byte ranges.

piece = TensorSlice("model.layers.0.mlp.down_proj.weight", columns=(0, 1408))
place = Place.of(piece, stored)
place.nbytes, place.extent
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.loading.header import TensorLocation

Extent = tuple[int, int]  # first byte of the file, and the first one after


@dataclass(frozen=True)
class TensorSlice:
    """Rows [start, stop) of dimension 0 and columns [start, stop) of dimension 1; None: all of them."""

    name: str
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class FileRanges:
    """A piece in its file: `count` ranges of `width` bytes, one every `stride` bytes from `offset` on."""

    piece: TensorSlice
    stored: TensorLocation
    shape: tuple[int, ...]
    offset: int
    count: int
    width: int
    stride: int

    @classmethod
    def of(cls, piece: TensorSlice, stored: TensorLocation) -> "FileRanges":
        """Locate a piece. Raises ValueError, naming tensor and file, if the tensor has no such rows or columns."""
        shape = list(stored.shape)
        element = stored.dtype.itemsize
        row_bytes = stored.nbytes // shape[0] if shape and shape[0] else 0
        first = 0
        for dimension, (label, wanted) in enumerate((("rows", piece.rows), ("columns", piece.columns))):
            if wanted is None:
                continue
            fits = len(stored.shape) > dimension and (dimension == 0 or len(stored.shape) == 2)
            if not fits or not 0 <= wanted[0] <= wanted[1] <= stored.shape[dimension]:
                raise ValueError(
                    f"{stored.file}: tensor {piece.name} of shape {stored.shape} has no {label} "
                    f"{wanted[0]} to {wanted[1]}"
                )
            shape[dimension] = wanted[1] - wanted[0]
            first += wanted[0] * (row_bytes if dimension == 0 else element)
        offset = stored.offset + first
        if piece.columns is None or shape[1] == stored.shape[1]:
            nbytes = row_bytes * shape[0] if shape else stored.nbytes
            return cls(piece, stored, tuple(shape), offset, 1, nbytes, nbytes)
        return cls(piece, stored, tuple(shape), offset, shape[0], shape[1] * element, row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.count * self.width

    @property
    def extent(self) -> Extent:
        """From the piece's first byte to its last, the gaps between columns included."""
        return self.offset, self.offset + (self.count - 1) * self.stride + self.width if self.nbytes else self.offset


def merged_extents(extents: Iterable[Extent]) -> list[Extent]:
    """Merge extents: sorted, adjacent and overlapping ones joined, empty ones dropped."""
    joined: list[Extent] = []
    for begin, end in sorted(extents):
        if begin == end:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
