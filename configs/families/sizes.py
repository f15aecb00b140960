"""The sizes of a model and which of the options it has, whatever the family: plain data, no torch.

`configs.families.config` reads them from a `config.json`.
"""

from dataclasses import dataclass
from typing import Literal

from configs.families.rope import Rope

ModelForm = Literal["decoder", "encoder", "encoder_decoder"]
NormKind = Literal["rms", "layer"]
Order = Literal["pre", "post", "parallel"]
Activation = Literal["silu", "gelu", "gelu_new", "gelu_tanh", "relu"]
Positions = Literal["rotary", "learned", "relative"]
_OF_THE_HEAD = -1


@dataclass(frozen=True)
class ModelSizes:
    """What the computation depends on.

    layers: of an encoder-decoder its decoder's. head_norms: queries and keys pass through a norm of each head.
    windows: tokens that each layer's attention looks back, the token itself included (None: all). norm_offset is added
    to a norm's weight, and the product with it is then made in float32, before the cast. order: where the norms stand;
    "post": after each residual sum; "parallel": attention and feed-forward both read the layer's input.
    gated: the activation of one product multiplies another. rotary_dim: so many elements of each head turn (none
    without rotary positions). position_offset: row of the table of positions that the first token has. token_types:
    rows of a table of which row 0 is added to every token. embedding_scale multiplies what the table of words gives,
    rounded to the dtype before. attention_scale multiplies the scores, head_scale what goes into the head.
    start_token: the first token that an encoder-decoder's decoder is given. wide_down: in float16, the feed-forward's
    last product and the stream that it is added to are in float32, as they are beyond the range of float16.
    """

    vocabulary: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope: Rope | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]
    tied: bool
    initializer_range: float
    family: str = "llama"
    kind: ModelForm = "decoder"
    encoder_layers: int = 0
    norm: NormKind = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    order: Order = "pre"
    activation: Activation = "silu"
    gated: bool = True
    positions: Positions = "rotary"
    rotary_dim: int = _OF_THE_HEAD
    position_offset: int = 0
    relative_buckets: int = 0
    relative_distance: int = 0
    token_types: int = 0
    embedding_norm: bool = False
    embedding_scale: float | None = None
    attention_scale: float = _OF_THE_HEAD
    head_bias: bool = False
    final_norm: bool = True
    head_scale: float = 1.0
    start_token: int = 0
    wide_down: bool = False

    @property
    def max_source_positions(self) -> int:
        """Maximum length of an encoder-decoder's source in tokens."""
        return self.max_positions

    def __post_init__(self) -> None:
        if self.rotary_dim == _OF_THE_HEAD:
            object.__setattr__(self, "rotary_dim", self.head_dim if self.positions == "rotary" else 0)
        if self.attention_scale == _OF_THE_HEAD:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
