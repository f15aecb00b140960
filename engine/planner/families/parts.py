"""Shared parts of the configuration readers: checked access to keys, and the weights of common modules.

    fields = Fields(config, "opt")
    weights = (*table("embedding", fields.number("vocab_size"), 768), *linear("mlp.down", 768, 3072, 12, split="row"))

A part is a tuple of `Weight`s; `copies` is how many blocks have it. `split="column"` shards the outputs of a
matrix and its bias, `split="row"` the inputs of a matrix (the bias is added once, by every rank): Megatron-LM's
tensor parallelism (arXiv 1909.08053).
"""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal

from configs.common.files.reading import brief
from configs.common.printable import printable
from configs.families.numbers import MAX_LAYERS, MAX_SIZE
from engine.planner.architecture import Architecture, Role, TokenStream, Weight

WeightTuple = tuple[Weight, ...]


class Fields:
    """A config.json whose numbers are checked on access."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.model_type = printable(str(config.get("model_type")), 100)

    def get(self, *keys: str) -> Any:
        """Return the value of `keys`, names of one thing, that is present and not null.

        Raises ValueError where two of them differ: one of them is not what transformers builds.
        """
        given = [key for key in keys if self.config.get(key) is not None]
        for key in given[1:]:
            if self.config[key] != self.config[given[0]]:
                raise self._wrong(
                    key, f"is {brief(self.config[key])}, but {given[0]} is {brief(self.config[given[0]])}"
                )
        return self.config[given[0]] if given else None

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return a positive whole number. Raises ValueError naming the key."""
        value = self.get(*keys)
        if value is None:
            value = default
        if value is None:
            raise self._wrong(keys[0], "is missing; a positive whole number is needed")
        return self.checked(value, keys[0])

    def optional(self, key: str, smallest: int = 1) -> int | None:
        """Return a whole number, None where it is absent or null. Raises ValueError naming the key."""
        value = self.get(key)
        return None if value is None else self.checked(value, key, smallest)

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Return a height and a width, stated as one number or as two. Raises ValueError naming the key."""
        value = self.get(key)
        value = default if value is None else value
        pair = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
        return self.checked(pair[0], key), self.checked(pair[1], key)

    def checked(self, value: Any, key: str, smallest: int = 1) -> int:
        """Return a value of the configuration as a whole number within bounds. Raises ValueError naming the key."""
        largest = MAX_LAYERS if "layer" in key else MAX_SIZE
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before it is converted: NaN, infinities and thousands of digits are no int or no float.
        if not number or not smallest <= value <= largest or value != int(value):
            raise self._wrong(key, f"is {brief(value)}; a whole number from {smallest} to {largest:,} is needed")
        return int(value)

    def entries(self, key: str) -> list[Any]:
        """Return a list; empty where it is absent or null. Raises ValueError naming the key."""
        value = self.get(key)
        if not isinstance(value, list | tuple | NoneType):
            raise self._wrong(key, f"is {brief(value)}; a list is needed")
        return list(value or ())

    def inner(self, key: str) -> "Fields":
        """Return the fields of an object; none where it is absent or null. Raises ValueError naming the key."""
        value = self.get(key)
        if not isinstance(value, Mapping | NoneType):
            raise self._wrong(key, f"is {brief(value)}; an object is needed")
        return Fields(value or {}, self.name)

    def refuse(self, *keys: str) -> None:
        """Raise ValueError naming the first of the keys that is set: it adds weights that are not known here."""
        for key in keys:
            if self.config.get(key):
                raise self._wrong(
                    key, f"is {brief(self.config[key])}, which is not known to the planner; use a model without it"
                )

    def _wrong(self, key: str, what: str) -> ValueError:
        return ValueError(f"{self.name}: config.json: {key} {what}")

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false, false where it is null; `default` is that of transformers' configuration class.

        Raises ValueError naming the key.
        """
        value = self.config.get(key, default)
        if value not in (True, False, None):
            raise self._wrong(key, f"is {brief(value)}; true or false is needed")
        return bool(value)

    def word(self, key: str, default: str) -> str:
        """Return a name, such as an activation function's."""
        return printable(str(self.get(key) or default), 100)

    @property
    def labels(self) -> int:
        """Number of classes of a classifier; transformers' default is two, and num_labels counts before the names."""
        return self.number("num_labels", default=len(self.inner("id2label").config) or 2)

    def one_of(self, known: Sequence[str]) -> str:
        """Return the class named in the configuration's `architectures`, else the first of `known`."""
        named = self.entries("architectures")
        return next((name for name in named if name in known), known[0])


def linear(
    name: str,
    outputs: int,
    inputs: int,
    copies: int,
    *,
    bias: bool = False,
    split: Literal["column", "row"] | None = None,
    groups: int | None = None,
    role: Role = "matrix",
    block: bool = True,
    share: float = 1.0,
    uses: int | None = None,
    per_sequence: bool = False,
    stream: TokenStream = "main",
) -> WeightTuple:
    """Return a matrix of (outputs, inputs), with its bias if it has one."""
    axis = {"column": 0, "row": 1, None: None}[split]
    matrix = Weight(
        name,
        (outputs, inputs),
        copies,
        role,
        axis,
        groups,
        share,
        block,
        uses,
        per_sequence=per_sequence,
        stream=stream,
    )
    if not bias:
        return (matrix,)
    sharded = split == "column"
    # A tied head owns no copy of its matrix, but owns its bias.
    own = max(copies, 1) if role == "head" else copies
    vector = Weight(
        f"{name}.bias", (outputs,), own, "vector", 0 if sharded else None, groups if sharded else None, share, block
    )
    return (matrix, vector)


