"""Magnitude pruning: which weights become zero, decided so that every layout decides alike.

    pruned("prune_50", weight, first_input=0)       # [out, in] -> the same with zeros

The smallest weights go, in each output for itself, out of groups of neighbouring inputs: two of four (`prune_2_4`, the
form that sparse units of GPUs multiply), or a share of each 32 (`prune_NN`). Ranks that hold some outputs, or some
inputs from a group's start on, so choose the same weights as one rank that holds all. Taking the smallest of a whole
row or tensor would need the others' weights; out of 32 at a time, hardly any weight goes that would have stayed.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_GROUP_2_4, _GROUP_SHARE = 4, 32
_PRUNED_AT_ONCE = 1 << 18  # weights: what is sorted stays in the processor's cache


def group_of(pruning: str) -> int:
    """Inputs among which a pass chooses."""
    return _GROUP_2_4 if pruning == "prune_2_4" else _GROUP_SHARE


def pruned(pruning: str, weight: Tensor, first_input: int = 0) -> Tensor:
    """A copy of `weight` [out, in] with zeros where `pruning` ("prune_2_4", "prune_50") puts them.

    first_input: the number that the first input has in the whole weight, where this is a rank's share of the inputs.
    Of equal weights the one of the first input stays. Raises ValueError where a share starts within a group.
    """
    group = group_of(pruning)
    if first_input % group:
        raise ValueError(
            f"compression: {pruning} chooses among {group} inputs, and a rank's share begins within such a group "
            f"(at input {first_input}); use a layout.tp whose shares start at multiples of {group}"
        )
    result = torch.empty_like(weight, memory_format=torch.contiguous_format)
    at_once = max(_PRUNED_AT_ONCE // weight.shape[1], 1)
    for first in range(0, len(weight), at_once):
        some = weight[first : first + at_once]
        places = functional.pad(_magnitudes(some), (0, -some.shape[1] % group)).view(len(some), -1, group)
        kept = _two_of_four(places) if group == _GROUP_2_4 else _largest(places, pruning, first_input // group)
        torch.mul(some, kept.flatten(1)[:, : some.shape[1]], out=result[first : first + at_once])
    return result


def _magnitudes(weight: Tensor) -> Tensor:
    """Integers in the order of the weights' magnitudes; int32 for 16 bits, int64 for 32."""
    if weight.element_size() == 2:
        return (weight.contiguous().view(torch.int16) & 0x7FFF).to(torch.int32)
    return (weight.contiguous().view(torch.int32) & 0x7FFF_FFFF).to(torch.int64)


def _two_of_four(places: Tensor) -> Tensor:
    """bool [out, groups, 4]: those with fewer than two larger ones beside them."""
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


def _largest(places: Tensor, pruning: str, first_group: int) -> Tensor:
    """bool [out, groups, 32]: all but the share that `pruning` names; over the groups of a row it is met exactly."""
    percent = int(pruning.removeprefix("prune_"))
    groups = torch.arange(first_group, first_group + places.shape[1] + 1)
    dropped = (groups * _GROUP_SHARE * percent // 100).diff()
    order = torch.arange(_GROUP_SHARE - 1, -1, -1, dtype=places.dtype, device=places.device)
    places = places * _GROUP_SHARE + order  # no two alike
    # numpy sorts short rows of integers several times faster than torch.
    in_order = torch.from_numpy(np.sort(places.cpu().numpy(), axis=-1)).to(places.device)
    index = dropped.to(places.device)[None, :, None].expand(len(places), -1, 1)
    return places >= in_order.gather(2, index)
