"""Decoders of the GPT kind: LayerNorm, two matrices in the feed-forward, learned, rotary or ALiBi positions.

GPT-2, GPT-Neo, GPT-NeoX, GPT-J, OPT, BLOOM, MPT, Falcon, Phi. They differ in biases, norms and positions.
"""

from dataclasses import dataclass, replace
from typing import Any

from engine.planner.architecture import Architecture
from engine.planner.families.parts import (
    Fields,
    WeightTuple,
    attention,
    decoder_classes,
    feed_forward,
    linear,
    norm,
    table,
    text_head,
)


@dataclass(frozen=True)
class _Sizes:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    max_positions: int
    own_head_dim: int | None = None

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.hidden // self.heads


def read_gpt2(fields: Fields) -> Architecture:
    """Read GPT-2 (and DialoGPT): learned positions, a tied head."""
    fields.refuse("add_cross_attention")
    sizes = _gpt_sizes(fields, default_positions=1024)
    tied = fields.flag("tie_word_embeddings", True)
    classes = ("GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification")
    counted, head = text_head(fields, classes, sizes.hidden, sizes.vocabulary, tied=tied)
    weights = (
        *_embedding(sizes),
        *table("positions", sizes.max_positions, sizes.hidden),
        *_blocks(sizes),
        *head,
    )
    activation = fields.word("activation_function", "gelu_new")
    return _architecture(fields, sizes, weights, tied, activation, counted, positions=sizes.max_positions)


def read_gptj(fields: Fields) -> Architecture:
    """Read GPT-J: rotary positions, one norm a block, no biases in attention, a head with a bias."""
    sizes = _gpt_sizes(fields, default_positions=2048)
    tied = fields.flag("tie_word_embeddings", False)
    counted, head = text_head(fields, decoder_classes("GPTJ"), sizes.hidden, sizes.vocabulary, tied=tied, bias=True)
    weights = (*_embedding(sizes), *_blocks(sizes, attention_bias=False, norms=1), *head)
    return _architecture(fields, sizes, weights, tied, fields.word("activation_function", "gelu_new"), counted)


def read_gpt_neo(fields: Fields) -> Architecture:
    """Read GPT-Neo: learned positions; every second layer has a local attention window."""
    hidden, layers, heads = (
        fields.number(*keys) for keys in (("hidden_size",), ("num_layers", "num_hidden_layers"), ("num_heads",))
    )
    positions = fields.number("max_position_embeddings", default=2048)
    inner = fields.number("intermediate_size", default=4 * hidden)
    sizes = _Sizes(layers, hidden, inner, heads, heads, fields.number("vocab_size"), positions)
    tied = fields.flag("tie_word_embeddings", True)
    counted, head = text_head(fields, decoder_classes("GPTNeo"), hidden, sizes.vocabulary, tied=tied)
    weights = (
        *_embedding(sizes),
        *table("positions", positions, hidden),
        *_blocks(sizes, attention_bias=False, output_bias=True),
        *head,
    )
    window = fields.number("window_size", default=256)
    kinds = fields.entries("attention_layers") or _kinds_of_layers(fields, layers)
    windows = tuple(window if kind == "local" else None for kind in kinds or ["global", "local"] * layers)[:layers]
    activation = fields.word("activation_function", "gelu_new")
    return _architecture(fields, sizes, weights, tied, activation, counted, positions=positions, windows=windows)


def _kinds_of_layers(fields: Fields, layers: int) -> list[Any]:
    """Return the kind of each layer from pairs of kinds and how often they follow each other."""
    kinds: list[Any] = []
    for pair in fields.entries("attention_types"):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], list | tuple):
            raise ValueError(f"{fields.name}: config.json: attention_types needs pairs of kinds and a number")
        kinds += list(pair[0]) * min(fields.checked(pair[1], "attention_types"), layers)
    return kinds


def read_gpt_neox(fields: Fields) -> Architecture:
    """Read GPT-NeoX and Pythia: rotary positions, an untied head."""
    sizes = _hidden_sizes(fields, fields.number("intermediate_size", default=24576))
    tied = fields.flag("tie_word_embeddings", False)
    counted, head = text_head(fields, decoder_classes("GPTNeoX"), sizes.hidden, sizes.vocabulary, tied=tied)
    bias = fields.flag("attention_bias", True)
    weights = (*_embedding(sizes), *_blocks(sizes, attention_bias=bias), *head)
    return _architecture(fields, sizes, weights, tied, fields.word("hidden_act", "gelu"), counted)


