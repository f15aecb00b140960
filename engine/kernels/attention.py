"""Decode attention: one new token a sequence over a static key-value cache, in one call of C per layer.

    attention = DecodeAttention(store, batch, queries, scale, ...)              # once per cache and batch
    attention.begin(position, padding)                                          # once per step
    mixed = attention.run(layer, heads, values, window)                         # once per layer

Rotation, cache update, scores, softmax and the weighted sum are about ten operators of torch, of which
`scaled_dot_product_attention` alone takes two to five times as long as reading the cache. A sequence's result is
independent of the other sequences in the batch and of the number of threads. `fixed` is for constant keys and values
(those of a source): nothing is written.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.build import load_library, parallel_address

_SOURCE = Path(__file__).with_name("attention.c")
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_HEADS_TOGETHER = 4


class _Attention(ctypes.Structure):
    """`struct attention` of attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "padding", "bias", "scores")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "group", "width", "stored", "capacity")),
        *((name, ctypes.c_int64) for name in ("heads_stride", "values_stride")),
        *((name, ctypes.c_int64) for name in ("cache_batch_stride", "cache_head_stride", "position")),
        *((name, ctypes.c_int64) for name in ("dtype", "fixed", "threads")),
        ("parallel", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    ]


def stored_width(width: int, like: Tensor) -> int:
    """Return the row width of a cache for heads of `width` elements in the dtype and on the device of `like`.

    The native kernel works on whole vectors; elements beyond the head must be zero.
    """
    library = _library() if like.device.type == "cpu" and like.dtype in _DTYPE_CODES else None
    return width if library is None else -(-width // library.attention_lanes()) * library.attention_lanes()


def has_decode_attention(store: Tensor) -> bool:
    """Return whether `DecodeAttention` supports this cache: on a CPU, with rows divisible into vectors."""
    if store.device.type != "cpu" or store.dtype not in _DTYPE_CODES:
        return False
    library = _library()
    width = store.shape[-1]
    return library is not None and width % library.attention_lanes() == 0 and width <= library.attention_most_width()


def bias_table(by_distance: Tensor) -> Tensor:
    """Return the bias table for `DecodeAttention`, from biases of scores [heads, capacity] by distance of the keys."""
    library = _library()
    assert library is not None
    farthest_first = by_distance.float().flip(-1)
    return torch.nn.functional.pad(farthest_first, (0, library.attention_lanes())).contiguous()


class DecodeAttention:
    """The attention of the first `batch` sequences of a cache `store` [2, layers, rows, kv_heads, capacity, width]."""

    def __init__(
        self,
        store: Tensor,
        batch: int,
        queries: int,
        scale: float,
        angles: tuple[Tensor, Tensor] | None = None,
        strides: tuple[int, int] = (0, 0),
        bias: Tensor | None = None,
        fixed: bool = False,
        width: int | None = None,
    ) -> None:
        """queries: query heads of this rank. angles: cosines and sines [capacity, width] of each position; None: no
        rotation. strides: elements between the new heads of two sequences, and between their values. bias: a
        `bias_table`. fixed: the cache is complete and constant; the new heads are queries only.
        width: of a head, if the rows of the cache are wider (`stored_width`).
        """
        library = _library()
        assert library is not None and store.is_contiguous()
        assert angles is None or (angles[0].is_contiguous() and angles[1].is_contiguous())
        self._library = library
        _, layers, _, kv_heads, capacity, stored = store.shape
        width = width or stored
        threads = torch.get_num_threads()
        parallel = parallel_address() if threads > 1 else None
        scores = torch.empty(threads, _HEADS_TOGETHER * (capacity + library.attention_lanes()), dtype=torch.float32)
        self._step = _Attention(
            cosines=None if angles is None else angles[0].data_ptr(),
            sines=None if angles is None else angles[1].data_ptr(),
            padding=None,
            bias=None if bias is None else bias.data_ptr(),
            scores=scores.data_ptr(),
            batch=batch,
            kv_heads=kv_heads,
            group=queries // kv_heads,
            width=width,
            stored=stored,
            capacity=capacity,
            heads_stride=strides[0],
            values_stride=strides[1],
            cache_batch_stride=store.stride(2),
            cache_head_stride=store.stride(3),
            position=0,
            dtype=_DTYPE_CODES[store.dtype],
            fixed=fixed,
            threads=threads,
            parallel=parallel,
            scale=scale,
        )
        self._kept = (store, angles, bias, scores)  # the structure holds addresses only
        # The address must not change: recorded steps read new padding from it.
        self._padding = torch.zeros(batch, dtype=torch.int64)
        self._given: Tensor | None = None
        self._address = ctypes.addressof(self._step)
        self._keys, self._values = ([part[layer].data_ptr() for layer in range(layers)] for part in store)
        self._shape, self._dtype = (batch, 1, queries * width), store.dtype

    def begin(self, position: int, padding: Tensor | None) -> None:
        """Set the `position` of the new tokens, and the padding [batch] at the left of each sequence."""
        self._step.position = position
        if padding is not self._given:
            self._given = padding
            if padding is not None:
                self._padding.copy_(padding)
            self._step.padding = None if padding is None else self._padding.data_ptr()

    def run(self, layer: int, heads: int, values: int, window: int = 0) -> Tensor:
        """Attend to the last `window` positions (0: all): [batch, 1, queries x width].

        heads, values: addresses of the new queries and keys, before rotation, and of the new values.
        """
        out = torch.empty(self._shape, dtype=self._dtype)
        keys, stored = self._keys[layer], self._values[layer]
        self._library.attention_step(self._address, heads, values, keys, stored, out.data_ptr(), window)
        return out


def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        number, address = ctypes.c_int64, ctypes.c_void_p
        library.attention_step.argtypes = [*[address] * 6, number]
        library.attention_step.restype = None
        library.attention_lanes.restype = library.attention_most_width.restype = number
    return library
