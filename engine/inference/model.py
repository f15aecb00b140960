"""One rank's part of a decoder of the Llama family, for inference: packed weights, no modules, no gradients.

    shard = load_shard(context, torch.bfloat16)                     # engine.inference.weights; then settle_shard
    cache = shard.new_cache(batch, capacity)
    hidden = shard.forward(tokens, cache, last_only=True)           # prefill, then one token a call
    tokens = shard.greedy(shard.head(hidden)[:, -1])

Tensor-parallel ranks each compute their heads and feed-forward columns and add up what comes of them: one sum after
attention and one after the feed-forward (`engine.inference.residual`). Embedding and head are split by words. Values
are rounded where transformers rounds them: a norm is computed in float32 and multiplied after the cast, cosines are
cast before use.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.inference.cache import KernelStep, KeyValueCache, Step
from engine.inference.graphs import static_decode
from engine.inference.residual import Residual
from engine.inference.sharding import Share
from engine.inference.stages import own_layers
from engine.kernels.linear import PackedLinear
from engine.kernels.operators import rms_norm, rotate, silu_multiply
from engine.llama import attend, rotary_frequencies
from engine.models.config import ModelConfig
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid


@dataclass(slots=True)
class Layer:
    """Weights of one layer on this rank; queries, keys and values in one product, gate and up in one."""

    input_norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(slots=True)
class Weights:
    """All weights of this rank. embedding [words, hidden] on the first stage; norm and head on the last.

    lent: packed products and embedding still lie in pages of the checkpoint's files.
    """

    layers: list[Layer]
    embedding: Tensor | None
    norm: Tensor | None
    head: PackedLinear | None
    lent: bool = False


class Shard:
    """This rank's layers, computed together with the other ranks of its tensor-parallel group."""

    def __init__(self, config: ModelConfig, grid: Grid, group: Communicator, weights: Weights) -> None:
        self.config, self.grid, self.weights, self.group = config, grid, weights, group
        self.first, self.last = grid.is_first_stage, grid.is_last_stage
        self.share = Share.of(config, grid.tp, grid.tp_rank)
        self.layers = own_layers(config, grid)
        self.dtype, self.device = weights.layers[0].input_norm.dtype, weights.layers[0].input_norm.device
        self._windows = [config.windows[layer] for layer in self.layers]
        self._frequencies = rotary_frequencies(config.rope, config.head_dim).to(self.device)
        # What each layer's sum is normed with next; after the last layer that depends on what is asked for.
        self._following = [*(layer.input_norm for layer in weights.layers[1:]), None]
        self._epsilon = config.norm_epsilon
        self._alone = grid.tp == 1
        self._queries = len(self.share.heads)
        self._turned = self._queries + len(self.share.kv_heads)
        self._stored = self._turned + len(self.share.kv_heads)
        self._values_offset = self._turned * config.head_dim * self.dtype.itemsize

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """Room for the keys and values of `batch` sequences of up to `capacity` positions."""
        with torch.inference_mode():
            return KeyValueCache(self.config, self.share, self.layers, batch, capacity, self._frequencies, self.dtype)

    @torch.inference_mode()
    def forward(
        self, inputs: Tensor, cache: KeyValueCache, padding: Tensor | None = None, last_only: bool = False
    ) -> Tensor:
        """Hidden states [batch, length, hidden] of these layers, on the last stage after the final norm.

        inputs: token ids [batch, length] on the first stage, else the hidden states of the stage before. The cache
        holds earlier positions and takes up these. padding [batch]: so many positions at the left of each row are
        filling; what comes of them means nothing and no other position sees them. last_only: on the last stage,
        only the last position, [batch, 1, hidden].
        """
        batch, length = inputs.shape[0], inputs.shape[1]
        if length == 1 and self.device.type == "cuda":
            hidden = static_decode(self, cache, inputs, padding)
        else:
            hidden = self.compute(inputs, cache.step(batch, length, padding), last_only)
        cache.length += length
        return hidden

    def compute(self, inputs: Tensor, step: Step | KernelStep, last_only: bool) -> Tensor:
        """What `forward` gives, with a step of a cache at hand; the cache's length stays."""
        hidden = self._embed(inputs) if self.first else inputs
        stream = Residual(hidden, self.group, self._epsilon)
        normed = stream.norm(self.weights.layers[0].input_norm)
        for place, (layer, following) in enumerate(zip(self.weights.layers, self._following, strict=True)):
            normed = stream.add(layer.output(self._attention(normed, layer, place, step)), layer.post_norm)
            fed = layer.down(silu_multiply(layer.gate_up(normed)))
            if following is not None:
                normed = stream.add(fed, following)
        hidden = stream.whole(fed)
        if self.weights.norm is None:
            return hidden
        return rms_norm(hidden[:, -1:] if last_only else hidden, self.weights.norm, self._epsilon)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's words, [batch, length, words], on the last stage."""
        assert self.weights.head is not None
        return self.weights.head(hidden)

    @torch.inference_mode()
    def greedy(self, local_logits: Tensor) -> Tensor:
        """The most likely token of each row of [batch, words], the lowest id of equals; the same on all ranks."""
        places = _argmax(local_logits)
        if self._alone:
            return places
        values = local_logits.gather(-1, places[:, None])[:, 0]
        # Exact for every value of 32 bits and every token id, and one message instead of two.
        found = torch.stack((values.double(), (places + self.share.vocabulary.start).double()))
        everyone = self.group.all_gather(found)
        best = everyone[:, 0].argmax(0, keepdim=True)
        return everyone[:, 1].gather(0, best)[0].long()

    @torch.inference_mode()
    def full_logits(self, local_logits: Tensor) -> Tensor:
        """Logits of all words, [.., vocabulary], from each rank's [.., words]."""
        if self._alone:
            return local_logits
        shares = [Share.of(self.config, self.grid.tp, index).vocabulary for index in range(self.grid.tp)]
        widest = max(len(share) for share in shares)
        # A gather wants equal shapes: shorter shares are filled up and cut again.
        everyone = self.group.all_gather(functional.pad(local_logits, (0, widest - local_logits.shape[-1])))
        return torch.cat([part[..., : len(share)] for part, share in zip(everyone, shares, strict=True)], dim=-1)

    def decode_weights(self) -> list[Tensor]:
        """All that a decode step reads of the packed weights; without those that a library hides."""
        return [one.stored for one in self._packed() if one.stored is not None]

    def settle(self) -> None:
        """Bring the weights to where they are read fastest (packed, in huge pages), and let go of the files."""
        for one in self._packed():
            one.settle()
        if self.weights.lent and self.weights.embedding is not None:
            self.weights.embedding = self.weights.embedding.clone()
        self.weights.lent = False

    def _packed(self) -> list[PackedLinear]:
        packed = [one for layer in self.weights.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return packed + ([self.weights.head] if self.weights.head is not None else [])

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self.weights.embedding
        assert table is not None
        if self._alone:
            return functional.embedding(tokens, table)
        # Words of other ranks count as zeros, so that the sum is exactly the one row there is.
        own = tokens - self.share.vocabulary.start
        foreign = (own < 0) | (own >= len(self.share.vocabulary))
        hidden = functional.embedding(own.masked_fill_(foreign, 0), table).masked_fill_(foreign[..., None], 0)
        return self.group.all_reduce(hidden)

    def _attention(self, hidden: Tensor, layer: Layer, place: int, step: Step | KernelStep) -> Tensor:
        """What this rank's heads make of [batch, length, hidden]: [batch, length, heads x head_dim]."""
        batch, length = hidden.shape[0], hidden.shape[1]
        merged = layer.qkv(hidden)
        heads = merged.view(batch, length, self._stored, self.config.head_dim)
        turned = heads[:, :, : self._turned]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = self._norm_heads(turned, layer.query_norm, layer.key_norm)
        if isinstance(step, KernelStep):
            values = merged.data_ptr() + self._values_offset
            return step.attention.run(place, turned.data_ptr(), values, step.starts[place])
        turned = rotate(turned, step.cos, step.sin)
        step.write(place, turned[:, :, self._queries :].transpose(1, 2), heads[:, :, self._turned :].transpose(1, 2))
        seen = step.views[self._windows[place]]
        mixed = attend(turned[:, :, : self._queries].transpose(1, 2), seen.keys[place], seen.values[place], seen.mask)
        return mixed.transpose(1, 2).reshape(batch, length, -1)

    def _norm_heads(self, turned: Tensor, query_norm: Tensor, key_norm: Tensor) -> Tensor:
        queries = rms_norm(turned[:, :, : self._queries], query_norm, self._epsilon)
        return torch.cat((queries, rms_norm(turned[:, :, self._queries :], key_norm, self._epsilon)), dim=2)


def _argmax(logits: Tensor) -> Tensor:
    """The first of the largest of each row. On a CPU numpy's is 10 to 30 times faster than torch's in 16 bits."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.float().numpy().argmax(-1))
