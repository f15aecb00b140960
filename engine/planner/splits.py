"""Why the engine refuses to split a model over the ranks of a layout, said before anything is started.

    why_not_split(architecture, Layout(tp=8))              # as `engine.models.sharding.check_degrees` on the ranks
    why_not_split_in_training(architecture, Layout(tp=8))  # as `engine.training.strategies.tensor.check_split`

The planner's own searches propose `Architecture.splits`, which also asks for equal shares of the feed-forward.
"""

from configs.common.execution import Layout
from engine.planner.architecture import Architecture

_SPLIT_IN_TRAINING = ("llama", "mistral", "qwen2")
"""Families that `engine.models.llama.Llama` trains, without Qwen3: norms of single heads are not split."""


def why_not_split(architecture: Architecture, layout: Layout) -> str | None:
    """Return why a model that generates or encodes is not split this way; None: it is."""
    tp, heads, shared = layout.tp, architecture.heads, architecture.kv_heads
    if heads % tp or (shared % tp and tp % shared):
        return f"{tp} ranks cannot share {heads} attention heads with {shared} key and value heads evenly"
    if min(architecture.vocabulary, architecture.feed_forward) < tp:
        return f"{tp} ranks are more than the words or feed-forward columns that they share"
    layers = architecture.most_stages
    return f"{layout.pp} stages need a layer each, but the model has {layers}" if layout.pp > layers else None


def why_not_split_in_training(architecture: Architecture, layout: Layout) -> str | None:
    """Return why a model is not trained with this tensor parallelism; None: it is."""
    if layout.tp > 1 and (architecture.model_type not in _SPLIT_IN_TRAINING or architecture.activation != "silu"):
        return f"{architecture.model_type} models are not split in training, only Llama and its kin"
    parts = {
        "query heads": architecture.heads, "key and value heads": architecture.kv_heads,
        "feed-forward columns": architecture.feed_forward,
    }  # fmt: skip
    if not layout.strategy.startswith("zero"):  # DeepSpeed keeps the vocabulary whole
        parts["tokens of the vocabulary"] = architecture.vocabulary
    for name, count in parts.items():
        if count % layout.tp:
            return f"{count} {name} cannot be split by {layout.tp} in training"
    return None
