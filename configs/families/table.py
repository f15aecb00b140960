"""Table of the supported model families: one data entry each, no classes.

    family = family_of("gpt2")
    family.options["order"], family.stacks["decoder"].names["attn.c_attn"]

An entry says what `configs.families.config.ModelConfig` is to hold (a constant, or the key of `config.json` that says
it, with what transformers takes where the key is absent) and where a checkpoint keeps each weight of a layer. How a
weight is split over ranks follows from its role (`configs.families.tensors.ROLES`).
docs/reference/architectures.md says how to add a family.
"""

from typing import Any

from configs.families.family import Family, Key, Stack
from configs.families.options import BIASED, COMMON

_BIAS = Key("attention_bias", False)
_PROJECTIONS: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("value",),
    "self_attn.o_proj": ("output",),
    "mlp.gate_proj": ("gate",),
    "mlp.up_proj": ("up",),
    "mlp.down_proj": ("down",),
    "input_layernorm": ("input_norm",),
    "post_attention_layernorm": ("post_norm",),
    "self_attn.q_norm": ("query_norm",),
    "self_attn.k_norm": ("key_norm",),
}
_LLAMA_STACKS = {"decoder": Stack("layers.{}.", _PROJECTIONS, "norm")}
_LLAMA_TABLES = {"embedding": "embed_tokens"}


def _llama(options: dict[str, Any], **more: Any) -> Family:
    """Llama's entry with other options."""
    given = {"options": COMMON | options, "stacks": _LLAMA_STACKS, "tables": _LLAMA_TABLES, **more}
    return Family(**given | {"computed": {"is_causal": (True,), **more.get("computed", {})}})


_T5_SELF: dict[str, tuple[str, ...]] = {
    "layer.0.layer_norm": ("input_norm",),
    "layer.0.SelfAttention.q": ("query",),
    "layer.0.SelfAttention.k": ("key",),
    "layer.0.SelfAttention.v": ("value",),
    "layer.0.SelfAttention.o": ("output",),
}
_T5_CROSS: dict[str, tuple[str, ...]] = {
    "layer.1.layer_norm": ("cross_norm",),
    "layer.1.EncDecAttention.q": ("cross_query",),
    "layer.1.EncDecAttention.k": ("cross_key",),
    "layer.1.EncDecAttention.v": ("cross_value",),
    "layer.1.EncDecAttention.o": ("cross_output",),
}


def _t5_stack(stack: str, names: dict[str, tuple[str, ...]], last: int) -> Stack:
    feed = f"layer.{last}."
    return Stack(
        layers=f"{stack}.block.{{}}.",
        names={
            **names,
            f"{feed}layer_norm": ("post_norm",),
            f"{feed}DenseReluDense.wi_0": ("gate",),
            f"{feed}DenseReluDense.wi_1": ("up",),
            f"{feed}DenseReluDense.wo": ("down",),
        },
        norm=f"{stack}.final_layer_norm",
        relative=f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
        ungated=("wi_1", "wi"),
    )


