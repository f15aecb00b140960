"""Weights of one rank's part of one stack, in canonical form for all families.

    layer = LayerWeights(Norm(weight), qkv, None, None, output, Norm(other), gate_up, down)
    weights = StackWeights([layer], embedding=table, norm=Norm(last), head=head)

Weights that a family lacks are None; the loader converts names and fused tensors to this form
(`engine.inference.weights`).
"""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias [width] of a norm; a root-mean-square norm has no bias."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer on this rank; queries, keys and values in one product, gate and up in one.

    gate_up: up alone without a gate. In the order "pre", input_norm feeds attention and post_norm the feed-forward; in
    "parallel" too, both of the layer's input; in "post", input_norm follows attention's sum and post_norm the
    feed-forward's. Cross attention of an encoder-decoder: cross_key_value computes keys, then values.
    """

    input_norm: Norm
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    post_norm: Norm
    gate_up: PackedLinear
    down: PackedLinear
    cross_norm: Norm | None = None
    cross_query: PackedLinear | None = None
    cross_key_value: PackedLinear | None = None
    cross_output: PackedLinear | None = None

    def packed(self) -> list[PackedLinear]:
        """Return the products, in the order of use in a pass."""
        crossing = (self.cross_query, self.cross_key_value, self.cross_output)
        products = [self.qkv, self.output, *crossing, self.gate_up, self.down]
        return [one for one in products if one is not None]


@dataclass(slots=True)
class StackWeights:
    """All weights of this rank in one stack.

    On the first stage: embedding [words, hidden], a share of the words; positions, types [rows, hidden], whole;
    embedding_norm. On the last: norm and head. relative [heads of the rank, buckets]: on every stage.
    memory_mapped: packed products and embedding are still in pages of the checkpoint's files.
    """

    layers: list[LayerWeights]
    embedding: Tensor | None = None
    positions: Tensor | None = None
    types: Tensor | None = None
    embedding_norm: Norm | None = None
    norm: Norm | None = None
    head: PackedLinear | None = None
    relative: Tensor | None = None
    memory_mapped: bool = False

    def packed(self) -> list[PackedLinear]:
        """Return the products of all layers, then the head."""
        products = [one for layer in self.layers for one in layer.packed()]
        return products if self.head is None else [*products, self.head]
