"""Encoders of text: BERT, RoBERTa and XLM-RoBERTa, DistilBERT, ALBERT, ELECTRA.

The head depends on the class named in the configuration's `architectures`: a published BERT has `BertForMaskedLM` (a
transform and a tied head, no pooler), `BertModel` has a pooler and no head. Without a class, the model is the body with
its pooler, as for embeddings.
"""

from dataclasses import dataclass, replace

from configs.common.files.reading import brief
from configs.families.positions import unused_positions
from engine.planner.architecture import Architecture
from engine.planner.families.parts import (
    Fields,
    WeightTuple,
    attention,
    classifier,
    feed_forward,
    linear,
    masked_head,
    norm,
    table,
)

_POSITIONS = ("absolute", "relative_key", "relative_key_query")
"""Kinds of transformers, all of which have a table. Others need code of the model's own folder, which makes other
layers too: Jina's BERTs (`alibi`) have gates.
"""


@dataclass(frozen=True)
class _Encoder:
    """width: of the embeddings. pooler: the body has one. dense_classifier: a classifier has a layer before it.

    unused_positions: rows of the table before the first token's.
    """

    stem: str
    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    types: int
    activation: str
    width: int
    groups: int | None = None  # of layers that share their weights; None: no layer shares
    pooler: bool = True
    dense_classifier: bool = False
    unused_positions: int = 0


def read_bert(fields: Fields) -> Architecture:
    """Read a BERT configuration."""
    return _read(fields, _named_sizes(fields, "Bert"))


def read_roberta(fields: Fields) -> Architecture:
    """Read RoBERTa and XLM-RoBERTa. Positions begin after the row of the padding token: two rows more than tokens."""
    stem = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta"}[fields.model_type]
    sizes = _named_sizes(fields, stem, dense_classifier=True)
    return _read(fields, replace(sizes, unused_positions=unused_positions(fields.config)))


def read_distilbert(fields: Fields) -> Architecture:
    """Read DistilBERT: no pooler, no token types."""
    hidden, layers = fields.number("dim", "hidden_size"), fields.number("n_layers", "num_hidden_layers")
    heads, inner = fields.number("n_heads", "num_attention_heads"), fields.number("hidden_dim", default=4 * hidden)
    positions = fields.number("max_position_embeddings", default=512)
    return _read(
        fields,
        _Encoder(
            "DistilBert", hidden, layers, heads, inner, fields.number("vocab_size"), positions, 0,
            fields.word("activation", "gelu"), hidden, pooler=False, dense_classifier=True,
        ),
    )  # fmt: skip


def read_albert(fields: Fields) -> Architecture:
    """Read ALBERT: narrow embeddings, and one block for all layers (or one for each group of them)."""
    groups = fields.number("num_hidden_groups", default=1)
    if fields.number("inner_group_num", default=1) != 1:
        raise ValueError(f"{fields.name}: config.json: inner_group_num above 1 is not known to the planner")
    return _read(fields, _named_sizes(fields, "Albert", groups=groups, narrow=True))


def read_electra(fields: Fields) -> Architecture:
    """Read ELECTRA: narrow embeddings, no pooler; its usual class discriminates real from replaced tokens."""
    return _read(fields, _named_sizes(fields, "Electra", narrow=True, pooler=False, dense_classifier=True))


