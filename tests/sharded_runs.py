"""What the ranks of `test_engine_inference_parity.py` do; no transformers here, as in the product."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.cell import StageBalance
from configs.model import Manifest
from engine.inference.model import Shard
from engine.inference.weights import read_shard
from engine.parallel.communicator import Communicators, open_communicators
from engine.parallel.grid import Grid

Rows = list[list[int]]


@dataclass(frozen=True)
class Run:
    """One forward pass in pieces: the layout, the model's folder, tokens [batch, length], filling at the left.

    pieces: lengths of the calls, the rest one token each. new_tokens: greedy ones after that.
    """

    dp: int
    tp: int
    pp: int
    folder: str
    tokens: Rows
    padding: list[int] | None = None
    pieces: tuple[int, ...] = ()
    new_tokens: int = 0
    dtype: str = "float32"
    stage_balance: StageBalance = "memory"


@cache
def communicators(dp: int, tp: int, pp: int, rank: int) -> Communicators:
    """Groups of a layout, opened once for all tests."""
    return open_communicators(Grid(dp, tp, pp, rank), torch.device("cpu"), "gloo", 60)


@cache
def _shard(folder: str, dtype: str, grid: Grid) -> Shard:
    group = communicators(grid.dp, grid.tp, grid.pp, grid.rank).tensor
    return read_shard(manifest_of(folder), grid, group, getattr(torch, dtype), torch.device("cpu")).shard


def manifest_of(folder: str) -> Manifest:
    config = json.loads((Path(folder) / "config.json").read_text())
    return Manifest(identity="folder:0", source="folder", folder=folder, files={}, config=config)


def forward(rank: int, run: Run) -> dict[str, Any] | None:
    """Logits [batch, length, vocabulary] and greedy tokens from the rank that speaks for its replica; else None."""
    grid = Grid(run.dp, run.tp, run.pp, rank, run.stage_balance)
    groups = communicators(run.dp, run.tp, run.pp, rank)
    shard = _shard(run.folder, run.dtype, grid)
    tokens = torch.tensor(run.tokens)
    padding = None if run.padding is None else torch.tensor(run.padding)
    batch, length = tokens.shape
    cache = shard.new_cache(batch, length + run.new_tokens)
    logits, start = [], 0
    for size in [*run.pieces, *[1] * (length - sum(run.pieces))]:
        hidden = _stage(shard, groups, tokens[:, start : start + size], cache, padding)
        start += size
        if grid.is_last_stage:
            logits.append(shard.full_logits(shard.head(hidden)))
    chosen: list[torch.Tensor] = []
    for step in range(run.new_tokens):
        if step:
            hidden = _stage(shard, groups, chosen[-1][:, None], cache, padding)
        picked = torch.empty(batch, dtype=torch.int64)
        if grid.is_last_stage:
            picked = shard.greedy(shard.head(hidden)[:, -1]).clone()
        chosen.append(groups.pipeline.broadcast(picked, run.pp - 1))
    if not grid.is_last_stage:
        return None
    return {
        "speaks": grid.speaks,
        "logits": torch.cat(logits, dim=1).float().numpy(),
        "tokens": torch.stack(chosen, dim=1).numpy() if chosen else np.empty((batch, 0)),
    }


def _stage(shard: Shard, groups: Communicators, tokens: torch.Tensor, cache: Any, padding: Any) -> torch.Tensor:
    """This stage's turn: its input from the stage before, its output to the one after."""
    inputs, place = tokens, groups.pipeline.index
    if not shard.first:
        inputs = torch.empty((*tokens.shape, shard.config.hidden), dtype=shard.dtype)
        groups.pipeline.receive(inputs, place - 1)
    hidden = shard.forward(inputs, cache, padding)
    if not shard.last:
        groups.pipeline.send(hidden, place + 1)
    return hidden
