"""Which part of the model each tensor-parallel rank holds and computes. Pure arithmetic, no torch.

    check_degrees(config, tp=2, pp=1)             # ValueError names the degrees that work
    share = Share.of(config, tp=2, index=0)       # heads, feed-forward columns and words of one rank
    wanted = pieces(config, grid)                 # what a rank reads of each tensor of the checkpoint

Queries, keys, values, gate and up are split by rows (heads), the output and down projections by columns, embedding
and head by words. Query heads keep their order, so a rank's keys and values are those that its queries belong to;
where ranks outnumber key and value heads, several ranks hold the same one.
"""

from dataclasses import dataclass

from engine.inference.stages import own_layers
from engine.loading import Piece
from engine.models.config import ModelConfig
from engine.parallel.grid import Grid


def even_share(count: int, parts: int, index: int) -> range:
    """Part `index` of `count` things: contiguous, sizes differ by one at most, larger ones first."""
    base, extra = divmod(count, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


def working_degrees(config: ModelConfig) -> list[int]:
    """Degrees of tensor parallelism that split the heads evenly, with key and value heads whole or repeated evenly."""
    return [
        tp
        for tp in range(1, config.heads + 1)
        if config.heads % tp == 0 and (config.kv_heads % tp == 0 or tp % config.kv_heads == 0)
    ]


def check_degrees(config: ModelConfig, tp: int, pp: int) -> None:
    """Raise ValueError, naming the degrees that work, where the model cannot be split so."""
    degrees = working_degrees(config)
    if tp not in degrees:
        raise ValueError(
            f"layout.tp: {tp} ranks cannot share {config.heads} attention heads with {config.kv_heads} key and value "
            f"heads evenly; use one of: {', '.join(map(str, degrees))}"
        )
    if min(config.vocabulary, config.feed_forward) < tp:
        raise ValueError(
            f"layout.tp: {tp} ranks are more than the words ({config.vocabulary}) or feed-forward columns "
            f"({config.feed_forward}) that they share; use one of: "
            f"{', '.join(str(one) for one in degrees if one <= min(config.vocabulary, config.feed_forward))}"
        )
    if pp > config.layers:
        raise ValueError(
            f"layout.pp: {pp} stages need a layer each, but the model has {config.layers}; use 1 to {config.layers}"
        )


@dataclass(frozen=True)
class Share:
    """What rank `index` of `tp` computes of every layer, of the embedding and of the head."""

    heads: range
    kv_heads: range
    feed_forward: range
    vocabulary: range

    @classmethod
    def of(cls, config: ModelConfig, tp: int, index: int) -> "Share":
        """The share of a rank; degrees must have been checked."""
        heads = even_share(config.heads, tp, index)
        group = config.heads // config.kv_heads
        return cls(
            heads=heads,
            kv_heads=range(heads.start // group, (heads.stop - 1) // group + 1),
            feed_forward=even_share(config.feed_forward, tp, index),
            vocabulary=even_share(config.vocabulary, tp, index),
        )


def pieces(config: ModelConfig, grid: Grid) -> dict[str, Piece]:
    """What this rank keeps of each tensor of a checkpoint, by name; tensors of which it keeps nothing are left out.

    The bias of a projection split by columns belongs to the first rank, so that it is added once. A tied embedding is
    read by the first stage and by the last, which use it as the head.
    """
    share = Share.of(config, grid.tp, grid.tp_rank)
    wanted: dict[str, Piece] = {}
    for layer in own_layers(config, grid):
        wanted |= _layer_pieces(config, share, f"model.layers.{layer}.", first=grid.tp_rank == 0)
    words = _span(share.vocabulary, config.vocabulary)
    if grid.is_first_stage or (grid.is_last_stage and config.tied):
        wanted["model.embed_tokens.weight"] = Piece("model.embed_tokens.weight", rows=words)
    if grid.is_last_stage:
        wanted["model.norm.weight"] = Piece("model.norm.weight")
        if not config.tied:
            wanted["lm_head.weight"] = Piece("lm_head.weight", rows=words)
    return wanted


def _layer_pieces(config: ModelConfig, share: Share, prefix: str, first: bool) -> dict[str, Piece]:
    queries = _span(share.heads, config.heads, config.head_dim)
    shared = _span(share.kv_heads, config.kv_heads, config.head_dim)
    feed = _span(share.feed_forward, config.feed_forward)
    by_rows = {
        "self_attn.q_proj": (queries, config.qkv_bias),
        "self_attn.k_proj": (shared, config.qkv_bias),
        "self_attn.v_proj": (shared, config.qkv_bias),
        "mlp.gate_proj": (feed, config.mlp_bias),
        "mlp.up_proj": (feed, config.mlp_bias),
    }
    by_columns = {"self_attn.o_proj": (queries, config.output_bias), "mlp.down_proj": (feed, config.mlp_bias)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if config.head_norms else []
    found: list[Piece] = []
    for name, (rows, bias) in by_rows.items():
        found.append(Piece(f"{prefix}{name}.weight", rows=rows))
        if bias:
            found.append(Piece(f"{prefix}{name}.bias", rows=rows))
    for name, (columns, bias) in by_columns.items():
        found.append(Piece(f"{prefix}{name}.weight", columns=columns))
        if bias and first:
            found.append(Piece(f"{prefix}{name}.bias"))
    found += [Piece(f"{prefix}{name}.weight") for name in norms]
    return {piece.name: piece for piece in found}


def _span(part: range, count: int, size: int = 1) -> tuple[int, int] | None:
    """Elements of a part of `count` things of `size` elements each; None for all of them."""
    return None if len(part) == count else (part.start * size, part.stop * size)
