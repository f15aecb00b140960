"""Rows of a model's table of positions that no token has, and the longest sequence that it takes. No torch.

    unused_positions({"model_type": "roberta", "pad_token_id": 1})      # 2: a table of 514 rows holds 512 tokens
    trained_positions({"max_position_embeddings": 2048})                # 2048
    source_positions({"model_type": "led", "max_encoder_position_embeddings": 16384})   # 16384; its answers have fewer
    are_distances({"model_type": "bloom", "seq_length": 2048})          # True: it takes more than 2048 tokens

RoBERTa and its relatives count positions from the row after the padding token's (transformers'
`create_position_ids_from_input_ids`).
"""

from collections.abc import Mapping
from typing import Any

from configs.families.numbers import MAX_SIZE, size_of

_AFTER_PADDING = frozenset(
    {
        "camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta",
        "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
LIMIT_KEYS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
    "max_decoder_position_embeddings",
)  # fmt: skip
"""Keys of a config.json that say how long a sequence may be, in any family; the first that is there counts."""
_NAMES_OF_POSITIONS = ("max_position_embeddings", "n_positions", "max_decoder_position_embeddings")
_WINDOW = 512
"""LED's attention window where config.json names none, and positions of its encoder (transformers' LEDConfig)."""
_PADDING = 1
"""The padding token where a config.json names none, and always MPNet's."""


def unused_positions(config: Mapping[str, Any]) -> int:
    """Return the rows before the first token's. Raises ValueError for a padding token that is no number."""
    kind, padding = config.get("model_type"), config.get("pad_token_id")
    if not isinstance(kind, str) or kind not in _AFTER_PADDING:
        return 0
    if config.get("position_embedding_type") == "rotary":  # of ESM: there is no table
        return 0
    if padding is None or kind == "mpnet":
        return _PADDING + 1
    return size_of(padding, "pad_token_id", MAX_SIZE, smallest=0) + 1


def are_distances(config: Mapping[str, Any]) -> bool:
    """Return whether positions are distances between tokens: sequences may be longer than those of the training.

    T5's buckets, and ALiBi of BLOOM and of the first Falcons. MPT is none of these: in transformers it has no more
    distances than `max_seq_len`. Nor is MPNet, which has a table of positions beside its buckets.
    """
    kind = config.get("model_type")
    if kind == "bloom" or (kind == "falcon" and config.get("alibi") is True):
        return True
    return kind != "mpnet" and config.get("relative_attention_num_buckets") is not None


def trained_positions(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence in training; None where the configuration names no limit, as of relative
    positions. Raises ValueError for one that is no number.
    """
    if are_distances(config):
        return None
    named = next((name for name in _NAMES_OF_POSITIONS if config.get(name)), None)
    limit = None if named is None else size_of(config[named], named, MAX_SIZE) - unused_positions(config)
    limits = [each for each in (limit, source_positions(config)) if each is not None]
    return min(limits, default=None)


def source_positions(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of an encoder-decoder's source, where its encoder has positions of its own (LED); else
    None. Raises ValueError for one that is no number.

    LED fills a source up to a multiple of its largest attention window, and the filling has positions too
    (transformers' `LEDEncoder._pad_to_window_size`).
    """
    name = "max_encoder_position_embeddings"
    if not config.get(name):
        return None
    rows, window = size_of(config[name], name, MAX_SIZE), config.get("attention_window") or _WINDOW
    widths = window if isinstance(window, list | tuple) else [window]
    widest = max(size_of(each, "attention_window", MAX_SIZE) for each in widths)
    return rows - rows % widest
