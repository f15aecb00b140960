"""Rows of a model's table of positions that no token has. No torch.

    unused_positions({"model_type": "roberta", "pad_token_id": 1})      # 2: a table of 514 rows holds 512 tokens

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
