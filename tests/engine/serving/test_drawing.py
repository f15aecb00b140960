"""Draws of many rows on a device against the choice of one row in numpy."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.rows import NO_WORD
from engine.parallel.communicator import Communicator
from engine.serving import drawing
from engine.serving.choosing import next_token
from engine.serving.drawing import as_draws, count_unfiltered, draw_in_shares, draw_tokens
from engine.serving.sampling import Sampling
from tests.support.patience import patient

_DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
)
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 50},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1e-300},
    {"temperature": 1.0, "top_p": 1e-9},
)


def drawn_together(logits: torch.Tensor, samplings: list[Sampling], places: list[int], device: str) -> list[int]:
    wanted = [(row, one, place) for row, (one, place) in enumerate(zip(samplings, places, strict=True))]
    draws = as_draws([one for one in wanted if one[1].temperature])
    tokens: list[int] = draw_tokens(logits.to(device), draws.to(device), count_unfiltered(draws)).tolist()
    return tokens


def chosen_alone(logits: torch.Tensor, samplings: list[Sampling], places: list[int]) -> list[int]:
    return [
        next_token(row.numpy(), sampling, [0], [0] * place).token
        for row, sampling, place in zip(logits, samplings, places, strict=True)
    ]


@pytest.mark.parametrize("device", _DEVICES)
def test_a_row_draws_in_company_what_numpy_chooses_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_MOST_VALUES", 7 * 5000)  # several parts
    generator = torch.Generator().manual_seed(1)
    # Coarse values: many equals, as 16 bits have them.
    logits = (torch.randn((96, 5000), generator=generator) * 3).bfloat16().float()
    samplings = [
        Sampling() if row % 9 == 8 else Sampling(**_SAMPLINGS[row % 9], seed=row // 9, choice=row % 2)
        for row in range(len(logits))
    ]
    places = [row % 130 for row in range(len(logits))]
    got = drawn_together(logits, samplings, places, device)
    assert got == chosen_alone(logits, samplings, places)
    assert got != logits.argmax(-1).tolist()


def test_ranks_share_the_rows_and_all_get_every_token() -> None:
    logits = torch.randn((9, 400), generator=torch.Generator().manual_seed(4))
    logits[4, 3] = float("nan")
    samplings = [Sampling(**_SAMPLINGS[row % 5], seed=row) if row != 7 else Sampling() for row in range(9)]
    draws = as_draws([(row, one, row) for row, one in enumerate(samplings) if one.temperature])
    expected = [NO_WORD if row == 4 else one for row, one in enumerate(_chosen_but(logits, samplings, 4))]
    assert draw_in_shares(logits, draws, Communicator((0,), 0)).tolist() == expected

    with ThreadPoolExecutor(2) as pool:
        groups = Pair(0), Pair(1)
        groups[0].other, groups[1].other = groups[1], groups[0]
        found = list(pool.map(lambda group: draw_in_shares(logits, draws, group), groups))
    assert [one.tolist() for one in found] == [expected, expected]
    assert all(group.drawn == 4 for group in groups), "half of the eight draws each"


def _chosen_but(logits: torch.Tensor, samplings: list[Sampling], bad: int) -> list[int]:
    """The choices of all rows, with any for one that is not finite."""
    rows = logits.clone()
    rows[bad] = 0.0
    return chosen_alone(rows, samplings, list(range(len(rows))))


class Pair:
    """One of two ranks in threads."""

    other: "Pair"
    size = 2

    def __init__(self, index: int) -> None:
        self.index = index
        self.sent: Queue[torch.Tensor] = Queue()
        self.drawn = 0

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.drawn = int(tensor.count_nonzero())
        self.sent.put(tensor)
        parts = [tensor, self.other.sent.get(timeout=patient(10))]
        return torch.stack(parts if self.index == 0 else parts[::-1])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-40, 40, width=32), min_size=1, max_size=12),
    st.floats(1e-3, 5),
    st.integers(0, 14),
    st.floats(1e-6, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_any_filters(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = torch.tensor([values])
    (got,) = drawn_together(logits, [sampling], [0], "cpu")
    weights = np.exp((np.asarray(values, dtype=np.float64) - max(values)) / temperature)
    expected = chosen_alone(logits, [sampling], [0])[0]
    # At the edge of a sum the last bit may decide.
    assert got == expected or np.isclose(weights[got], weights[expected], rtol=1e-9) or _at_an_edge(weights, sampling)


def _at_an_edge(weights: np.ndarray, sampling: Sampling) -> bool:
    """Whether the share of top_p is that of a set, within rounding."""
    ranked = np.sort(np.where(weights < sampling.min_p, 0.0, weights))[::-1]
    sums = np.cumsum(ranked[: sampling.top_k or None])
    return bool(np.isclose(sums, sampling.top_p * sums[-1], rtol=1e-12, atol=0).any())


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.5}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_choose_no_word(value: float, fields: dict[str, Any], device: str) -> None:
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(2))
    logits[1, 7] = value
    samplings = [Sampling(temperature=1.0, seed=row, **fields) for row in range(3)]
    got = drawn_together(logits, samplings, [0, 0, 0], device)
    assert got[1] == NO_WORD and got[::2] == chosen_alone(logits[::2], samplings[::2], [0, 0])
