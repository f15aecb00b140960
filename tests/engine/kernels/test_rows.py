"""Embedding rows and words against torch's operators, bit by bit, in every way that this machine can run them."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from engine.kernels import rows
from engine.kernels.rows import NO_WORD, add, add_rows, argmax_rows, best_words, choose_words, edge_class, embed_rows

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (1, 7, 16, 33, 64)


@pytest.fixture(params=("on", "avx2", "off"), autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setenv("RANKWISE_KERNELS", request.param)
    library = rows._library  # a test may replace it
    library.cache_clear()
    assert (library() is None) == (request.param == "off")
    yield str(request.param)
    library.cache_clear()


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_those_of_the_table(dtype: torch.dtype, width: int) -> None:
    table, ids = numbers(30, width, dtype=dtype), torch.tensor([[0, 29, 7], [7, 12, 1]])
    assert torch.equal(embed_rows(ids, table), functional.embedding(ids, table))
    assert torch.equal(embed_rows(ids[:, 1:2], table), functional.embedding(ids[:, 1:2], table))
    scale = torch.tensor(5.477, dtype=dtype)  # what transformers multiplies Gemma's embedding with
    assert torch.equal(embed_rows(ids, table, scale=5.477), functional.embedding(ids, table) * scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_of_a_table_add_up_to_its_rows(dtype: torch.dtype) -> None:
    table, ids = numbers(30, 20, dtype=dtype), torch.tensor([0, 29, 9, 10, 11])
    parts = embed_rows(ids, table[:10], first=0), embed_rows(ids, table[10:], first=10)
    assert torch.equal(parts[0] + parts[1], functional.embedding(ids, table))
    assert not parts[0][1].any() and not parts[1][0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_rounded_as_torch_rounds(dtype: torch.dtype, width: int) -> None:
    hidden, table = numbers(2, 3, width, dtype=dtype), numbers(9, width, dtype=dtype, seed=1)
    ids = torch.tensor([[0, 8, 3], [4, 4, 1]])
    assert torch.equal(add_rows(hidden, ids, table), hidden + table[ids])
    assert torch.equal(add(hidden, table[ids]), hidden + table[ids])


def test_a_number_outside_the_table_is_an_error() -> None:
    table = numbers(4, 8, dtype=torch.float32)
    for wrong in (-1, 4):
        with pytest.raises(IndexError):
            embed_rows(torch.tensor([0, wrong]), table)
        with pytest.raises(IndexError):
            add_rows(table[:2], torch.tensor([0, wrong]), table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", (1, 15, 16, 64, 65, 127, 1000))
def test_the_first_of_the_largest_is_found_wherever_it_stands(dtype: torch.dtype, words: int) -> None:
    logits = numbers(7, words, dtype=dtype)
    logits[1] = float("-inf")
    logits[2, words // 2 :] = 9
    logits[3, -1] = logits[3, 0] = 9
    logits[4, words // 3 :: 2] = float("nan")
    logits[5, -1] = float("inf")
    logits[6] = -0.0
    logits[6, words // 2] = 0.0
    assert argmax_rows(logits).tolist() == expected_words(logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_choose_the_word_that_one_would_choose(dtype: torch.dtype) -> None:
    logits = numbers(5, 100, dtype=dtype)
    logits[1, [20, 50, 99]] = 9  # equals on three ranks
    logits[2, 70] = float("nan")
    logits[3] = float("-inf")
    cuts = ((0, 40), (40, 60), (60, 100))
    found = torch.stack([best_words(logits[:, first:end], first) for first, end in cuts])
    assert choose_words(found).tolist() == expected_words(logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_marks_what_the_kernels_mark(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = numbers(5, 100, dtype=dtype)
    logits[1, 7], logits[2, 70], logits[3] = float("nan"), float("inf"), float("-inf")
    table = numbers(100, 16, dtype=dtype)
    words = argmax_rows(logits)
    assert words.tolist()[1:4] == [NO_WORD] * 3
    hidden, split = embed_rows(words, table), embed_rows(words, table[50:], 50)
    assert torch.equal(hidden[1], table[0])
    monkeypatch.setattr(rows, "_library", functools.cache(lambda: None))
    assert torch.equal(argmax_rows(logits), words)
    assert torch.equal(
        choose_words(torch.stack([best_words(logits[:, :40], 0), best_words(logits[:, 40:], 40)])), words
    )
    assert torch.equal(embed_rows(words, table), hidden) and torch.equal(embed_rows(words, table[50:], 50), split)


def expected_words(logits: torch.Tensor) -> list[int]:
    """numpy's choice, and NO_WORD where the largest is not finite."""
    values = logits.float().numpy()
    chosen = values.argmax(-1)
    return [int(word) if np.isfinite(row[word]) else NO_WORD for row, word in zip(values, chosen, strict=True)]


@pytest.mark.parametrize("share", (0.0, 0.3, 0.9, 1.0, 2.0))
@pytest.mark.parametrize("words", (1, 40, 3000))
def test_the_class_in_which_a_share_is_reached(words: int, share: float) -> None:
    weights = np.random.default_rng(words).exponential(size=words).astype(np.float32)
    weights[0], weights[-1] = 0.0, 1.0
    lowest, shift = int(np.float32(0.1).view(np.int32)), 16
    places = [max(0, int(one) - lowest) >> shift for one in weights.view(np.int32)]
    classes = max(places) + 3  # the last ones are empty
    wanted = share * float(weights.sum(dtype=np.float64))
    sums = [0.0] * classes
    for place, weight in zip(places, weights.tolist(), strict=True):
        sums[place] += weight
    above, edge = 0.0, classes - 1
    while edge and above + sums[edge] < wanted:
        above, edge = above + sums[edge], edge - 1
    assert edge_class(weights, lowest, shift, classes, wanted) == (edge, above)
