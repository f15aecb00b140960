"""Magnitude pruning with results independent of the layout.

    pruned("prune_50", weight, first_input=0)       # [out, in] -> the same with zeros

The smallest weights of each output are removed from groups of neighbouring inputs: two of four (`prune_2_4`, the form
that sparse units of GPUs multiply), or a share of each 32 (`prune_NN`). Ranks that hold some outputs, or inputs from a
group's start, therefore choose the same weights as a single rank. Pruning a whole row or tensor would need the other
ranks' weights; groups of 32 choose almost the same weights.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_GROUP_2_4, _GROUP_SHARE = 4, 32
_PRUNED_AT_ONCE = 1 << 18  # weights: the sorted part fits the processor's cache


def pruning_group_of(pruning: str) -> int:
    """Return the number of inputs in a group."""
    return _GROUP_2_4 if pruning == "prune_2_4" else _GROUP_SHARE


def pruned(pruning: str, weight: Tensor, first_input: int = 0) -> Tensor:
    """Return a copy of `weight` [out, in] pruned by `pruning` ("prune_2_4", "prune_50").

    first_input: index of the first input in the whole weight, for a rank's share of the inputs. Of equal weights the
    one of the first input stays. Raises ValueError if a share starts within a group.
    """
    group = pruning_group_of(pruning)
    if first_input % group:
        raise ValueError(
            f"compression: {pruning} chooses among {group} inputs, and a rank's share begins within such a group "
            f"(at input {first_input}); use a layout.tp whose shares start at multiples of {group}"
        )
    result = torch.empty_like(weight, memory_format=torch.contiguous_format)
    at_once = max(_PRUNED_AT_ONCE // weight.shape[1], 1)
    for first in range(0, len(weight), at_once):
        some = weight[first : first + at_once]
        filled = -some.shape[1] % group
        places = functional.pad(_magnitudes(some), (0, filled)).view(len(some), -1, group)
        kept = _two_of_four(places) if group == _GROUP_2_4 else _largest(places, pruning, first_input // group, filled)
        torch.mul(some, kept.flatten(1)[:, : some.shape[1]], out=result[first : first + at_once])
    return result


def _magnitudes(weight: Tensor) -> Tensor:
    """Return integers ordered as the weights' magnitudes; int32 for 16 bits, int64 for 32."""
    if weight.element_size() == 2:
        return (weight.contiguous().view(torch.int16) & 0x7FFF).to(torch.int32)
    return (weight.contiguous().view(torch.int32) & 0x7FFF_FFFF).to(torch.int64)


def _two_of_four(places: Tensor) -> Tensor:
    """Return bool [out, groups, 4]: weights with fewer than two larger ones in their group."""
    kept = []
    for own in range(_GROUP_2_4):
        larger = torch.zeros(places.shape[:2], dtype=torch.int8, device=places.device)
        for other in range(_GROUP_2_4):
            if other < own:
                larger += places[..., other] >= places[..., own]
            elif other > own:
                larger += places[..., other] > places[..., own]
        kept.append(larger < 2)
    return torch.stack(kept, dim=-1)


def _largest(places: Tensor, pruning: str, first_group: int, filled: int) -> Tensor:
    """Return bool [out, groups, 32]: all but the share of `pruning`; exact over the groups of a row.

    filled: zeros at the end of the last group, beyond the last input.
    """
    percent = int(pruning.removeprefix("prune_"))
    ends = torch.arange(first_group, first_group + places.shape[1] + 1) * _GROUP_SHARE
    ends[-1] -= filled
    dropped = (ends * percent // 100).diff()
    dropped[-1] += filled  # the smallest and last of their group, and no weights: they are not the share
    order = torch.arange(_GROUP_SHARE - 1, -1, -1, dtype=places.dtype, device=places.device)
    places = places * _GROUP_SHARE + order  # all distinct
    # numpy sorts short rows of integers several times faster than torch.
    in_order = torch.from_numpy(np.sort(places.cpu().numpy(), axis=-1)).to(places.device)
    index = dropped.to(places.device)[None, :, None].expand(len(places), -1, 1)
    kept = places >= in_order.gather(2, index.clamp(max=_GROUP_SHARE - 1))
    return kept & (index < _GROUP_SHARE)  # of 98 and 99 %, some groups keep nothing
