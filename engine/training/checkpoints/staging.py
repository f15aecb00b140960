"""What of a state a rank saves, and the copy of it that the training does not change meanwhile.

mine = shared_out(state, rank, ranks)
staged = staging.copied(mine)
rest = values_of(state)
"""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

State = dict[str, Any]
_PIECE_BYTES = 1 << 19
"""What torch does for each tensor that it writes takes as long as to write about so much more of it."""


def shared_out(state: State, rank: int, ranks: int) -> State:
    """The tensors of a state that a rank saves: its shards, and its share of what all hold alike; no single numbers.

    All ranks hold the same keys, so that all come to the same shares.
    """
    sizes = {path: leaf.nbytes for path, leaf in leaves(state) if _is_whole(leaf) and not is_value(leaf)}
    load, owner = [0] * ranks, {}
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        owner[path] = load.index(min(load))
        load[owner[path]] += sizes[path] + _PIECE_BYTES

    def mine(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            kept = {key: mine(item, (*path, str(key))) for key, item in value.items()}
            return {key: item for key, item in kept.items() if item is not None and item != {}}
        if isinstance(value, DTensor):
            return value
        return value if owner.get(path) == rank else None

    part: State = mine(state, ())
    return part


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    else:
        yield path, value


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)


def is_value(leaf: Any) -> bool:
    """Whether it is kept among the values: what is no tensor, and tensors of one number, as optimizers count steps."""
    return not isinstance(leaf, Tensor) or (leaf.dim() == 0 and not isinstance(leaf, DTensor))


def values_of(state: State) -> bytes:
    """All values by name, pickled. In one piece: torch would write each hyperparameter of each weight by itself, and
    look at each of thousands of values in Python while it pickles a list of them."""
    found = [(".".join(path), leaf) for path, leaf in leaves(state) if is_value(leaf)]
    return pickle.dumps([(name, leaf.cpu() if isinstance(leaf, Tensor) else leaf) for name, leaf in found])


class Staging:
    """A copy of a state in memory of the CPU, which is kept for the next one."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def copied(self, state: State) -> State:
        """What the state is now; overwritten by the next call."""
        staged: State = self._copied(state, ())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged

    def _copied(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(item, (*path, str(key))) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        kept = self._kept.get(path)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = torch.empty_like(value, device="cpu")
            kept = self._kept[path] = kept.pin_memory() if value.is_cuda and not isinstance(value, DTensor) else kept
        local(kept).copy_(local(value), non_blocking=True)
        return kept


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it; without gradients."""
    if not isinstance(tensor, DTensor):
        return tensor
    held: Tensor = tensor.to_local()
    return held
