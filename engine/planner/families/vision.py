"""Encoders of images: ViT and DeiT. Their tokens are patches, and one or two learned ones before them."""

from engine.planner.architecture import Architecture, Weight
from engine.planner.families.parts import Fields, attention, classifier, feed_forward, linear, norm, table


def read_vit(fields: Fields) -> Architecture:
    """Read ViT (one learned token) and DeiT (two). The sequence is as long as the position table."""
    stem, learned = {"vit": ("ViT", 1), "deit": ("DeiT", 2)}[fields.model_type]
    hidden, layers, heads, inner = (
        fields.number(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    )
    patch, image = fields.pair("patch_size", default=16), fields.pair("image_size", default=224)
    channels = fields.number("num_channels", default=3)
    head_dim = fields.number("head_dim", default=hidden // heads)
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    tokens = patches + learned
    counted = fields.one_of(
        (f"{stem}ForImageClassification", f"{stem}Model", f"{stem}ForImageClassificationWithTeacher")
    )
    tops = {
        "Model": linear(
            "pooler", fields.number("pooler_output_size", default=hidden), hidden, 1,
            bias=True, block=False, per_sequence=True,
        ),
        "ForImageClassification": classifier(fields.labels, hidden),
        "ForImageClassificationWithTeacher": 2 * classifier(fields.labels, hidden),
    }  # fmt: skip
    weights = (
        *linear("patches", hidden, channels * patch[0] * patch[1], 1, bias=True, block=False, share=patches / tokens),
        Weight("learned_tokens", (hidden,), learned, "vector", block=False),
        *table("positions", tokens, hidden),
        *attention(
            hidden, heads, head_dim, layers, bias=fields.flag("qkv_bias", True), output_bias=True
        ),
        *feed_forward(hidden, inner, layers, bias=True),
        *norm("norm", hidden, 2 * layers),
        *norm("final_norm", hidden, 1, block=False),
        *tops[counted.removeprefix(stem)],
    )  # fmt: skip
    return Architecture(
        name=fields.name,
        kind="vision",
        model_type=fields.model_type,
        layers=layers,
        decoder_layers=0,
        hidden=hidden,
        feed_forward=inner,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        vocabulary=0,
        positions=tokens,
        gated=False,
        activation=fields.word("hidden_act", "gelu"),
        norm="layernorm",
        tied=False,
        weights=weights,
        max_positions=tokens,
        counted=counted,
    )
