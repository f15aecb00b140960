"""Encoder-decoders: T5 (v1.0, v1.1, FLAN, mT5), BART, Whisper.

A decoder's block has a second attention, whose keys and values are made of the encoder's output: those weights multiply
the source's tokens (`Weight.stream`).
"""

from dataclasses import replace

from engine.planner.architecture import Architecture, TokenStream, Weight
from engine.planner.families.parts import (
    Fields,
    WeightTuple,
    attention,
    feed_forward,
    head,
    linear,
    norm,
    table,
)


def read_t5(fields: Fields) -> Architecture:
    """Read T5 and mT5. `tie_word_embeddings: false` (v1.1, FLAN) means an untied head, as in the published weights.

    transformers 5 ties the head of every T5 that it builds from a configuration; a loaded T5 keeps its own.
    """
    stem = {"t5": "T5", "mt5": "MT5"}[fields.model_type]
    hidden, heads = fields.number("d_model", "hidden_size"), fields.number("num_heads", "num_attention_heads")
    head_dim = fields.number("d_kv", "head_dim", default=hidden // heads if "d_kv" in fields.config else 64)
    inner, vocabulary = fields.number("d_ff"), fields.number("vocab_size")
    encoder = fields.number("num_layers", "num_hidden_layers")
    decoder = fields.number("num_decoder_layers", default=encoder)
    both = fields.word("feed_forward_proj", "relu" if stem == "T5" else "gated-gelu")
    # Newer files state both parts too, and transformers uses those.
    gated = fields.flag("is_gated_act", both.startswith("gated-"))
    activation = "gelu_new" if both == "gated-gelu" else both.removeprefix("gated-")
    activation = fields.word("dense_act_fn", activation)
    tied = fields.get("tie_word_embeddings") is None or fields.flag("tie_word_embeddings", True)  # null: tied
    counted = fields.one_of((f"{stem}ForConditionalGeneration", f"{stem}Model", f"{stem}EncoderModel"))
    buckets = fields.number("relative_attention_num_buckets", default=32)
    alone = counted.endswith("EncoderModel")

    def stack(name: str, layers: int, stream: TokenStream) -> WeightTuple:
        return (
            Weight(f"{name}.bias", (buckets, heads), 1, "embedding", 1, heads, block=False),
            *attention(hidden, heads, head_dim, layers, stream=stream),
            *map(_wide_down, feed_forward(hidden, inner, layers, gated=gated, stream=stream)),
            *norm("norm", hidden, 2 * layers, bias=False),
            *norm(f"{name}.final_norm", hidden, 1, bias=False, block=False),
        )

    crossing = (
        *attention(hidden, heads, head_dim, decoder, prefix="cross_", key_value_stream="source"),
        *norm("cross_norm", hidden, decoder, bias=False),
    )
    weights = (
        *table("embedding", vocabulary, hidden, split=True),
        *stack("encoder", encoder, "main" if alone else "source"),
        *(() if alone else (*stack("decoder", decoder, "main"), *crossing)),
        *(head(vocabulary, hidden, tied=tied) if counted.endswith("Generation") else ()),
    )
    return Architecture(
        name=fields.name,
        kind="encoder" if alone else "encoder_decoder",
        model_type=fields.model_type,
        layers=encoder if alone else encoder + decoder,
        decoder_layers=0 if alone else decoder,
        hidden=hidden,
        feed_forward=inner,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        positions=0,
        gated=gated,
        activation=activation,
        norm="rmsnorm",
        tied=tied,
        weights=weights,
        max_positions=fields.optional("n_positions"),
        counted=counted,
        by_distance=True,
    )


def read_bart(fields: Fields) -> Architecture:
    """Read BART: learned positions with two extra rows, on both sides; a tied head.

    `tie_word_embeddings: false` unties the tables of both stacks too; transformers 5 keeps the shared one, unused.
    """
    hidden, vocabulary = fields.number("d_model", "hidden_size"), fields.number("vocab_size")
    positions = fields.number("max_position_embeddings", default=1024)
    tied = fields.flag("tie_word_embeddings", True)
    counted = fields.one_of(("BartForConditionalGeneration", "BartModel"))
    stacks: tuple[str, ...] = () if tied else ("encoder", "decoder")
    edges: WeightTuple = (
        *(each for stack in stacks for each in table(f"{stack}.embedding", vocabulary, hidden)),
        *table("encoder.positions", positions + 2, hidden),
        *table("positions", positions + 2, hidden),
        *norm("embedding.norm", hidden, 2, block=False),
    )
    return _both(fields, counted, edges, hidden, vocabulary, positions + 2, positions, tied, key_bias=True)


def read_whisper(fields: Fields) -> Architecture:
    """Read Whisper: two convolutions over the audio frames, two frames a source token; keys have no bias."""
    hidden, vocabulary = fields.number("d_model", "hidden_size"), fields.number("vocab_size")
    bins, positions = fields.number("num_mel_bins", default=80), fields.number("max_target_positions", default=448)
    counted = fields.one_of(("WhisperForConditionalGeneration", "WhisperModel"))
    edges: WeightTuple = (
        *linear("encoder.convolution_1", hidden, 3 * bins, 1, bias=True, block=False, uses=2, stream="source"),
        *linear("encoder.convolution_2", hidden, 3 * hidden, 1, bias=True, block=False, stream="source"),
        *table("encoder.positions", fields.number("max_source_positions", default=1500), hidden),
        *table("positions", positions, hidden),
        *norm("final_norm", hidden, 2, block=False),
    )
    tied = fields.flag("tie_word_embeddings", True)
    return _both(fields, counted, edges, hidden, vocabulary, positions, positions, tied, key_bias=False)


def _both(
    fields: Fields,
    counted: str,
    edges: WeightTuple,
    hidden: int,
    vocabulary: int,
    rows: int,
    positions: int,
    tied: bool,
    *,
    key_bias: bool,
) -> Architecture:
    """Return BART's encoder and decoder. edges: weights outside of the blocks."""
    encoder, decoder = fields.number("encoder_layers", "num_hidden_layers"), fields.number("decoder_layers")
    heads = fields.number("encoder_attention_heads", "num_attention_heads")
    decoder_heads = fields.number("decoder_attention_heads")
    inner, decoder_inner = fields.number("encoder_ffn_dim"), fields.number("decoder_ffn_dim")

    def attend(heads: int, layers: int, stream: TokenStream, prefix: str = "") -> WeightTuple:
        made = attention(
            hidden, heads, hidden // heads, layers,
            bias=True, prefix=prefix, stream=stream, key_value_stream="source" if prefix else None,
        )  # fmt: skip
        return made if key_bias else tuple(_values_only(weight) for weight in made)

    weights = (
        *table("embedding", vocabulary, hidden, split=True),
        *edges,
        *attend(heads, encoder, "source"),
        *feed_forward(hidden, inner, encoder, bias=True, stream="source"),
        *norm("norm", hidden, 2 * encoder),
        *attend(decoder_heads, decoder, "main"),
        *attend(decoder_heads, decoder, "main", "cross_"),
        *feed_forward(hidden, decoder_inner, decoder, bias=True),
        *norm("norm", hidden, 3 * decoder),
        *(head(vocabulary, hidden, tied=tied) if counted.endswith("Generation") else ()),
    )
    return Architecture(
        name=fields.name,
        kind="encoder_decoder",
        model_type=fields.model_type,
        layers=encoder + decoder,
        decoder_layers=decoder,
        hidden=hidden,
        feed_forward=decoder_inner,
        heads=decoder_heads,
        kv_heads=decoder_heads,
        head_dim=hidden // decoder_heads,
        vocabulary=vocabulary,
        positions=rows,
        gated=False,
        activation=fields.word("activation_function", "gelu"),
        norm="layernorm",
        tied=tied,
        weights=weights,
        max_positions=positions,
        counted=counted,
    )


def _wide_down(weight: Weight) -> Weight:
    """T5's second product has weights in float32 in a model of float16 (`_keep_in_fp32_modules` of transformers)."""
    return replace(weight, wide=True) if weight.name == "mlp.down" else weight


def _values_only(weight: Weight) -> Weight:
    """Drop the bias of keys: half the copies of the key and value vectors."""
    if not weight.name.endswith("attention.key_value.bias"):
        return weight
    return Weight(weight.name, weight.shape, weight.copies // 2, weight.role, weight.split, weight.groups)
