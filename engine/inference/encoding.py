"""One pass of an encoder stack: bidirectional attention without padding positions, and no cache.

step = EncoderStep.of(config, weights, batch, length, padding, device)
mixed = step.attend(heads, queries, turned, scale)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from engine.inference.layer import StackWeights
from engine.inference.positions import biased, bidirectional_bias, table_rows
from engine.models.llama import attend


@dataclass(slots=True)
class EncoderStep:
    """Data shared by all layers of a pass.

    rows [batch, length]: of the table of learned positions. mask: visible keys [batch, 1, 1, length], or a bias added
    to the scores [1 or batch, heads, length, length]; None: all are visible.
    """

    rows: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights: StackWeights,
        batch: int,
        length: int,
        padding: Tensor | None,
        device: torch.device,
    ) -> "EncoderStep":
        """Create a step. padding [batch]: number of padding positions at the left of each row, which are masked.

        Raises ValueError if the model has fewer learned positions.
        """
        assert config.positions != "rotary", "no encoder here turns its heads"
        mask = None if padding is None else (torch.arange(length, device=device) >= padding[:, None])[:, None, None]
        if weights.relative is not None:
            buckets, furthest = config.relative_buckets, config.relative_distance
            mask = biased(bidirectional_bias(weights.relative, buckets, furthest, length), mask)
        rows = None
        if config.positions == "learned":
            if length > config.max_positions:
                raise ValueError(
                    f"workload: {length} tokens of a prompt are more than the {config.max_positions} positions that "
                    "the model has learned; use shorter prompts"
                )
            rows = table_rows(0, length, padding, config.position_offset, batch, device)
        return cls(rows, mask)

    def attend(self, heads: Tensor, queries: int, turned: int, scale: float | None) -> Tensor:
        """Compute attention of heads [batch, length, queries + keys + values, head_dim]: [batch, length, queries x
        head_dim].

        turned: number of query and key heads.
        """
        batch, length = heads.shape[0], heads.shape[1]
        own, keys = heads[:, :, :queries].transpose(1, 2), heads[:, :, queries:turned].transpose(1, 2)
        mixed = attend(own, keys, heads[:, :, turned:].transpose(1, 2), self.mask, scale, causal=False)
        return mixed.transpose(1, 2).reshape(batch, length, -1)
