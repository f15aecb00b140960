"""Split a model over tensor-parallel ranks. Pure arithmetic, no torch.

    check_degrees(config, tp=2, pp=1)             # ValueError names valid degrees
    share = Share.of(config, tp=2, index=0)       # heads, feed-forward columns and words of one rank

Queries, keys, values, gate and up are split by rows (heads), the output and down projections by columns, embedding and
head by words (`engine.models.slots` defines what a rank reads of each tensor). Query heads keep their order, so a rank
holds the keys and values of its queries; with more ranks than key and value heads, several ranks hold the same one.
"""

from dataclasses import dataclass

from configs.families.config import ModelConfig
from configs.families.tensors import layer_stacks


def even_share(count: int, parts: int, index: int) -> range:
    """Return part `index` of `count` items: contiguous, sizes differ by at most one, larger ones first."""
    base, extra = divmod(count, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


def working_degrees(config: ModelConfig) -> list[int]:
    """Return tensor-parallel degrees that split the heads evenly, with key and value heads whole or repeated evenly."""
    return [
        tp
        for tp in range(1, config.heads + 1)
        if config.heads % tp == 0 and (config.kv_heads % tp == 0 or tp % config.kv_heads == 0)
    ]


def check_degrees(config: ModelConfig, tp: int, pp: int) -> None:
    """Raise ValueError, naming valid degrees, if the model cannot be split this way."""
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
    layers = min(layer_stacks(config).values())
    if pp > layers:
        raise ValueError(f"layout.pp: {pp} stages need a layer each, but the model has {layers}; use 1 to {layers}")


@dataclass(frozen=True)
class Share:
    """The part of every layer, of the embedding and of the head that rank `index` of `tp` computes."""

    heads: range
    kv_heads: range
    feed_forward: range
    vocabulary: range

    @classmethod
    def of(cls, config: ModelConfig, tp: int, index: int) -> "Share":
        """Return the share of a rank; degrees must have been checked."""
        heads = even_share(config.heads, tp, index)
        group = config.heads // config.kv_heads
        return cls(
            heads=heads,
            kv_heads=range(heads.start // group, (heads.stop - 1) // group + 1),
            feed_forward=even_share(config.feed_forward, tp, index),
            vocabulary=even_share(config.vocabulary, tp, index),
        )
