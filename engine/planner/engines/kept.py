"""How much of its cache an engine gives to a sequence: its whole context, or what sliding windows leave of it.

    kept_tokens(point, 8192)        # in tokens that every layer keeps: 8192 without windows, 1,600 of Gemma 3 27B

vLLM divides its cache into blocks that all groups of layers share: a group has layers of one window, as many as the
rarest window has, or as the commonest where the counts are close, and is filled up to that number; a layer with a
window keeps the blocks that the window touches (https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/, and
`_get_kv_cache_groups_uniform_page_size` and `SlidingWindowSpec` of vllm/v1). Chunks count as windows. While
a prompt is computed its layers keep a step's tokens more, which is not counted. llama.cpp and transformers keep a
layer's window alone (`--swa-full` is off; `DynamicSlidingWindowLayer`); our own cache and the one that TensorRT-LLM
makes by default keep the whole context.
"""

from collections import Counter
from math import ceil

from engine.planner.engines.point import BatchPoint

_BLOCK = 16  # tokens; vLLM's default on GPUs
_CLOSE = 1.5  # counts of layers whose ratio is smaller are filled up to the larger one
_WINDOW_ALONE = ("llama.cpp", "transformers")


def kept_tokens(point: BatchPoint, tokens: int) -> float:
    """Return the room of a sequence of `tokens` in the engine's cache, in tokens that every layer keeps."""
    architecture = point.architecture
    if not architecture.windows:
        return float(tokens)
    if point.engine == "vllm":
        return _in_groups(architecture.windows, tokens)
    if point.engine in _WINDOW_ALONE:
        return sum(architecture.attended(layer, tokens) for layer in range(architecture.layers)) / architecture.layers
    return float(tokens)


def keeps_windows(engine: str) -> bool:
    """Return whether an engine's cache drops what has left the window of a layer."""
    return engine == "vllm" or engine in _WINDOW_ALONE


def _in_groups(windows: tuple[int | None, ...], tokens: int) -> float:
    counts = Counter(windows)
    fewest, most = min(counts.values()), max(counts.values())
    size = most if most < _CLOSE * fewest else fewest
    whole = ceil(tokens / _BLOCK)
    blocks = 0
    for window, layers in counts.items():
        each = whole if window is None else min(whole, ceil((window - 1) / _BLOCK) + 1)
        blocks += ceil(layers / size) * each
    return blocks * size * _BLOCK / len(windows)
