"""Draw tokens on the ranks, by temperature and filters, as `next_token` of `choosing` does.

    draws = as_draws([(row, sampling, place), ...])      # float64 [fields, draws], on the host
    tokens = draw_tokens(logits, draws.to(device), count_unfiltered(draws))      # a GPU: all rows at once
    tokens = draw_in_shares(logits, draws, group)                                # CPUs: each rank of a group some

A GPU's step takes a few milliseconds, as long as numpy for a single row of a large vocabulary. A row's draw depends on
its own logits and numbers only; sums of 64-bit numbers may differ from numpy's in the last bit.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from engine.kernels.rows import NO_WORD, argmax_rows
from engine.parallel.communicator import Communicator
from engine.serving.choosing import drawn_token, uniform
from engine.serving.sampling import Sampling

DRAW_FIELDS = 6
"""Row, temperature, top_k, top_p, min_p and the random number in [0, 1)."""
_MOST_VALUES = 1 << 22
"""Logits at a time: their weights and sums take 8 bytes each."""


def as_draws(wanted: Iterable[tuple[int, Sampling, int]]) -> Tensor:
    """Return the draws of rows, float64 [DRAW_FIELDS, draws], those without top_k and top_p first.

    wanted: row of the logits, sampling with a temperature, and the place of the token in its answer.
    """
    draws = [(row, one.temperature, one.top_k, one.top_p, one.min_p, uniform(one, place)) for row, one, place in wanted]
    draws.sort(key=lambda draw: draw[2] != 0 or draw[3] < 1.0)
    return torch.tensor(draws, dtype=torch.float64).view(len(draws), DRAW_FIELDS).T


def count_unfiltered(draws: Tensor) -> int:
    """Return how many draws are of all words; they come first."""
    return int(((draws[2] == 0) & (draws[3] >= 1.0)).sum())


def draw_tokens(logits: Tensor, draws: Tensor, unfiltered: int) -> Tensor:
    """Return a token id for each row, int64 [rows]: drawn, or the most likely one where no draw names the row.

    logits float32 [rows, words], draws float64 [DRAW_FIELDS, draws] on the same device. NO_WORD where a drawn row's
    logits are not finite.
    """
    tokens = argmax_rows(logits)
    most = max(1, _MOST_VALUES // logits.shape[1])
    for draw, first, end in ((_drawn, 0, unfiltered), (_drawn_of_kept, unfiltered, draws.shape[1])):
        for start in range(first, end, most):
            some = draws[:, start : min(start + most, end)]
            rows = some[0].long()
            own = logits[rows]
            drawn = draw(own, some).masked_fill_(~own.isfinite().all(-1), NO_WORD)
            tokens = tokens.index_copy(0, rows, drawn)
    return tokens


def draw_in_shares(logits: Tensor, draws: Tensor, group: Communicator) -> Tensor:
    """As `draw_tokens`, on a CPU; all ranks of the group call it with equal logits, and each draws some rows."""
    tokens = argmax_rows(logits)
    mine = torch.zeros(draws.shape[1], dtype=torch.float64)
    rows = draws[0].long()
    for place in range(group.index, draws.shape[1], group.size):
        own = logits[rows[place]].numpy()
        temperature, top_k, top_p, min_p, chance = draws[1:, place].tolist()
        finite = bool(np.isfinite(own).all())
        mine[place] = drawn_token(own, temperature, int(top_k), top_p, min_p, chance) if finite else NO_WORD
    # Each place is drawn by one rank; a word's number is exact in 64 bits.
    return tokens.index_copy(0, rows, group.all_gather(mine).sum(0).long())


def _weights(logits: Tensor, draws: Tensor) -> Tensor:
    """Return the weight of each word over that of the most likely one, float64, 0 below min_p."""
    wide = logits.double()
    weights = wide.sub_(wide.amax(-1, keepdim=True)).div_(draws[1][:, None]).exp_()
    return weights.masked_fill_(weights < draws[4][:, None], 0.0)


def _drawn(logits: Tensor, draws: Tensor) -> Tensor:
    sums = _weights(logits, draws).cumsum(-1)
    return _place(sums, sums[:, -1:], draws[5][:, None])


def _drawn_of_kept(logits: Tensor, draws: Tensor) -> Tensor:
    """Draw after top_k and top_p, which keep the largest logits, the lower id of equals first."""
    ranked, words = logits.sort(dim=-1, descending=True, stable=True)
    top_k, top_p = draws[2][:, None].long(), draws[3][:, None]
    places = torch.arange(logits.shape[1], device=logits.device)
    weights = _weights(ranked, draws)
    weights = weights.masked_fill_((places >= top_k) & (top_k > 0), 0.0)
    sums = weights.cumsum(-1)
    # The smallest set that has the share; at most all, whose share of rounded sums can stay below 1.
    last = torch.searchsorted(sums, top_p * sums[:, -1:]).clamp_(max=logits.shape[1] - 1)
    kept = torch.zeros_like(weights).scatter_(-1, words, weights.masked_fill_(places > last, 0.0)).cumsum(-1)
    return _place(kept, kept[:, -1:], draws[5][:, None])


def _place(sums: Tensor, total: Tensor, chance: Tensor) -> Tensor:
    """Return the first place whose sum exceeds `chance` of the total, at most the last that adds to it."""
    found = torch.searchsorted(sums, chance * total, right=True)
    return torch.minimum(found, (sums < total).sum(-1, keepdim=True))[:, 0]
