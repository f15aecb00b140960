"""Assemble one rank's weights from pieces of a checkpoint: convert, split fused tensors, and pack.

    assembly = Assembly(config, grid, wanted_slots(config, grid), torch.bfloat16, device)
    for piece, tensor in parts:
        assembly.put(piece, tensor)
    assembly.weights("decoder")

A product (queries, keys and values; gate and up) is packed as soon as its parts have arrived, so that no second copy of
all weights is held.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from configs.families.tensors import StackName
from engine.compression import Compressor
from engine.inference.layer import LayerWeights, Norm, StackWeights
from engine.kernels.linear import PackedLinear, Packing, pack_linear
from engine.loading import TensorSlice
from engine.models.slots import Slot
from engine.models.stages import own_layers
from engine.models.weights import HashedWeights
from engine.parallel.grid import Grid

_HEAD = "head"
_PARTS = {
    "qkv": ("query", "key", "value"),
    "output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "cross_query": ("cross_query",),
    "cross_key_value": ("cross_key", "cross_value"),
    "cross_output": ("cross_output",),
}
"""The products of a layer, and the stacked roles of each."""
_PRODUCT_OF = {role: product for product, roles in _PARTS.items() for role in roles}


class Assembly:
    """Receives a rank's pieces in any order; packs each product when its last part has arrived.

    memory_mapped: incoming tensors stay valid until the weights are finalized, and need not be copied before. nbytes:
    of all pieces; plain_bytes: of those that are not packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        grid: Grid,
        slots: Iterable[Slot],
        dtype: torch.dtype,
        device: torch.device,
        memory_mapped: bool = False,
        compressor: Compressor | None = None,
    ) -> None:
        self._config, self._grid, self._dtype, self._device, self._memory_mapped = (
            config,
            grid,
            dtype,
            device,
            memory_mapped,
        )
        self._compressor = compressor
        self._slots: defaultdict[TensorSlice, list[Slot]] = defaultdict(list)
        self._products: defaultdict[str, list[Slot]] = defaultdict(list)
        for slot in slots:
            self._slots[slot.piece].append(slot)
            product = _product(slot.name)
            if product is not None:
                self._products[product].append(slot)
        for product, parts in self._products.items():
            self._products[product] = sorted(parts, key=_place)
        self._waiting: dict[str, Tensor] = {}
        self._plain: dict[str, Tensor] = {}
        self._packed: dict[str, PackedLinear] = {}
        self._hashed = HashedWeights()
        self.nbytes = self.plain_bytes = 0

    def put(self, piece: TensorSlice, tensor: Tensor) -> None:
        """Add one piece, in any dtype."""
        tensor = tensor.to(self._device, self._dtype_of(piece))
        self.nbytes += tensor.nbytes
        whole = piece == TensorSlice(piece.name)
        self._hashed.add(piece.name, tensor, "" if whole else f"{piece.rows}{piece.columns}")
        for slot in self._slots[piece]:
            part = slot.of(tensor)
            product = _product(slot.name)
            if product is None:
                # Small tensors are copied; otherwise a page of the file would stay mapped.
                self._plain[slot.name] = (
                    part.clone() if self._memory_mapped and slot.as_stored and part.dim() == 1 else part
                )
                self.plain_bytes += part.nbytes
            else:
                self._waiting[slot.name] = part
                self._pack_if_complete(product)

    def _dtype_of(self, piece: TensorSlice) -> torch.dtype:
        """Return the dtype of a piece: wider for some, unless they are quantised (as in transformers)."""
        wide = self._config.wide_down and self._dtype is torch.float16
        if not wide or (self._compressor is not None and self._compressor.quantises):
            return self._dtype
        return torch.float32 if all(_role(slot.name) == "down" for slot in self._slots[piece]) else self._dtype

    def weights(self, stack: StackName) -> StackWeights:
        """Return all of the rank's weights of a stack; every wanted piece must have been added."""
        assert not self._waiting, f"parts without the rest: {sorted(self._waiting)}"
        grid, main = self._grid, stack == "decoder" or self._config.kind == "encoder"
        first = grid.is_first_stage
        return StackWeights(
            layers=[self._layer(f"{stack}.{layer}.") for layer in own_layers(self._config, grid, stack)],
            embedding=self._plain["embedding.weight"] if first else None,
            positions=self._plain.get("positions.weight"),
            types=self._plain.get("types.weight"),
            embedding_norm=self._norm("embedding_norm"),
            norm=self._norm(f"{stack}.norm"),
            head=self._packed.get(_HEAD) if main else None,
            relative=self._plain.get(f"{stack}.relative.weight"),
            memory_mapped=self._memory_mapped,
        )

    @property
    def hash_seconds(self) -> float:
        """Seconds spent on hashing while pieces arrived."""
        return self._hashed.seconds

    def digest(self) -> str:
        """Return 16 hexadecimal digits over all pieces: on one rank those of `engine.models.weights.weights_hash`."""
        return self._hashed.digest()

    def _pack_if_complete(self, product: str) -> None:
        """Pack one layer from the weights and biases of several, stacked, if all have arrived."""
        parts = self._products[product]
        if any(slot.name not in self._waiting for slot in parts):
            return
        tensors = {slot: self._waiting.pop(slot.name) for slot in parts}
        weights = {slot: tensor for slot, tensor in tensors.items() if tensor.dim() == 2}
        biases = [tensor for tensor in tensors.values() if tensor.dim() == 1]
        bias = torch.cat(biases) if biases else None
        packing: Packing = "memory_mapped" if self._memory_mapped else "quick"
        if self._compressor is None:
            self._packed[product] = pack_linear(list(weights.values()), bias, packing=packing)
        else:
            first = next(iter(weights)).first_input
            self._packed[product] = self._compressor.pack(list(weights.values()), bias, packing, first)

    def _norm(self, name: str) -> Norm | None:
        weight = self._plain.get(f"{name}.weight")
        return None if weight is None else Norm(weight, self._plain.get(f"{name}.bias"))

    def _layer(self, prefix: str) -> LayerWeights:
        input_norm, post_norm = self._norm(f"{prefix}input_norm"), self._norm(f"{prefix}post_norm")
        assert input_norm is not None and post_norm is not None
        return LayerWeights(
            input_norm=input_norm,
            qkv=self._packed[f"{prefix}qkv"],
            query_norm=self._plain.get(f"{prefix}query_norm.weight"),
            key_norm=self._plain.get(f"{prefix}key_norm.weight"),
            output=self._packed[f"{prefix}output"],
            post_norm=post_norm,
            gate_up=self._packed[f"{prefix}gate_up"],
            down=self._packed[f"{prefix}down"],
            cross_norm=self._norm(f"{prefix}cross_norm"),
            cross_query=self._packed.get(f"{prefix}cross_query"),
            cross_key_value=self._packed.get(f"{prefix}cross_key_value"),
            cross_output=self._packed.get(f"{prefix}cross_output"),
        )


def _product(slot: str) -> str | None:
    """Return the packed product that a slot belongs to; None: the slot is not packed."""
    if slot.startswith(f"{_HEAD}."):
        return _HEAD
    prefix = slot.rpartition(".")[0].rpartition(".")[0]
    product = _PRODUCT_OF.get(_role(slot))
    return None if product is None else f"{prefix}.{product}"


def _role(slot: str) -> str:
    """Return the role in a slot's name: "decoder.3.down.weight" is "down"."""
    return slot.rpartition(".")[0].rpartition(".")[2]


def _place(slot: Slot) -> tuple[bool, int]:
    """Sort key: weights before biases, each in the order of the roles."""
    kind, role = slot.name.rpartition(".")[2], _role(slot.name)
    roles = _PARTS.get(_PRODUCT_OF.get(role, ""), ())
    return kind == "bias", roles.index(role) if role in roles else 0
