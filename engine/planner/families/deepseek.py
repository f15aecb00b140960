"""DeepSeek-V2 and V3: latent attention and many small experts.

The cache keeps the latent vector and one rotary key for all heads (arXiv 2405.04434, section 2.1). Heads of
multi-token prediction are not counted: transformers leaves them out.
"""

from engine.planner.architecture import Architecture
from engine.planner.families.parts import (
    Fields,
    WeightTuple,
    decoder_classes,
    feed_forward,
    gated_decoder,
    linear,
    norm,
    table,
    text_head,
)


def read_deepseek(fields: Fields) -> Architecture:
    """Read the configuration: the first blocks are dense (`first_k_dense_replace`), the others have experts."""
    stem, dense_by_default, shared_by_default, positions = {
        "deepseek_v2": ("DeepseekV2", 0, 2, 2048),
        "deepseek_v3": ("DeepseekV3", 3, 1, 4096),
    }[fields.model_type]
    hidden, layers, heads, inner, vocabulary = (
        fields.number(key)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    said = fields.optional("first_k_dense_replace", smallest=0)
    dense = min(layers, dense_by_default if said is None else said)
    experts = fields.number("n_routed_experts", "num_experts" if stem == "DeepseekV2" else "num_local_experts")
    used = fields.number("num_experts_per_tok")
    expert_inner = fields.number("moe_intermediate_size")
    told = "n_shared_experts" in fields.config
    shared = fields.optional("n_shared_experts", smallest=0) if told else shared_by_default
    if fields.number("moe_layer_freq", default=1) != 1:
        fields.refuse("moe_layer_freq")
    tied = fields.flag("tie_word_embeddings", False)
    bias = stem == "DeepseekV2" and fields.flag("mlp_bias", False)  # not of the routed experts
    counted, head = text_head(fields, decoder_classes(stem), hidden, vocabulary, tied=tied)
    sparse = layers - dense

    def _shared_experts(width: int) -> WeightTuple:
        return feed_forward(hidden, width, sparse, gated=True, bias=bias, prefix="shared_")

    with_experts = (
        *linear("mlp.router", experts, hidden, sparse),
        *feed_forward(hidden, expert_inner, sparse * experts, gated=True, prefix="expert_", share=used / experts),
        *(_shared_experts(shared * expert_inner) if shared else ()),
    )
    weights = (
        *table("embedding", vocabulary, hidden, split=True),
        *_latent_attention(fields, hidden, heads, layers),
        *(feed_forward(hidden, inner, dense, gated=True, bias=bias) if dense else ()),
        *(with_experts if sparse else ()),
        *norm("norm", hidden, 2 * layers, bias=False),
        *norm("final_norm", hidden, 1, bias=False, block=False),
        *head,
    )
    rope = fields.number("qk_rope_head_dim", default=64)
    return gated_decoder(
        fields,
        layers=layers,
        hidden=hidden,
        feed_forward=inner,
        heads=heads,
        kv_heads=heads,
        head_dim=fields.number("qk_nope_head_dim", default=128) + rope,
        vocabulary=vocabulary,
        activation=fields.word("hidden_act", "silu"),
        tied=tied,
        weights=weights,
        experts=experts,
        experts_per_token=used,
        kv_elements_per_token=fields.number("kv_lora_rank", default=512) + rope,
        value_dim=fields.number("v_head_dim", default=128),
        counted=counted,
        default_positions=positions,
    )


def _latent_attention(fields: Fields, hidden: int, heads: int, layers: int) -> WeightTuple:
    """Return the projections to the latent vector, replicated on every rank, and to the heads, which are split."""
    latent, rope = fields.number("kv_lora_rank", default=512), fields.number("qk_rope_head_dim", default=64)
    plain, value = fields.number("qk_nope_head_dim", default=128), fields.number("v_head_dim", default=128)
    bias = fields.flag("attention_bias", False)
    # null: queries are projected directly; a missing key: transformers' default.
    query_latent = fields.number("q_lora_rank", default=1536)
    queries: WeightTuple
    if "q_lora_rank" in fields.config and fields.get("q_lora_rank") is None:
        queries = linear("attention.query", heads * (plain + rope), hidden, layers, split="column", groups=heads)
    else:
        queries = (
            *linear("attention.query_down", query_latent, hidden, layers, bias=bias),
            *norm("attention.query_norm", query_latent, layers, bias=False),
            *linear(
                "attention.query_up", heads * (plain + rope), query_latent, layers, split="column", groups=heads
            ),
        )  # fmt: skip
    return (
        *queries,
        *linear("attention.key_value_down", latent + rope, hidden, layers, bias=bias),
        *norm("attention.key_value_norm", latent, layers, bias=False),
        *linear("attention.key_value_up", heads * (plain + value), latent, layers, split="column", groups=heads),
        *linear("attention.output", hidden, heads * value, layers, bias=bias, split="row", groups=heads),
    )
