"""Memory overhead of training frameworks: buckets, prefetching, computation of the loss.

Framework()                              # the defaults of torch 2.13 and DeepSpeed 0.19.8
Framework(reduce_bucket_size=50_000_000)
of_engine(elements=13_000_000)           # as configured by engine.training for a model of this size
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Framework:
    """Settings of a framework. DeepSpeed's settings are named as in its `zero_optimization`.

    swap_buffer_elements: of all its buffers for weights on NVMe (5 of 1e8).
    holds_logits: a variable of the training loop holds the logits during the backward pass. loss_parallel: the loss is
    computed on shards of the vocabulary. sequence_parallel: tensor-parallel ranks split the residual stream.
    expands_heads: keys and values are repeated for each query head before attention (`enable_gqa` does not).
    prefetches: FSDP gathers the next block while one computes. stays_gathered: units gathered from the forward to the
    backward pass: the root alone, the last block too, or all. fragmentation: share of a GPU's reserved memory that
    holds no tensor; 15 % on average over eight language models (GMLake, arXiv 2401.08156, 2024).
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
    """Return our engine's settings: DeepSpeed's buckets at most as long as the model, logits freed after the loss."""
    return replace(
        DEFAULT,
        reduce_bucket_size=min(DEFAULT.reduce_bucket_size, elements),
        prefetch_bucket_size=min(DEFAULT.prefetch_bucket_size, elements),
        holds_logits=False,
    )
