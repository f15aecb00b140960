"""Attention of new tokens of many sequences over a paged key-value cache, in one call of C per layer.

    attention = PagedAttention(store, queries, scale, angles, strides, max_tokens, tables, width)   # once per cache
    attention.begin(sequences, positions)                       # once per step
    mixed = attention.run(layer, heads, values, window)         # once per layer

Every token is a row of its own: one that continues an answer, or one of a prompt. Its bits depend neither on the other
tokens of the step nor on the number of threads.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.build import load_library, parallel_address

_SOURCE = Path(__file__).with_name("paged.c")
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_HEADS_TOGETHER = 4


class _Paged(ctypes.Structure):
    """`struct paged` of paged.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "tables", "sequences", "positions", "scores")),
        *((name, ctypes.c_int64) for name in ("tokens", "kv_heads", "group", "width", "stored")),
        *((name, ctypes.c_int64) for name in ("block", "block_stride", "table_stride", "score_stride")),
        *((name, ctypes.c_int64) for name in ("heads_stride", "values_stride", "dtype", "threads")),
        ("parallel", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    ]


def has_paged_attention(store: Tensor) -> bool:
    """Return whether `PagedAttention` supports this cache: on a CPU, with rows divisible into vectors."""
    if store.device.type != "cpu" or store.dtype not in _DTYPE_CODES:
        return False
    library, width = _library(), store.shape[-1]
    return library is not None and width % library.paged_lanes() == 0 and width <= library.paged_most_width()


class PagedAttention:
    """Attention over a cache `store` [2, layers, blocks, kv_heads, block, width].

    A step has at most `max_tokens` tokens. Its inputs lie at fixed addresses, so that a step can be recorded.
    """

    def __init__(
        self,
        store: Tensor,
        queries: int,
        scale: float,
        angles: tuple[Tensor, Tensor] | None,
        strides: tuple[int, int],
        max_tokens: int,
        tables: Tensor,
        width: int,
    ) -> None:
        """queries: query heads of this rank. angles: cosines and sines [positions, width]; None: no rotation. strides:
        elements between the new heads of two tokens, and between their values. tables: int32 [sequences, blocks of the
        longest], which the caller changes in place. width: of a head; rows of the cache may be wider.
        """
        library = _library()
        assert library is not None and store.is_contiguous() and tables.dtype is torch.int32 and tables.is_contiguous()
        assert angles is None or (angles[0].is_contiguous() and angles[1].is_contiguous())
        self._library = library
        _, layers, _, kv_heads, block, stored = store.shape
        threads = torch.get_num_threads()
        room = _HEADS_TOGETHER * (tables.shape[1] * block + library.paged_lanes())
        scores = torch.empty(threads, room, dtype=torch.float32)
        self._sequences = torch.zeros(max_tokens, dtype=torch.int32)
        self._positions = torch.zeros(max_tokens, dtype=torch.int32)
        self._step = _Paged(
            cosines=None if angles is None else angles[0].data_ptr(),
            sines=None if angles is None else angles[1].data_ptr(),
            tables=tables.data_ptr(),
            sequences=self._sequences.data_ptr(),
            positions=self._positions.data_ptr(),
            scores=scores.data_ptr(),
            tokens=0,
            kv_heads=kv_heads,
            group=queries // kv_heads,
            width=width,
            stored=stored,
            block=block,
            block_stride=store.stride(2),
            table_stride=tables.stride(0),
            score_stride=room,
            heads_stride=strides[0],
            values_stride=strides[1],
            dtype=_DTYPE_CODES[store.dtype],
            threads=threads,
            parallel=parallel_address() if threads > 1 else None,
            scale=scale,
        )
        self._kept = (store, angles, scores, tables)  # the structure holds addresses only
        self._address = ctypes.addressof(self._step)
        self._keys, self._values = ([part[layer].data_ptr() for layer in range(layers)] for part in store)
        self._outputs, self._dtype = queries * width, store.dtype

    def begin(self, sequences: Tensor, positions: Tensor) -> None:
        """Set the row of `tables` and the position of each new token, int32 [tokens]."""
        tokens = len(sequences)
        self._step.tokens = tokens
        self._sequences[:tokens].copy_(sequences)
        self._positions[:tokens].copy_(positions)

    def run(self, layer: int, heads: int, values: int, window: int = 0) -> Tensor:
        """Keep new keys and values; attend to the last `window` positions (0: all): [1, tokens, queries x width].

        heads, values: addresses of the new queries and keys, before rotation, and of the new values.
        """
        out = torch.empty((1, self._step.tokens, self._outputs), dtype=self._dtype)
        keys, stored = self._keys[layer], self._values[layer]
        self._library.paged_attention(self._address, heads, values, keys, stored, out.data_ptr(), window)
        return out


def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        number, address = ctypes.c_int64, ctypes.c_void_p
        library.paged_attention.argtypes, library.paged_attention.restype = [*[address] * 6, number], None
        library.paged_lanes.restype = library.paged_most_width.restype = number
    return library