def _named_sizes(
    fields: Fields,
    stem: str,
    *,
    groups: int | None = None,
    narrow: bool = False,
    pooler: bool = True,
    dense_classifier: bool = False,
) -> _Encoder:
    fields.refuse("add_cross_attention")
    kind = fields.word("position_embedding_type", "absolute")
    if kind not in _POSITIONS:
        raise ValueError(
            f"{fields.name}: config.json: position_embedding_type {brief(kind)} is not known to the planner; use a "
            "model with 'absolute'"
        )
    hidden, layers, heads, inner, vocabulary = (
        fields.number(key)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    return _Encoder(
        stem, hidden, layers, heads, inner, vocabulary,
        fields.number("max_position_embeddings", default=512), fields.number("type_vocab_size", default=2),
        fields.word("hidden_act", "gelu"), fields.number("embedding_size", default=128) if narrow else hidden,
        groups, pooler, dense_classifier,
    )  # fmt: skip


def _read(fields: Fields, sizes: _Encoder) -> Architecture:
    stem, hidden = sizes.stem, sizes.hidden
    counted = fields.one_of(_classes(stem))
    tied = fields.flag("tie_word_embeddings", True)
    mapped = sizes.width != hidden or stem == "Albert"
    blocks, uses = (sizes.layers, None) if sizes.groups is None else (sizes.groups, sizes.layers)
    body = (
        *attention(hidden, sizes.heads, hidden // sizes.heads, blocks, bias=True, uses=uses),
        *feed_forward(hidden, sizes.inner, blocks, bias=True, uses=uses),
        *norm("norm", hidden, 2 * blocks),
    )
    weights = (
        *table("embedding", sizes.vocabulary, sizes.width, split=True),
        *table("positions", sizes.positions, sizes.width),
        *(table("types", sizes.types, sizes.width) if sizes.types else ()),
        *norm("embedding.norm", sizes.width, 1, block=False),
        *(linear("embedding.map", hidden, sizes.width, 1, bias=True, block=False) if mapped else ()),
        *body,
        *_top(fields, sizes, counted.removeprefix(stem), tied),
    )
    return Architecture(
        name=fields.name,
        kind="encoder",
        model_type=fields.model_type,
        layers=sizes.layers,
        decoder_layers=0,
        hidden=hidden,
        feed_forward=sizes.inner,
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=hidden // sizes.heads,
        vocabulary=sizes.vocabulary,
        positions=sizes.positions,
        gated=False,
        activation=sizes.activation,
        norm="layernorm",
        tied=tied,
        weights=weights,
        max_positions=fields.checked(sizes.positions - sizes.unused_positions, "max_position_embeddings"),
        counted=counted,
    )


def _classes(stem: str) -> tuple[str, ...]:
    """Return the known transformers classes, the body first."""
    tops = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]
    if stem in ("Bert", "Albert", "Electra"):
        tops.append("ForPreTraining")
    if stem in ("Roberta", "XLMRoberta", "Electra"):
        tops.append("ForCausalLM")
    return (*(f"{stem}{top}" for top in tops), *(["BertLMHeadModel"] if stem == "Bert" else []))


def _top(fields: Fields, sizes: _Encoder, top: str, tied: bool) -> WeightTuple:
    """Return the weights on top of the blocks for one class."""
    stem, hidden = sizes.stem, sizes.hidden
    pooler = linear("pooler", hidden, hidden, 1, bias=True, block=False, per_sequence=True)
    doubled = not tied and stem not in ("DistilBert", "Electra")
    masked = (
        *masked_head(sizes.vocabulary, hidden, sizes.width, tied=tied),
        # An untied head of these has a second bias, which transformers never uses.
        *(norm("head.unused_bias", sizes.vocabulary, 1, bias=False, block=False) if doubled else ()),
    )
    if top == "Model":
        return pooler if sizes.pooler else ()
    if top == "ForTokenClassification":
        return linear("classifier", fields.labels, hidden, 1, bias=True, block=False)
    if top == "ForSequenceClassification":
        # The dense layer of RoBERTa, DistilBERT and ELECTRA has a pooler's shape.
        return (*pooler, *classifier(fields.labels, hidden))
    if top == "ForPreTraining" and stem == "Electra":
        return (
            *linear("discriminator", hidden, hidden, 1, bias=True, block=False),
            *linear("discriminator.prediction", 1, hidden, 1, bias=True, block=False),
        )
    if top == "ForPreTraining":
        labels = fields.labels if stem == "Albert" else 2
        return (*pooler, *masked, *classifier(labels, hidden))
    return masked