def table(name: str, rows: int, width: int, *, split: bool = False) -> WeightTuple:
    """Return a lookup table: words (which tensor parallelism can shard) or positions."""
    return (Weight(name, (rows, width), 1, "embedding", 0 if split else None, block=False),)


def norm(name: str, width: int, copies: int, *, bias: bool = True, block: bool = True) -> WeightTuple:
    """Return a scale, and a shift with `bias`: both are vectors of `width`."""
    return (Weight(name, (width,), copies * (2 if bias else 1), "vector", block=block),)


def attention(
    hidden: int,
    heads: int,
    head_dim: int,
    copies: int,
    *,
    kv_heads: int | None = None,
    bias: bool = False,
    output_bias: bool | None = None,
    prefix: str = "",
    uses: int | None = None,
    stream: TokenStream = "main",
    key_value_stream: TokenStream | None = None,
) -> WeightTuple:
    """Return query, key, value and output projections. `bias` is that of the first three, and by default of all."""
    kv_heads = kv_heads or heads
    doubled = None if uses is None else 2 * uses
    return (
        *linear(
            f"{prefix}attention.query", heads * head_dim, hidden, copies,
            bias=bias, split="column", groups=heads, uses=uses, stream=stream,
        ),
        *linear(
            f"{prefix}attention.key_value", kv_heads * head_dim, hidden, 2 * copies,
            bias=bias, split="column", groups=kv_heads, uses=doubled, stream=key_value_stream or stream,
        ),
        *linear(
            f"{prefix}attention.output", hidden, heads * head_dim, copies,
            bias=bias if output_bias is None else output_bias, split="row", groups=heads, uses=uses, stream=stream,
        ),
    )  # fmt: skip


def feed_forward(
    hidden: int,
    inner: int,
    copies: int,
    *,
    gated: bool = False,
    bias: bool = False,
    prefix: str = "",
    share: float = 1.0,
    uses: int | None = None,
    stream: TokenStream = "main",
) -> WeightTuple:
    """Return two matrices, or three for a gated feed-forward. `copies` counts experts too."""
    first = "mlp.gate_up" if gated else "mlp.up"
    times = 2 if gated else 1
    return (
        *linear(
            f"{prefix}{first}", inner, hidden, times * copies,
            bias=bias, split="column", share=share, uses=None if uses is None else times * uses, stream=stream,
        ),
        *linear(
            f"{prefix}mlp.down", hidden, inner, copies, bias=bias, split="row", share=share, uses=uses, stream=stream
        ),
    )  # fmt: skip


def head(vocabulary: int, width: int, *, tied: bool, bias: bool = False) -> WeightTuple:
    """Return the projection from hidden states to logits. A tied head shares the embedding's matrix."""
    return linear("head", vocabulary, width, 0 if tied else 1, bias=bias, split="column", role="head", block=False)


def masked_head(vocabulary: int, hidden: int, width: int, *, tied: bool) -> WeightTuple:
    """Return the head of an encoder that fills in masked words: a transform, its norm and the projection to logits.

    width: of the embeddings.
    """
    return (
        *linear("head.transform", width, hidden, 1, bias=True, block=False),
        *norm("head.norm", width, 1, block=False),
        *head(vocabulary, width, tied=tied, bias=True),
    )


def classifier(labels: int, width: int) -> WeightTuple:
    """Return the classifier of one vector of a sequence."""
    return linear("classifier", labels, width, 1, bias=True, block=False, per_sequence=True)


def gated_decoder(fields: Fields, *, layers: int, default_positions: int, **sizes: Any) -> Architecture:
    """Return a decoder with RMSNorm, gated feed-forward and rotary positions. sizes: fields of `Architecture`."""
    return Architecture(
        name=fields.name,
        kind="decoder",
        model_type=fields.model_type,
        layers=layers,
        decoder_layers=layers,
        positions=0,
        gated=True,
        norm="rmsnorm",
        max_positions=fields.number("max_position_embeddings", default=default_positions),
        **sizes,
    )


def decoder_classes(stem: str) -> tuple[str, str, str]:
    """Return transformers' classes of a decoder: with a language head, without a head, with a classifier."""
    return (f"{stem}ForCausalLM", f"{stem}Model", f"{stem}ForSequenceClassification")


def text_head(
    fields: Fields, classes: tuple[str, str, str], width: int, vocabulary: int, *, tied: bool, bias: bool = False
) -> tuple[str, WeightTuple]:
    """Return which of the three classes is counted, and its head."""
    counted = fields.one_of(classes)
    if counted == classes[0]:
        return counted, head(vocabulary, width, tied=tied, bias=bias)
    if counted == classes[1]:
        return counted, ()
    # transformers computes logits for every token and selects one afterwards.
    return counted, linear("classifier", fields.labels, width, 1, block=False)
