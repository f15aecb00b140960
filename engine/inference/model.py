"""One rank's shard of one stack of a model, for inference: packed weights, no modules, no gradients.

    shard = load_shard(context, torch.bfloat16)                     # engine.inference.weights; then finalize_weights
    cache = shard.new_cache(batch, capacity)
    hidden = shard.forward(tokens, cache, last_only=True)           # prefill, then one token a call
    tokens = shard.greedy(shard.head(hidden)[:, -1])
    states = shard.encode(tokens, padding)                          # for an encoder

Tensor-parallel ranks each compute their heads and feed-forward columns and all-reduce the results: once after attention
and once after the feed-forward, or once for both if they are parallel (`engine.inference.residual`). Embedding and head
are split by words. Values are rounded where transformers rounds them.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from configs.families.config import ModelConfig
from engine.inference.cache import CachePositions, CacheStep, GpuStep, KernelStep, KeyValueCache
from engine.inference.encoding import EncoderStep
from engine.inference.graphs import static_decode
from engine.inference.layer import LayerWeights, Norm, StackWeights
from engine.inference.paged import PagedCache, PagedSizes, PagedStep
from engine.inference.positions import causal_bias
from engine.inference.residual import NormRule, Residual
from engine.kernels.operators import activate, multiply, rms_norm_heads, rotate
from engine.kernels.rows import add, add_rows, argmax_rows, best_words, choose_words, embed_rows
from engine.models.llama import attend, rotary_frequencies
from engine.models.sharding import Share
from engine.models.stages import own_layers
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from engine.parallel.transports import graph_obstacle

AnyStep = CacheStep | GpuStep | KernelStep | PagedStep | EncoderStep


class Shard:
    """This rank's layers of a stack, computed together with the other ranks of its tensor-parallel group."""

    def __init__(
        self,
        config: ModelConfig,
        grid: Grid,
        group: Communicator,
        weights: StackWeights,
        stack: Literal["decoder", "encoder"] = "decoder",
        layers: range | None = None,
    ) -> None:
        """layers: layers of the stack on this stage; None for those of the model's only stack."""
        self.config, self.grid, self.weights, self.group = config, grid, weights, group
        self.stack = stack
        self.first, self.last = grid.is_first_stage, grid.is_last_stage
        self.share = Share.of(config, grid.tp, grid.tp_rank)
        self.layers = own_layers(config, grid) if layers is None else layers
        some = weights.layers[0].input_norm.weight
        self.dtype, self.device = some.dtype, some.device
        self.stream_dtype = torch.promote_types(self.dtype, weights.layers[0].down.dtype)
        self._windows = [config.windows[layer] for layer in self.layers] if stack == "decoder" else []
        self._rule = NormRule(config.norm, config.norm_epsilon)
        self._input_norms = [self._norm_of(layer.input_norm) for layer in weights.layers]
        self._cross_norms = [layer.cross_norm and self._norm_of(layer.cross_norm) for layer in weights.layers]
        self._post_norms = [self._norm_of(layer.post_norm) for layer in weights.layers]
        self._last_norm = None if weights.norm is None else self._norm_of(weights.norm)
        # torch's own is the same to the last bit, which ours need not be.
        usual = config.attention_scale == config.head_dim**-0.5
        self._scale = None if usual else config.attention_scale
        self._alone = grid.tp == 1
        self._queries = len(self.share.heads)
        self._turned = self._queries + len(self.share.kv_heads)
        self._stored = self._turned + len(self.share.kv_heads)
        self._values_offset = self._turned * config.head_dim * self.dtype.itemsize
        self._frequencies = self._frequencies_of_pairs()
        self.uses_graphs = graph_obstacle(self.device.type, group.transport) is None

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """Allocate keys and values of `batch` sequences of up to `capacity` positions.

        Raises ValueError if the model has fewer learned positions.
        """
        config, weights = self.config, self.weights
        if config.positions == "learned" and capacity > config.max_positions:
            raise ValueError(
                f"workload: {capacity} tokens of a prompt and its answer are more than the {config.max_positions} "
                "positions that the model has learned; use shorter prompts or fewer workload.new_tokens"
            )
        with torch.inference_mode():
            by_distance = None
            if weights.relative is not None:
                by_distance = causal_bias(weights.relative, config.relative_buckets, config.relative_distance, capacity)
            positions = CachePositions(self._frequencies, by_distance)
            crossing = [one.cross_key_value for one in weights.layers if one.cross_key_value is not None]
            some = weights.layers[0].input_norm.weight
            return KeyValueCache(config, self.share, self.layers, batch, capacity, positions, some, crossing)

    def new_paged_cache(self, sizes: PagedSizes) -> PagedCache:
        """Allocate a cache in blocks, for a decoder whose positions are rotated, learned or none.

        Raises ValueError for an encoder, for an encoder-decoder, and for more positions than the model has learned.
        """
        config = self.config
        if config.kind != "decoder":
            raise ValueError(f"{config.family}: a paged cache is for decoders")
        if config.positions == "learned" and sizes.max_length > config.max_positions:
            raise ValueError(f"{sizes.max_length} positions are more than the {config.max_positions} that were learned")
        with torch.inference_mode():
            some = self.weights.layers[0].input_norm.weight
            return PagedCache(config, self.share, self.layers, sizes, self._frequencies, some)

    @torch.inference_mode()
    def forward(
        self, inputs: Tensor, cache: KeyValueCache, padding: Tensor | None = None, last_only: bool = False
    ) -> Tensor:
        """Return hidden states [batch, length, hidden] of these layers, on the last stage after the final norm.

        inputs: token ids [batch, length] on the first stage, else the hidden states of the previous stage. The cache
        holds earlier positions; these are appended. padding [batch]: number of padding positions at the left of each
        row; their results are meaningless and no other position attends to them. last_only: on the last stage, only the
        last position, [batch, 1, hidden].
        """
        batch, length = inputs.shape[0], inputs.shape[1]
        if length == 1 and self.uses_graphs:
            hidden = static_decode(self, cache, inputs, padding)
        else:
            hidden = self.compute(inputs, cache.step(batch, length, padding), last_only)
        cache.length += length
        return hidden

    @torch.inference_mode()
    def encode(self, inputs: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return hidden states [batch, length, hidden] of an encoder's layers, with bidirectional attention.

        inputs and padding as for `forward`; nothing is cached.
        """
        step = EncoderStep.of(self.config, self.weights, inputs.shape[0], inputs.shape[1], padding, self.device)
        return self.compute(inputs, step, last_only=False)

    def compute(self, inputs: Tensor, step: AnyStep, last_only: bool) -> Tensor:
        """Compute the result of `forward` with a given step of a cache; the cache's length is unchanged."""
        hidden = self._embed(inputs, step) if self.first else inputs
        stream = Residual(hidden, self.group, self._rule)
        if self.config.order == "post":
            return self._post(hidden, stream, step, last_only)
        part = self._pre(stream, step) if self.config.order == "pre" else self._parallel(stream, step)
        if self._last_norm is None:
            hidden = stream.whole(part)
            return hidden[:, -1:] if last_only and self.last else hidden
        if last_only and hidden.shape[1] > 1:
            return self._rule.norm(stream.whole(part)[:, -1:], self._last_norm)
        return stream.add(part, self._last_norm)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return logits of this rank's words, [batch, length, words], on the last stage."""
        assert self.weights.head is not None
        if self.config.head_scale != 1.0:
            hidden = multiply(hidden, self.config.head_scale)
        return self.weights.head(hidden)

    @torch.inference_mode()
    def greedy(self, local_logits: Tensor) -> Tensor:
        """Return the most likely token of each row of [batch, words], the lowest id of equals; equal on all ranks."""
        if self._alone:
            return argmax_rows(local_logits)
        # One message instead of two: values and indices together.
        return choose_words(self.group.all_gather(best_words(local_logits, self.share.vocabulary.start)))

    @torch.inference_mode()
    def full_logits(self, local_logits: Tensor) -> Tensor:
        """Return logits of all words, [.., vocabulary], from each rank's [.., words]."""
        if self._alone:
            return local_logits
        shares = [Share.of(self.config, self.grid.tp, index).vocabulary for index in range(self.grid.tp)]
        widest = max(len(share) for share in shares)
        # All-gather needs equal shapes: shorter shares are padded and cut again.
        everyone = self.group.all_gather(functional.pad(local_logits, (0, widest - local_logits.shape[-1])))
        return torch.cat([part[..., : len(share)] for part, share in zip(everyone, shares, strict=True)], dim=-1)

    def decode_weights(self) -> list[Tensor]:
        """Return all packed weights that a decode step reads, except those hidden by a library."""
        once = {id(layer.cross_key_value) for layer in self.weights.layers}
        packed = (one for one in self.weights.packed() if id(one) not in once)
        return [one.stored for one in packed if one.stored is not None]

    def finalize(self) -> None:
        """Move the packed weights into huge pages, and release the files."""
        for one in self.weights.packed():
            one.finalize()
        if self.weights.memory_mapped and self.weights.embedding is not None:
            self.weights.embedding = self.weights.embedding.clone()
        self.weights.memory_mapped = False

    def _norm_of(self, norm: Norm) -> Norm:
        """Return a norm with the family's offset added to its weights, in float32, as 16 bits may be too few."""
        return Norm(norm.weight.float() + self.config.norm_offset) if self.config.norm_offset else norm

    def _frequencies_of_pairs(self) -> Tensor | None:
        """Return radians per position of each pair of a head; pairs without rotation come last and have none."""
        config = self.config
        if config.rope is None:
            return None
        turning = rotary_frequencies(config.rope, config.rotary_dim)
        return functional.pad(turning, (0, config.head_dim // 2 - len(turning))).to(self.device)

    def _embed(self, tokens: Tensor, step: AnyStep) -> Tensor:
        weights, scale = self.weights, self.config.embedding_scale
        assert weights.embedding is not None
        if self._alone:
            hidden = embed_rows(tokens, weights.embedding, scale=scale)
        else:
            # Words of other ranks give zeros, so that the sum is exactly the row.
            hidden = embed_rows(tokens, weights.embedding, self.share.vocabulary.start, scale)
            hidden = self.group.all_reduce(hidden)
        if weights.types is not None:
            hidden = add_rows(hidden, torch.zeros_like(tokens), weights.types)
        if weights.positions is not None:
            assert step.rows is not None
            hidden = add_rows(hidden, step.rows, weights.positions)
        return hidden if weights.embedding_norm is None else self._rule.norm(hidden, weights.embedding_norm)

    def _pre(self, stream: Residual, step: AnyStep) -> Tensor:
        """Run all layers, each part after its norm; return the last update of the stream."""
        normed, layers, end = stream.norm(self._input_norms[0]), self.weights.layers, len(self.layers) - 1
        for place, layer in enumerate(layers):
            attended = layer.output(self._attention(normed, layer, place, step))
            cross_norm = self._cross_norms[place]
            if cross_norm is not None:
                attended = self._cross(stream.add(attended, cross_norm), layer, place, step)
            fed = self._feed(stream.add(attended, self._post_norms[place]), layer)
            if place < end:
                normed = stream.add(fed, self._input_norms[place + 1])
        return fed

    def _parallel(self, stream: Residual, step: AnyStep) -> Tensor:
        """Run all layers with parallel attention and feed-forward: one all-reduce instead of two."""
        end = len(self.layers) - 1
        normed, beside = stream.norm(self._input_norms[0]), stream.norm(self._post_norms[0])
        for place, layer in enumerate(self.weights.layers):
            attended = layer.output(self._attention(normed, layer, place, step))
            part = add(self._feed(beside, layer), attended)
            if place < end:
                normed = stream.add(part, self._input_norms[place + 1])
                beside = stream.norm(self._post_norms[place + 1])
        return part

    def _post(self, hidden: Tensor, stream: Residual, step: AnyStep, last_only: bool) -> Tensor:
        """Run all layers with post-norms, whose outputs become the stream."""
        for place, layer in enumerate(self.weights.layers):
            attended = layer.output(self._attention(hidden, layer, place, step))
            hidden = stream.replace(attended, self._input_norms[place])
            hidden = stream.replace(self._feed(hidden, layer), self._post_norms[place])
        return hidden[:, -1:] if last_only and self.last else hidden

    def _feed(self, normed: Tensor, layer: LayerWeights) -> Tensor:
        fed = activate(layer.gate_up(normed), self.config.activation, self.config.gated)
        return layer.down(fed if self.stream_dtype is self.dtype else fed.to(self.stream_dtype))

    def _attention(self, hidden: Tensor, layer: LayerWeights, place: int, step: AnyStep) -> Tensor:
        """Return attention of this rank's heads on [batch, length, hidden]: [batch, length, heads x head_dim]."""
        batch, length = hidden.shape[0], hidden.shape[1]
        merged = layer.qkv(hidden)
        heads = merged.view(batch, length, self._stored, self.config.head_dim)
        if isinstance(step, EncoderStep):
            return step.attend(heads, self._queries, self._turned, self._scale)
        turned = heads[:, :, : self._turned]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = rms_norm_heads(
                heads, layer.query_norm, layer.key_norm, self._queries, self._turned - self._queries, self._rule.epsilon
            )
        if isinstance(step, KernelStep):
            values = merged.data_ptr() + self._values_offset
            return step.attention.run(place, turned.data_ptr(), values, step.windows[place])
        if isinstance(step, PagedStep | GpuStep):
            return step.attend(place, turned, heads[:, :, self._turned :], self._queries, self._scale)
        if step.angles is not None:
            turned = rotate(turned, *step.angles)
        step.write(place, turned[:, :, self._queries :].transpose(1, 2), heads[:, :, self._turned :].transpose(1, 2))
        seen = step.views[self._windows[place]]
        queries = turned[:, :, : self._queries].transpose(1, 2)
        mixed = attend(queries, seen.keys[place], seen.values[place], seen.mask, self._scale)
        return mixed.transpose(1, 2).reshape(batch, length, -1)

    def _cross(self, normed: Tensor, layer: LayerWeights, place: int, step: AnyStep) -> Tensor:
        """Return the update of the stream by cross attention."""
        assert (
            layer.cross_query is not None
            and layer.cross_output is not None
            and isinstance(step, CacheStep | KernelStep)
        )
        assert step.source is not None
        queries = layer.cross_query(normed)
        if isinstance(step, KernelStep):
            return layer.cross_output(step.source.run(place, queries.data_ptr(), 0))
        batch, length, _ = queries.shape
        heads = queries.view(batch, length, self._queries, self.config.head_dim).transpose(1, 2)
        seen = step.source
        mixed = attend(heads, seen.keys[place], seen.values[place], seen.mask, self._scale, causal=False)
        return layer.cross_output(mixed.transpose(1, 2).reshape(batch, length, -1))
