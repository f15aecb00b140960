"""Select the tensors that a rank saves, and copy them so that training can continue.

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

TensorState = dict[str, Any]
_PIECE_BYTES = 1 << 19
"""torch's overhead per written tensor equals the time of writing about this many bytes."""


def shared_out(state: TensorState, rank: int, ranks: int) -> TensorState:
    """Return the tensors that a rank saves: its shards, and its share of replicated tensors; no single numbers.

    All ranks hold the same keys, so all compute the same shares.
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

    part: TensorState = mine(state, ())
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
    """Return whether it is saved with the values: non-tensors, and tensors of one number."""
    return not isinstance(leaf, Tensor) or (leaf.dim() == 0 and not isinstance(leaf, DTensor))


def values_of(state: TensorState) -> bytes:
    """Return all values by name, pickled as one object: torch would write each hyperparameter of each weight
    separately, and process thousands of values in Python when pickling a list.
    """
    found = [(".".join(path), leaf) for path, leaf in leaves(state) if is_value(leaf)]
    return pickle.dumps([(name, leaf.cpu() if isinstance(leaf, Tensor) else leaf) for name, leaf in found])


class Staging:
    """A copy of a state in CPU memory, reused for the next one."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def copied(self, state: TensorState) -> TensorState:
        """Copy the current state; overwritten by the next call."""
        staged: TensorState = self._copied(state, ())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # not: is there a GPU, which would open it
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
    """Return this rank's local part, without gradients."""
    if not isinstance(tensor, DTensor):
        return tensor
    held: Tensor = tensor.to_local()
    return held
