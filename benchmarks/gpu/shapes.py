"""Shapes of the checks' models, and their tiny stand-ins in a rehearsal; weights are random and made on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from configs.families.config import ModelConfig
from engine.inference.model import Shard
from engine.inference.weights import shard_of
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid

STEPS = 8
"""Tokens of one timed sample of decoding."""
_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA_8B = _COMMON | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
}
"""The shape of Llama-3.1-8B, 8.03e9 parameters; without its scaling of long positions, which changes no speed."""
LLAMA_1B = _COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""The shape of Llama-3.2-1B, 1.24e9 parameters."""
TINY = _COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}


class Sized(Protocol):
    """What knows whether shapes are tiny: a `Bench`."""

    @property
    def rehearsal(self) -> bool:
        """On a CPU, with tiny shapes."""


def large_model(bench: Sized) -> dict[str, Any]:
    """Return the configuration of the model to generate with."""
    return TINY if bench.rehearsal else LLAMA_8B


def training_model(bench: Sized) -> dict[str, Any]:
    """Return the configuration of the model to train."""
    return TINY if bench.rehearsal else LLAMA_1B


@dataclass(frozen=True)
class DecodeSizes:
    """Batches, tokens of a prompt, and timed samples of STEPS tokens each."""

    batches: tuple[int, ...]
    prompt: int
    samples: int

    @property
    def new_tokens(self) -> int:
        """Tokens made in all: those of the samples and of the warm-up before."""
        return (self.samples + 3) * STEPS


def decode_sizes(bench: Sized) -> DecodeSizes:
    """Return the sizes of the decode check, which the planner is asked about too."""
    return DecodeSizes((1, 2, 4), 16, 5) if bench.rehearsal else DecodeSizes((1, 8, 64), 512, 25)


def prefill_lengths(bench: Sized) -> tuple[int, ...]:
    """Return the prompts of the prefill check, in tokens."""
    return (32, 64) if bench.rehearsal else (2048, 8192)


def random_shard(bench: Bench, config: dict[str, Any], dtype: torch.dtype, grid: Grid, group: Communicator) -> Shard:
    """Return a rank's shard with random weights made on the device, the same for every layout."""
    parsed = ModelConfig.parse(config)
    return shard_of(parsed, grid, group, dict(random_tensors(bench, parsed, dtype)))


def one_shard(bench: Bench, config: dict[str, Any], dtype: torch.dtype) -> Shard:
    """Return the whole model as the shard of one rank."""
    return random_shard(bench, config, dtype, Grid(1, 1, 1, 0), Communicator((0,), 0))


def random_tensors(bench: Bench, config: ModelConfig, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Return the tensors of a checkpoint: matrices normal(0, 0.02), norms one."""
    generator = torch.Generator(bench.device).manual_seed(0)
    made: Callable[[tuple[int, ...]], Tensor] = lambda shape: torch.empty(  # noqa: E731
        shape, dtype=dtype, device=bench.device
    ).normal_(0.0, 0.02, generator=generator)
    return [
        (name, made(shape) if len(shape) > 1 else torch.ones(shape, dtype=dtype, device=bench.device))
        for name, shape in config.tensor_shapes().items()
    ]


def decode_bytes(shard: Shard, batch: int, positions: int) -> int:
    """Return the bytes that a decode step reads and writes: weights once, embedded rows, keys and values, logits.

    positions: that attention covers for each sequence; on a GPU the whole capacity of the cache, masked.
    """
    config, size = shard.config, shard.dtype.itemsize
    weights = sum(packed.nbytes for packed in shard.weights.packed())
    rows = batch * config.hidden * size
    cache = 2 * len(shard.layers) * config.kv_heads * config.head_dim * size * batch
    return weights + rows + cache * (positions + 1) + batch * config.vocabulary * size
