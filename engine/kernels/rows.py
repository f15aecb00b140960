"""Embedding look-up and token selection of a decode step, each one pass of C instead of several operators of torch.

    hidden = embed_rows(ids, table)                       # ids [...] -> [..., width]
    hidden = add_rows(hidden, position_ids, positions)    # learned positions
    hidden = add(hidden, update)
    words = argmax_rows(logits)                           # [rows, words] -> [rows]
    words = choose_words(group.all_gather(best_words(logits, first)))       # with a split vocabulary
    edge, before = edge_class(weights, lowest, shift, classes, share)       # a numpy row: where top_p cuts it

Where the largest logit is not finite, the word chosen on a CPU is NO_WORD, which is embedded as word 0: the check costs
nothing in a step, and the pass is rejected after it (`engine.correctness.finite`). On a GPU it would cost launches of
kernels in each step, so nothing is marked there.

Each gives the same bits as torch's operators, which are used on GPUs, for other dtypes and without a compiler.
Selection among 50,000 words is 10 times faster than torch's scalar `argmax` of bfloat16.
"""

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.kernels.build import load_library

_SOURCE = Path(__file__).with_name("rows.c")
NO_WORD = -(2**31)
"""The id chosen among logits whose largest is NaN or infinite."""
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def embed_rows(ids: Tensor, table: Tensor, first: int | None = None, scale: float | None = None) -> Tensor:
    """Return rows of `table` [rows, width] by number, [..., width], times `scale` rounded to the dtype.

    first: number of this rank's first row in a split table; numbers of other ranks give zeros, so that the sum over
    ranks is exactly the row. None: the table is whole; a number beyond it raises IndexError.
    """
    library = _library_for(table)
    factor = 1.0 if scale is None else _rounded(scale, table.dtype)
    if library is None:
        return _embedded(ids, table, first, factor)
    ids = ids.contiguous()
    rows, width = table.shape
    y = torch.empty(*ids.shape, width, dtype=table.dtype)
    addresses = ids.data_ptr(), table.data_ptr(), y.data_ptr()
    sizes = ids.numel(), width, rows, first or 0, int(first is not None)
    _check(library.embed_rows(*addresses, *sizes, factor, _DTYPE_CODES[table.dtype]), rows)
    return y


@functools.cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(scale, dtype=dtype))


def _embedded(ids: Tensor, table: Tensor, first: int | None, factor: float) -> Tensor:
    if ids.is_cpu:
        ids = ids.masked_fill(ids == NO_WORD, 0)
    if first is None:
        hidden = functional.embedding(ids, table)
    else:
        own = ids - first
        foreign = (own < 0) | (own >= len(table))
        hidden = functional.embedding(own.masked_fill_(foreign, 0), table).masked_fill_(foreign[..., None], 0)
    return hidden if factor == 1.0 else hidden * factor


