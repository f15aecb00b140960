"""One generation by an engine: what is predicted, and what a measured row describes.

point = BatchPoint("vllm", find_model("llama-3-8b"), machine, tp=2, batch=32, prompt_tokens=512, new_tokens=128)
"""

from dataclasses import dataclass
from functools import cached_property

from configs.hardware.hardware import Machine
from engine.planner.architecture import Architecture
from engine.planner.memory.stored import BYTES
from engine.planner.setup import WeightFormat


@dataclass(frozen=True)
class BatchPoint:
    """`batch` sequences of equal length, all there from the start, on one replica of `tp` x `pp` ranks of a node."""

    engine: str
    architecture: Architecture
    machine: Machine
    tp: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    weights: WeightFormat = "bfloat16"
    cache: WeightFormat = "bfloat16"
    pp: int = 1  # stages of a pipeline: they share weights and cache, and work on a share of the batch each

    @property
    def context(self) -> int:
        """Tokens of a complete sequence."""
        return self.prompt_tokens + self.new_tokens

    @property
    def pair(self) -> tuple[str, str]:
        """Model and device: rows of a pair resemble each other, so they are left out together."""
        return self.architecture.name, self.machine.accelerator.name

    @cached_property
    def weight_bytes(self) -> float:
        """Of the fullest rank; norms and tables count like matrices."""
        return self.architecture.rank_parameters(self.tp) * BYTES[self.weights] / self.pp

    @cached_property
    def cache_bytes_per_token(self) -> float:
        """Keys and values of one token over all layers, on the fullest rank."""
        return self.architecture.cache_elements(1, self.tp) * BYTES[self.cache] / self.pp

    @property
    def tokens(self) -> int:
        """Prompt and output of all sequences."""
        return self.batch * self.context