FAMILIES: dict[str, Family] = {
    "llama": _llama(
        {"qkv_bias": _BIAS, "output_bias": _BIAS, "mlp_bias": Key("mlp_bias", False)}
        | {"kv_heads": Key("num_key_value_heads", None), "head_dim": Key("head_dim", None)}
    ),
    "mistral": _llama(
        {
            "kv_heads": Key("num_key_value_heads", 8),
            "head_dim": Key("head_dim", None),
            "max_positions": Key("max_position_embeddings", 131072),
        },
        slides="all",
        layer_types=True,
    ),
    "qwen2": _llama(
        {
            "kv_heads": Key("num_key_value_heads", 32),
            "head_dim": Key("head_dim", None),
            "max_positions": Key("max_position_embeddings", 32768),
            "qkv_bias": True,
        },
        slides="upper",
        layer_types=True,
    ),
    "qwen3": _llama(
        {
            "kv_heads": Key("num_key_value_heads", 32),
            "head_dim": Key("head_dim", 128),
            "max_positions": Key("max_position_embeddings", 32768),
            "qkv_bias": _BIAS,
            "output_bias": _BIAS,
            "head_norms": True,
        },
        slides="upper",
        layer_types=True,
    ),
    "gemma": _llama(
        {
            "kv_heads": Key("num_key_value_heads", 16),
            "head_dim": Key("head_dim", 256),
            "max_positions": Key("max_position_embeddings", 8192),
            "activation": Key("hidden_act", "gelu_pytorch_tanh"),
            "qkv_bias": _BIAS,
            "output_bias": _BIAS,
            "tied": Key("tie_word_embeddings", True),
            "norm_offset": 1.0,
            "scaled_embedding": True,
        },
        # The first releases wrote "gelu" for the tanh form.
        activations={"gelu": "gelu_pytorch_tanh"},
        computed={"use_bidirectional_attention": (None, False)},
        # transformers reads `hidden_act` alone; the published files have both.
        harmless=("hidden_activation",),
    ),
    "phi3": _llama(
        {
            "kv_heads": Key("num_key_value_heads", None),
            "max_positions": Key("max_position_embeddings", 4096),
            "norm_epsilon": Key("rms_norm_eps", 1e-5),
        },
        stacks={
            "decoder": Stack(
                "layers.{}.",
                {
                    "self_attn.qkv_proj": ("query", "key", "value"),
                    "self_attn.o_proj": ("output",),
                    "mlp.gate_up_proj": ("gate", "up"),
                    "mlp.down_proj": ("down",),
                    "input_layernorm": ("input_norm",),
                    "post_attention_layernorm": ("post_norm",),
                },
                "norm",
            )
        },
        share_key="partial_rotary_factor",
        rope_keys=("original_max_position_embeddings",),
        slides="all",
        window=None,
    ),
    "gpt2": Family(
        options=COMMON
        | BIASED
        | {
            "hidden": Key("n_embd"),
            "feed_forward": Key("n_inner", None),
            "layers": Key("n_layer"),
            "heads": Key("n_head"),
            "max_positions": Key("n_positions", 1024),
            "norm_epsilon": Key("layer_norm_epsilon", 1e-5),
            "activation": Key("activation_function", "gelu_new"),
            "positions": "learned",
            "tied": Key("tie_word_embeddings", True),
        },
        computed={
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
            "add_cross_attention": (False,),
            "reorder_and_upcast_attn": (False,),
            "is_causal": (True,),
        },
        equal={
            "hidden_size": "hidden",
            "num_attention_heads": "heads",
            "num_hidden_layers": "layers",
            "max_position_embeddings": "max_positions",
        },
        prefix="transformer.",
        tables={"embedding": "wte", "positions": "wpe"},
        stacks={
            "decoder": Stack(
                "h.{}.",
                {
                    "ln_1": ("input_norm",),
                    "attn.c_attn": ("query", "key", "value"),
                    "attn.c_proj": ("output",),
                    "ln_2": ("post_norm",),
                    "mlp.c_fc": ("up",),
                    "mlp.c_proj": ("down",),
                },
                "ln_f",
            )
        },
        transposed=True,
        # Masks in old files.
        unused=("*.attn.bias", "*.attn.masked_bias"),
    ),
    "opt": Family(
        options=COMMON
        | BIASED
        | {
            "feed_forward": Key("ffn_dim"),
            "norm_epsilon": 1e-5,
            "activation": Key("activation_function", "relu"),
            "positions": "learned",
            "position_offset": 2,
            "qkv_bias": Key("enable_bias", True),
            "output_bias": Key("enable_bias", True),
            "mlp_bias": Key("enable_bias", True),
            "final_norm": Key("_remove_final_layer_norm", False, {False: True, True: False}),
            "tied": Key("tie_word_embeddings", True),
            "initializer_range": Key("init_std", 0.02),
        },
        computed={"do_layer_norm_before": (True,), "layer_norm_elementwise_affine": (True,), "is_causal": (True,)},
        # Galactica's; transformers always has a table of positions.
        harmless=("learned_embeddings",),
        equal={"word_embed_proj_dim": "hidden"},
        prefix="model.decoder.",
        prefixes=("decoder.", ""),
        tables={"embedding": "embed_tokens", "positions": "embed_positions"},
        stacks={
            "decoder": Stack(
                "layers.{}.",
                {
                    "self_attn_layer_norm": ("input_norm",),
                    "self_attn.q_proj": ("query",),
                    "self_attn.k_proj": ("key",),
                    "self_attn.v_proj": ("value",),
                    "self_attn.out_proj": ("output",),
                    "final_layer_norm": ("post_norm",),
                    "fc1": ("up",),
                    "fc2": ("down",),
                },
                "final_layer_norm",
            )
        },
    ),
    "gpt_neox": Family(
        options=COMMON
        | BIASED
        | {
            "norm_epsilon": Key("layer_norm_eps", 1e-5),
            "activation": Key("hidden_act", "gelu"),
            "order": Key("use_parallel_residual", True, {True: "parallel", False: "pre"}),
            "qkv_bias": Key("attention_bias", True),
            "output_bias": Key("attention_bias", True),
        },
        computed={"is_causal": (True,)},
        theta_key="rotary_emb_base",
        share_key="rotary_pct",
        # transformers 4.4x and 4.5x save copies of both under the common names.
        rope_keys=("rope_theta", "partial_rotary_factor"),
        rotary_share=0.25,
        prefix="gpt_neox.",
        head="lm_head",
        heads=("embed_out",),
        tables={"embedding": "embed_in"},
        stacks={
            "decoder": Stack(
                "layers.{}.",
                {
                    "input_layernorm": ("input_norm",),
                    "post_attention_layernorm": ("post_norm",),
                    "attention.query_key_value": ("query", "key", "value"),
                    "attention.dense": ("output",),
                    "mlp.dense_h_to_4h": ("up",),
                    "mlp.dense_4h_to_h": ("down",),
                },
                "final_layer_norm",
            )
        },
        by_head=("attention.query_key_value",),
        # Masks and tables in old files.
        unused=("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq"),
    ),
    "bert": Family(
        options=COMMON
        | BIASED
        | {
            "kind": "encoder",
            "max_positions": Key("max_position_embeddings", 512),
            "norm_epsilon": Key("layer_norm_eps", 1e-12),
            "activation": Key("hidden_act", "gelu"),
            "order": "post",
            "positions": "learned",
            "token_types": Key("type_vocab_size", 2),
            "embedding_norm": True,
            "final_norm": False,
            "tied": True,
        },
        computed={
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "is_causal": (False,),
            "add_cross_attention": (False,),
        },
        prefix="",
        prefixes=("bert.",),
        tables={
            "embedding": "embeddings.word_embeddings",
            "positions": "embeddings.position_embeddings",
            "types": "embeddings.token_type_embeddings",
            "embedding_norm": "embeddings.LayerNorm",
        },
        stacks={
            "encoder": Stack(
                "encoder.layer.{}.",
                {
                    "attention.self.query": ("query",),
                    "attention.self.key": ("key",),
                    "attention.self.value": ("value",),
                    "attention.output.dense": ("output",),
                    "attention.output.LayerNorm": ("input_norm",),
                    "intermediate.dense": ("up",),
                    "output.dense": ("down",),
                    "output.LayerNorm": ("post_norm",),
                },
            )
        },
        renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        # Only the body is computed: no pooler and no head, regardless of the task.
        unused=("*pooler.*", "cls.*", "classifier.*", "qa_outputs.*", "*position_ids"),
        harmless=("tie_word_embeddings",),
    ),
    "t5": Family(
        options=COMMON
        | {
            "kind": "encoder_decoder",
            "hidden": Key("d_model"),
            "feed_forward": Key("d_ff"),
            "layers": Key("num_decoder_layers", None),
            "encoder_layers": Key("num_layers"),
            "heads": Key("num_heads"),
            "head_dim": Key("d_kv", 64),
            "max_positions": Key("n_positions", 512),
            "norm_epsilon": Key("layer_norm_epsilon", 1e-6),
            "activation": Key("feed_forward_proj", "relu"),
            "gated": None,
            "positions": "relative",
            "relative_buckets": Key("relative_attention_num_buckets", 32),
            "relative_distance": Key("relative_attention_max_distance", 128),
            "attention_scale": 1.0,
            "start_token": Key("decoder_start_token_id", 0, others=("pad_token_id",)),
            # Version 1.1 neither ties the head nor scales its input. Newer files state only the latter, and that all
            # heads are tied.
            "tied": Key("tie_word_embeddings", True, others=("tie_word_embeddings",)),  # null: tied
            "scaled_head": Key("scale_decoder_outputs", True, others=("tie_word_embeddings",)),
            "initializer_range": 0.05,
            "wide_down": True,  # `_keep_in_fp32_modules` of transformers' T5PreTrainedModel
        },
        # is_causal would apply to both stacks.
        computed={"is_encoder_decoder": (True,), "is_decoder": (False,), "is_causal": (None,)},
        gate_keys=("dense_act_fn", "is_gated_act"),
        equal={
            "hidden_size": "hidden",
            "num_attention_heads": "heads",
            "num_hidden_layers": "encoder_layers",
            "head_dim": "head_dim",
        },
        prefix="",
        tables={"embedding": "shared"},
        embeddings=("decoder.embed_tokens", "encoder.embed_tokens"),
        head_in_embedding=True,
        stacks={
            "encoder": _t5_stack("encoder", _T5_SELF, last=1),
            "decoder": _t5_stack("decoder", _T5_SELF | _T5_CROSS, last=2),
        },
        unused=(
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        ),
    ),
}


def family_of(model_type: Any) -> Family | None:
    """Return the entry of a `model_type`, or None."""
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def families() -> tuple[str, ...]:
    """Return every supported `model_type`."""
    return tuple(FAMILIES)