def add_rows(hidden: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Return hidden [..., width] plus the rows `ids` [...] of `table` [rows, width].

    Raises IndexError beyond the table.
    """
    library = _library_for(hidden)
    if library is None or table.dtype is not hidden.dtype:
        return hidden + functional.embedding(ids, table)
    hidden, ids = hidden.contiguous(), ids.contiguous()
    rows, width = table.shape
    assert hidden.numel() == ids.numel() * width, (hidden.shape, ids.shape, table.shape)
    y = torch.empty_like(hidden)
    addresses = hidden.data_ptr(), ids.data_ptr(), table.data_ptr(), y.data_ptr()
    _check(library.add_rows(*addresses, ids.numel(), width, rows, _DTYPE_CODES[hidden.dtype]), rows)
    return y


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b, of the same shape."""
    library = _library_for(a)
    if library is None or b.dtype is not a.dtype:
        return a + b
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty_like(a)
    library.add(a.data_ptr(), b.data_ptr(), y.data_ptr(), y.numel(), _DTYPE_CODES[a.dtype])
    return y


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the first largest index of each row of [rows, words]: int64 [rows].

    On a CPU NO_WORD where the largest is not finite.
    """
    library = _library_for(logits)
    if not logits.is_cpu:
        return logits.argmax(-1)
    if library is None:
        values, places = _largest(logits)
        return places.masked_fill_(~values.isfinite(), NO_WORD)
    logits = logits.contiguous()
    rows, words = logits.shape
    places = torch.empty(rows, dtype=torch.int64)
    library.argmax_rows(logits.data_ptr(), places.data_ptr(), rows, words, _DTYPE_CODES[logits.dtype])
    return places


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row and its first index; NaN counts as the largest."""
    # On a CPU numpy's is 10 to 30 times faster than torch's in 16 bits.
    places = torch.from_numpy(logits.float().numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)
    return logits.gather(-1, places[:, None])[:, 0], places


def best_words(logits: Tensor, first: int) -> Tensor:
    """Return the largest value of each row of this rank's [rows, words], and its word id: float64 [2, rows].

    Exact for every 32-bit value and every word id. `first`: the id of this rank's first word.
    """
    library = _library_for(logits)
    if library is None:
        values, places = _largest(logits)
        return torch.stack((values.double(), (places + first).double()))
    logits = logits.contiguous()
    rows, words = logits.shape
    found = torch.empty(2, rows, dtype=torch.float64)
    library.best_words(logits.data_ptr(), found.data_ptr(), rows, words, first, _DTYPE_CODES[logits.dtype])
    return found


def choose_words(found: Tensor) -> Tensor:
    """Select the words [rows] with the largest values from the ranks' results [ranks, 2, rows]; lowest of equals.

    On a CPU NO_WORD where the largest is not finite.
    """
    library = _library() if found.is_cpu else None
    if library is None:
        best = found[:, 0].argmax(0, keepdim=True)
        chosen = found[:, 1].gather(0, best)[0].long()
        if not found.is_cpu:
            return chosen
        return chosen.masked_fill_(~found[:, 0].gather(0, best)[0].isfinite(), NO_WORD)
    found = found.contiguous()
    ranks, _, rows = found.shape
    chosen = torch.empty(rows, dtype=torch.int64)
    library.choose_words(found.data_ptr(), chosen.data_ptr(), ranks, rows)
    return chosen


def edge_class(weights: NDArray[np.float32], lowest: int, shift: int, classes: int, share: float) -> tuple[int, float]:
    """Return the class of weights in which the sum of the largest reaches a share, and the sum of all classes above it.

    weights [words], not negative and contiguous. The class of one is how far its bits, as a number, are above `lowest`
    (0 where they are below), shifted right by `shift`: under `classes` for all. The last class if none reaches it.
    """
    library = _library()
    if library is None:
        places = (np.maximum(weights.view(np.int32), lowest) - lowest) >> shift
        above = np.cumsum(np.bincount(places, weights=weights, minlength=classes)[::-1])
        passed = min(int(np.searchsorted(above, share, side="left")), classes - 1)
        return classes - 1 - passed, float(above[passed - 1]) if passed else 0.0
    assert weights.dtype == np.float32 and weights.flags.c_contiguous
    sums, before = np.empty(classes), ctypes.c_double()
    sizes = len(weights), classes, lowest, shift
    edge: int = library.edge_class(weights.ctypes.data, sums.ctypes.data, ctypes.byref(before), *sizes, share)
    return edge, before.value


def _check(code: int, rows: int) -> None:
    if code:
        raise IndexError(f"a number is outside the table's rows, 0 to {rows - 1}")


def _library_for(x: Tensor) -> ctypes.CDLL | None:
    """Return the library if it supports this tensor."""
    return _library() if x.dtype in _DTYPE_CODES and x.is_cpu else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE, "-ffp-contract=off")
    if library is not None:
        number, address, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        signatures = {
            "embed_rows": (ctypes.c_int, [*[address] * 3, *[number] * 5, real, number]),
            "add_rows": (ctypes.c_int, [*[address] * 4, *[number] * 4]),
            "add": (None, [*[address] * 3, number, number]),
            "argmax_rows": (None, [address, address, *[number] * 3]),
            "best_words": (None, [address, address, *[number] * 4]),
            "choose_words": (None, [address, address, number, number]),
            "edge_class": (number, [*[address] * 3, *[number] * 4, ctypes.c_double]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library
