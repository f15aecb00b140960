"""What the ranks of `test_engine_compression.py` do: logits of tiny-stdlib, compressed, in some layout."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.plans.model_manifest import ModelManifest
from engine.compression import Compressor
from engine.inference.weights import LoadedShard, read_shard
from engine.parallel.communicator import Communicators, open_communicators
from engine.parallel.grid import Grid

FOLDER = Path(__file__).parents[3] / "configs" / "models" / "tiny-stdlib"
CPU = torch.device("cpu")
_groups: dict[tuple[int, int], Communicators] = {}


def load(passes: tuple[str, ...], dtype: torch.dtype, grid: Grid, groups: Communicators) -> LoadedShard:
    """The rank's part of tiny-stdlib, compressed."""
    return read_shard(
        manifest_of_tiny_stdlib(), grid, groups.tensor, dtype, CPU, compressor=Compressor(passes, dtype, CPU)
    )


def manifest_of_tiny_stdlib() -> ModelManifest:
    config = json.loads((FOLDER / "config.json").read_text())
    return ModelManifest(identity="folder:0", source="folder", folder=str(FOLDER), files={}, config=config)


def logits(rank: int, passes: tuple[str, ...], tp: int, pp: int, tokens: list[list[int]]) -> Any:
    """Of all positions in float32, [batch, length, vocabulary], from the last stage; else None."""
    grid = Grid(1, tp, pp, rank)
    groups = _groups.setdefault((tp, pp), open_communicators(grid, CPU, "gloo" if tp * pp > 1 else None, 60))
    shard = load(passes, torch.float32, grid, groups).shard
    ids = torch.tensor(tokens)
    inputs: Tensor = ids
    place = groups.pipeline.index
    with torch.inference_mode():
        if not shard.first:
            inputs = torch.empty((*ids.shape, shard.config.hidden), dtype=shard.dtype)
            groups.pipeline.receive(inputs, place - 1)
        hidden = shard.forward(inputs, shard.new_cache(*ids.shape), None)
        if not shard.last:
            groups.pipeline.send(hidden, place + 1)
            return None
        return shard.full_logits(shard.head(hidden)).float().numpy()
