"""What a training framework adds to the model's own memory: buckets, prefetching, how the loss is computed.

Framework()                              # the defaults of torch 2.13 and DeepSpeed 0.19.8
Framework(reduce_bucket_size=50_000_000)
of_engine(elements=13_000_000)           # as engine.training sets them up for a model of so many elements
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Framework:
    """Elements, bytes and habits. The names of DeepSpeed's settings are those of its `zero_optimization`.

    swap_buffer_elements: of all its buffers for weights on NVMe (5 of 1e8).
    holds_logits: the training loop keeps the logits during the backward pass, as a variable. loss_parallel: the loss
    is computed on shards of the vocabulary. sequence_parallel: tensor-parallel ranks share out the residual stream.
    expands_heads: keys and values are repeated for each query head before attention (`enable_gqa` does not).
    prefetches: FSDP gathers the next block while one computes. stays_gathered: from the forward to the backward pass,
    the root alone, the last block too, or all of them. fragmentation: share of what a GPU's caching allocator has
    reserved that holds no tensor; 15 % on average over eight language models (GMLake, arXiv 2401.08156, 2024).
    context_bytes: of the CUDA context and the libraries' own, outside of the allocator.
    """

    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    swap_buffer_elements: int = 500_000_000
    fused_optimizer: bool = True
    holds_logits: bool = True
    loss_parallel: bool = False
    sequence_parallel: bool = False
    expands_heads: bool = False
    prefetches: bool = True
    stays_gathered: Literal["root", "last", "all"] = "root"
    fragmentation: float = 0.15
    context_bytes: int = 1_500_000_000


DEFAULT = Framework()


def of_engine(elements: int) -> Framework:
    """Our own engine: DeepSpeed's buckets no longer than the model, the logits forgotten once there is a loss."""
    return replace(
        DEFAULT,
        reduce_bucket_size=min(DEFAULT.reduce_bucket_size, elements),
        prefetch_bucket_size=min(DEFAULT.prefetch_bucket_size, elements),
        holds_logits=False,
    )
