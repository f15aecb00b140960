"""Setups to predict: a model on a machine in a layout, for training or generation.

`engine.planner.cells` translates cells of a study; the planner's search creates setups directly, including layouts that
the engine cannot measure.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from configs.common.execution import Layout, Strategy
from configs.hardware.hardware import Machine
from configs.workloads.train import Offload
from engine.planner.architecture import Architecture

Precision = Literal["float32", "bfloat16_autocast", "bfloat16_mixed", "float16_mixed", "float8_mixed"]
Checkpointing = Literal["none", "selective", "full"]
WeightFormat = Literal["float32", "bfloat16", "float16", "float8", "int8", "int4"]


@dataclass(frozen=True)
class TrainingSetup:
    """One optimizer step of training.

    precision: `float32` throughout; `bfloat16_autocast`: float32 weights, products in bfloat16 (torch.autocast, DDP);
    `*_mixed`: 16-bit weights for forward and backward, float32 master weights and AdamW states (FSDP2's
    MixedPrecisionPolicy, DeepSpeed); float8: matrix products in float8, all else as bfloat16_mixed.
    micro_batch: sequences that one data-parallel rank computes at once; accumulation: micro-batches in a step. sharding
    (fsdp): over all replicas, or over those of a node (`machine.accelerators`), with replicas between nodes.
    deferred: fsdp keeps the whole gradients of inner micro-batches and reduces them once a step, as our engine does;
    False: in each micro-batch. wide_reduction: sharded 16-bit gradients are sent in float32, as in our engine's FSDP2.
    """

    architecture: Architecture
    machine: Machine
    layout: Layout = field(default_factory=Layout)
    micro_batch: int = 1
    sequence_length: int = 2048
    accumulation: int = 1
    precision: Precision = "bfloat16_mixed"
    checkpointing: Checkpointing = "none"
    attention: Literal["fused", "eager"] = "fused"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    offload: Offload = "none"
    compiled: bool = False
    fused_optimizer: bool = True  # AdamW in one kernel; False: tensor by tensor, as foreach or a loop does it
    reshard: bool = True  # fsdp: weights are freed after the forward and gathered again for the backward
    sharding: Literal["full", "hybrid"] = "full"
    deferred: bool = False
    wide_reduction: bool = False

    @property
    def global_batch(self) -> int:
        """Sequences in a step, over all ranks."""
        return self.micro_batch * self.accumulation * self.layout.dp

    @property
    def shards(self) -> int:
        """Replicas over which states are sharded."""
        if self.sharding == "full":
            return self.layout.dp
        return min(self.layout.dp, max(1, self.machine.accelerators // self.layout.tp))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks, of an encoder-decoder those of one side."""
        return self.global_batch * self.sequence_length

    @property
    def trained_tokens(self) -> int:
        """Tokens of a step as the engine counts them (`Examples.positions`): of a pair, its source's and its target's.

        They are the tokens of rates and prices.
        """
        return self.tokens_per_step * (2 if self.architecture.kind == "encoder_decoder" else 1)

    def replace(self, **changes: object) -> "TrainingSetup":
        """Return the setup with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class InferenceSetup:
    """Generation: `batch` sequences on each replica (dp counts replicas), each of a prompt and new tokens.

    weights: storage format; products are computed in `compute`.
    """

    architecture: Architecture
    machine: Machine
    layout: Layout = field(default_factory=Layout)
    batch: int = 1
    prompt_tokens: int = 512
    new_tokens: int = 128
    weights: WeightFormat = "bfloat16"
    compute: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    cache: WeightFormat | None = None  # of keys and values; None: as `compute`
    quantised_head: bool = False  # int8 and int4 for the head too (torchao does so; bitsandbytes, GPTQ and AWQ do not)
    int4_group: int = 128  # weights that share a scale and a zero point
    int4_zero_points: bool = True  # stored beside the scales
    product_operators: int = 0  # beside each product of quantised weights: rounding its inputs, scaling its results
    sharded_vocabulary: bool = True  # tensor parallelism shards table and head too
    micro_batch: int | None = None  # sequences per stage at once; None: the whole batch, one active stage at a time

    @property
    def at_once(self) -> int:
        """Sequences that pass a stage at once."""
        return min(self.batch, self.micro_batch or self.batch)

    @property
    def context(self) -> int:
        """Tokens of a complete sequence."""
        return self.prompt_tokens + self.new_tokens

    def replace(self, **changes: object) -> "InferenceSetup":
        """Return the setup with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def precision_for(strategy: Strategy, precision: Precision) -> Precision:
    """Return a strategy's 16-bit precision: DDP uses autocast, sharded strategies 16-bit copies."""
    if precision in ("bfloat16_autocast", "bfloat16_mixed"):
        return "bfloat16_autocast" if strategy in ("none", "ddp") else "bfloat16_mixed"
    return precision
