"""Attention of one new token a sequence over a static key-value cache, in one call of C: the decode step of a layer.

    attention = DecodeAttention(store, cosines, sines, heads, normed=False)     # once per cache and batch
    attention.begin(position, padding)                                          # once per step
    mixed = attention.run(layer, heads, values, start)                          # once per layer

Rotation, the writing of the new key and value, scores, softmax and the weighted sum are some ten operators of torch, of
which `scaled_dot_product_attention` alone takes twice to five times as long as reading the cache does. The
result of a sequence does not depend on what else is in the batch.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.build import load_library

_SOURCE = Path(__file__).with_name("attention.c")
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_HEADS_TOGETHER = 4


class _Attention(ctypes.Structure):
    """`struct attention` of attention.c."""

    _fields_ = [
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("padding", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("heads_stride", ctypes.c_int64),
        ("values_stride", ctypes.c_int64),
        ("cache_batch_stride", ctypes.c_int64),
        ("cache_head_stride", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


def has_decode_attention(store: Tensor) -> bool:
    """Whether `DecodeAttention` can work on this cache: on a CPU, of heads of a width that its vectors divide.

    Only with one thread a process: with more, torch's own divides the work among them.
    """
    if store.device.type != "cpu" or store.dtype not in _DTYPE_CODES or torch.get_num_threads() > 1:
        return False
    library = _library()
    width = store.shape[-1]
    return library is not None and width % library.attention_lanes() == 0 and width <= library.attention_most_width()


class DecodeAttention:
    """The attention of the first `batch` sequences of a cache `store` [2, layers, rows, kv_heads, capacity, width].

    cosines, sines [capacity, width]: of each position. queries: query heads of this rank. heads_stride: elements
    between the new heads of two sequences.
    """

    def __init__(
        self,
        store: Tensor,
        cosines: Tensor,
        sines: Tensor,
        queries: int,
        batch: int,
        heads_stride: int,
        values_stride: int,
    ) -> None:
        library = _library()
        assert library is not None and store.is_contiguous() and cosines.is_contiguous() and sines.is_contiguous()
        _, layers, _, kv_heads, capacity, width = store.shape
        scores = torch.empty(_HEADS_TOGETHER * (capacity + library.attention_lanes()), dtype=torch.float32)
        self._step = _Attention(
            cosines.data_ptr(),
            sines.data_ptr(),
            None,
            scores.data_ptr(),
            batch,
            kv_heads,
            queries // kv_heads,
            width,
            heads_stride,
            values_stride,
            store.stride(2),
            store.stride(3),
            0,
            _DTYPE_CODES[store.dtype],
            width**-0.5,
        )
        self._kept = (store, cosines, sines, scores)  # the structure holds addresses only
        self._padding: Tensor | None = None
        self._address = ctypes.addressof(self._step)
        self._keys, self._values = ([part[layer].data_ptr() for layer in range(layers)] for part in store)
        self._run = library.attention_step
        self._shape, self._dtype = (batch, 1, queries * width), store.dtype

    def begin(self, position: int, padding: Tensor | None) -> None:
        """The new tokens stand at `position`; so many positions [batch] at the left of each sequence are filling."""
        self._step.position = position
        if padding is not self._padding:
            assert padding is None or padding.dtype is torch.int64
            self._padding = None if padding is None else padding.contiguous()
            self._step.padding = None if self._padding is None else self._padding.data_ptr()

    def run(self, layer: int, heads: int, values: int, start: int) -> Tensor:
        """What the queries make of positions from `start` on: [batch, 1, queries x width].

        heads, values: addresses of the new queries and keys, not turned yet, and of the new values.
        """
        out = torch.empty(self._shape, dtype=self._dtype)
        self._run(self._address, heads, values, self._keys[layer], self._values[layer], out.data_ptr(), start)
        return out


def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        number, address = ctypes.c_int64, ctypes.c_void_p
        library.attention_step.argtypes = [*[address] * 6, number]
        library.attention_step.restype = None
        library.attention_lanes.restype = library.attention_most_width.restype = number
    return library