def read_phi(fields: Fields) -> Architecture:
    """Read Phi-1, 1.5, 2: rotary positions, one norm a block, biases everywhere, including the head."""
    sizes = _hidden_sizes(fields, fields.number("intermediate_size", default=8192), grouped=True)
    sizes = replace(sizes, own_head_dim=fields.optional("head_dim"))
    tied = fields.flag("tie_word_embeddings", False)
    counted, head = text_head(fields, decoder_classes("Phi"), sizes.hidden, sizes.vocabulary, tied=tied, bias=True)
    query_key_norm = fields.flag("qk_layernorm", False)
    weights = (
        *_embedding(sizes),
        *_blocks(sizes, norms=1),
        *(norm("attention.query_key_norm", sizes.hidden // sizes.heads, 2 * sizes.layers) if query_key_norm else ()),
        *head,
    )
    return _architecture(fields, sizes, weights, tied, fields.word("hidden_act", "gelu_new"), counted)


def read_opt(fields: Fields) -> Architecture:
    """Read OPT. Its position table has two extra rows; 350m embeds in fewer dimensions."""
    sizes = _hidden_sizes(fields, fields.number("ffn_dim"))
    width = fields.number("word_embed_proj_dim", default=sizes.hidden)
    tied, rows = fields.flag("tie_word_embeddings", True), sizes.max_positions + 2
    affine = fields.flag("layer_norm_elementwise_affine", True)
    final = fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm", False)
    counted, head = text_head(fields, decoder_classes("OPT"), width, sizes.vocabulary, tied=tied)
    projected = width != sizes.hidden
    bias = fields.flag("enable_bias", True)
    weights = (
        *_embedding(sizes, width),
        *table("positions", rows, sizes.hidden),
        *(linear("project_in", sizes.hidden, width, 1, block=False) if projected else ()),
        *_blocks(sizes, attention_bias=bias, bias=bias, norms=2 if affine else 0, final=affine and final),
        *(linear("project_out", width, sizes.hidden, 1, block=False) if projected else ()),
        *head,
    )
    activation = fields.word("activation_function", "relu")
    return _architecture(fields, sizes, weights, tied, activation, counted, positions=rows)


def read_bloom(fields: Fields) -> Architecture:
    """Read BLOOM: ALiBi, and a norm after the embeddings."""
    hidden = fields.number("hidden_size", "n_embed")
    layers, heads = fields.number("n_layer", "num_hidden_layers"), fields.number("n_head", "num_attention_heads")
    positions = fields.number("seq_length", default=2048)
    sizes = _Sizes(layers, hidden, 4 * hidden, heads, heads, fields.number("vocab_size"), positions)
    tied = fields.flag("tie_word_embeddings", True)
    counted, head = text_head(fields, decoder_classes("Bloom"), hidden, sizes.vocabulary, tied=tied)
    weights = (*_embedding(sizes), *norm("embedding.norm", hidden, 1, block=False), *_blocks(sizes), *head)
    return _architecture(fields, sizes, weights, tied, "gelu", counted, by_distance=True)


def read_mpt(fields: Fields) -> Architecture:
    """Read MPT: as on the hub (ALiBi, no biases), or as llm-foundry trains it without ALiBi: learned positions."""
    names = (("d_model", "hidden_size"), ("n_layers", "num_hidden_layers"), ("n_heads", "num_attention_heads"))
    hidden, layers, heads = (fields.number(*keys) for keys in names)
    inner, positions = fields.number("expansion_ratio", default=4) * hidden, fields.number("max_seq_len", default=2048)
    attends = fields.inner("attn_config")
    default = 1 if attends.get("attn_type") == "multiquery_attention" else heads
    kv_heads = attends.number("kv_n_heads", default=default)
    sizes = _Sizes(layers, hidden, inner, heads, kv_heads, fields.number("vocab_size"), positions)
    # transformers' MPT always uses ALiBi and has no position table, regardless of `learned_pos_emb`.
    learned = fields.flag("learned_pos_emb", True) and not attends.flag("alibi", True) and not attends.get("rope")
    bias, tied = not fields.flag("no_bias", True), fields.flag("tie_word_embeddings", True)
    counted, head = text_head(fields, decoder_classes("Mpt"), hidden, sizes.vocabulary, tied=tied)
    weights = (
        *_embedding(sizes),
        *(table("positions", positions, hidden) if learned else ()),
        *_blocks(sizes, attention_bias=bias, bias=bias, norm_bias=bias),
        *head,
    )
    return _architecture(fields, sizes, weights, tied, "gelu", counted, positions=positions if learned else 0)


def read_falcon(fields: Fields) -> Architecture:
    """Read Falcon: one key and value head (7b), some (40b, 180b) or all (rw); parallel feed-forward."""
    sizes = _hidden_sizes(fields, 0)
    many = fields.flag("new_decoder_architecture", False)
    if many:
        kv_heads = fields.number("num_kv_heads", default=sizes.heads)
    else:
        kv_heads = 1 if fields.flag("multi_query", True) else sizes.heads
    inner = fields.number("ffn_hidden_size", default=4 * sizes.hidden)
    sizes = _Sizes(sizes.layers, sizes.hidden, inner, sizes.heads, kv_heads, sizes.vocabulary, sizes.max_positions)
    in_parallel = fields.number("num_ln_in_parallel_attn", default=2 if many else 1)
    norms = in_parallel if fields.flag("parallel_attn", True) else 2
    tied, bias = fields.flag("tie_word_embeddings", True), fields.flag("bias", False)
    counted, head = text_head(fields, decoder_classes("Falcon"), sizes.hidden, sizes.vocabulary, tied=tied)
    weights = (*_embedding(sizes), *_blocks(sizes, attention_bias=bias, bias=bias, norms=norms), *head)
    activation, alibi = fields.word("activation", "gelu"), fields.flag("alibi", False)
    return _architecture(fields, sizes, weights, tied, activation, counted, by_distance=alibi)


def _gpt_sizes(fields: Fields, default_positions: int) -> _Sizes:
    """Read sizes under GPT-2's names, or the names that transformers maps to them."""
    hidden, layers = fields.number("n_embd", "hidden_size"), fields.number("n_layer", "num_hidden_layers")
    heads, inner = fields.number("n_head", "num_attention_heads"), fields.number("n_inner", default=4 * hidden)
    positions = fields.number("n_positions", "max_position_embeddings", default=default_positions)
    return _Sizes(layers, hidden, inner, heads, heads, fields.number("vocab_size"), positions)


def _hidden_sizes(fields: Fields, inner: int, *, grouped: bool = False) -> _Sizes:
    """Read sizes under the most common names. grouped: whether heads can share keys and values."""
    hidden, layers, heads = (fields.number(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = fields.number("num_key_value_heads", default=heads) if grouped else heads
    positions = fields.number("max_position_embeddings", default=2048)
    return _Sizes(layers, hidden, inner, heads, kv_heads, fields.number("vocab_size"), positions)


def _embedding(sizes: _Sizes, width: int | None = None) -> WeightTuple:
    return table("embedding", sizes.vocabulary, width or sizes.hidden, split=True)


def _blocks(
    sizes: _Sizes,
    *,
    attention_bias: bool = True,
    output_bias: bool | None = None,
    bias: bool = True,
    norms: int = 2,
    norm_bias: bool = True,
    final: bool = True,
) -> WeightTuple:
    """Return all blocks and the last norm. `bias` is the feed-forward's."""
    return (
        *attention(
            sizes.hidden, sizes.heads, sizes.head_dim, sizes.layers,
            kv_heads=sizes.kv_heads, bias=attention_bias, output_bias=output_bias,
        ),
        *feed_forward(sizes.hidden, sizes.inner, sizes.layers, bias=bias),
        *(norm("norm", sizes.hidden, norms * sizes.layers, bias=norm_bias) if norms else ()),
        *(norm("final_norm", sizes.hidden, 1, bias=norm_bias, block=False) if final else ()),
    )  # fmt: skip


def _architecture(
    fields: Fields,
    sizes: _Sizes,
    weights: WeightTuple,
    tied: bool,
    activation: str,
    counted: str,
    *,
    positions: int = 0,
    windows: tuple[int | None, ...] = (),
    by_distance: bool = False,
) -> Architecture:
    return Architecture(
        name=fields.name,
        kind="decoder",
        model_type=fields.model_type,
        layers=sizes.layers,
        decoder_layers=sizes.layers,
        hidden=sizes.hidden,
        feed_forward=sizes.inner,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocabulary=sizes.vocabulary,
        positions=positions,
        gated=False,
        activation=activation,
        norm="layernorm",
        tied=tied,
        weights=weights,
        windows=windows,
        max_positions=sizes.max_positions,
        by_distance=by_distance,
        counted=counted,
    )
