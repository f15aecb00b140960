"""What the ranks of the parity tests do; no transformers here, as in the product."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.common.execution import Layout, StageBalance
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.generate import GenerateWorkload
from engine.context import Context
from engine.inference.model import Shard
from engine.inference.weights import LoadedShard, load_shard, read_shard
from engine.parallel.communicator import Communicators, open_communicators
from engine.parallel.grid import Grid
from engine.rank.agreement import raise_on_all_ranks

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
def _loaded(folder: str, dtype: str, grid: Grid) -> LoadedShard:
    group = communicators(grid.dp, grid.tp, grid.pp, grid.rank).tensor
    return read_shard(manifest_of(folder), grid, group, getattr(torch, dtype), torch.device("cpu"))


def manifest_of(folder: str) -> ModelManifest:
    config = json.loads((Path(folder) / "config.json").read_text())
    return ModelManifest(identity="folder:0", source="folder", folder=folder, files={}, config=config)


def forward(rank: int, run: Run) -> dict[str, Any] | None:
    """Logits [batch, length, vocabulary] and greedy tokens from the rank that speaks for its replica; else None."""
    grid = Grid(run.dp, run.tp, run.pp, rank, run.stage_balance)
    groups = communicators(run.dp, run.tp, run.pp, rank)
    shard = _loaded(run.folder, run.dtype, grid).shard
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
    chosen = _decode(shard, groups, hidden, run.new_tokens, cache, padding)
    if not grid.is_last_stage:
        return None
    return {
        "speaks": grid.reports_results,
        "logits": torch.cat(logits, dim=1).float().numpy(),
        "tokens": chosen.numpy(),
    }


def encode(rank: int, run: Run) -> dict[str, Any] | None:
    """The last states [batch, length, hidden] of an encoder from ranks of the last stage; else None."""
    grid = Grid(run.dp, run.tp, run.pp, rank, run.stage_balance)
    groups = communicators(run.dp, run.tp, run.pp, rank)
    padding = None if run.padding is None else torch.tensor(run.padding)
    shard = _loaded(run.folder, run.dtype, grid).shard
    states = _stage(shard, groups, torch.tensor(run.tokens), None, padding)
    return {"states": states.float().numpy()} if grid.is_last_stage else None


def translate(rank: int, run: Run, forced: Rows) -> dict[str, Any] | None:
    """An encoder-decoder's states of the tokens, its logits of the decoder's `forced` tokens, and greedy tokens."""
    grid = Grid(run.dp, run.tp, run.pp, rank, run.stage_balance)
    groups = communicators(run.dp, run.tp, run.pp, rank)
    padding = None if run.padding is None else torch.tensor(run.padding)
    shards = _loaded(run.folder, run.dtype, grid).shards
    states = _stage(shards["encoder"], groups, torch.tensor(run.tokens), None, padding)
    states = groups.pipeline.broadcast(states.contiguous(), run.pp - 1)
    decoder, tokens = shards["decoder"], torch.tensor(forced)
    batch, length = tokens.shape
    cache = decoder.new_cache(batch, length + run.new_tokens)
    for source in (states[:, -1:], states):  # the memory grows, and what it held before is gone
        cache.set_source(source, padding if source is states else None)
    logits, start = [], 0
    for size in [*run.pieces, *[1] * (length - sum(run.pieces))]:
        hidden = _stage(decoder, groups, tokens[:, start : start + size], cache, None)
        start += size
        if grid.is_last_stage:
            logits.append(decoder.full_logits(decoder.head(hidden)))
    cache.clear()
    begun = _stage(decoder, groups, torch.full((batch, 1), decoder.config.start_token), cache, None)
    chosen = _decode(decoder, groups, begun, run.new_tokens, cache, None)
    if not grid.is_last_stage:
        return None
    found = {"states": states.float().numpy(), "logits": torch.cat(logits, dim=1).float().numpy()}
    return found | {"tokens": chosen.numpy()}


def _decode(
    shard: Shard, groups: Communicators, hidden: torch.Tensor, new_tokens: int, cache: Any, padding: Any
) -> torch.Tensor:
    """Greedy tokens [batch, new_tokens] after hidden states that have come out of this stage."""
    batch = hidden.shape[0]
    chosen: list[torch.Tensor] = []
    for step in range(new_tokens):
        if step:
            hidden = _stage(shard, groups, chosen[-1][:, None], cache, padding)
        picked = torch.empty(batch, dtype=torch.int64)
        if shard.last:
            picked = shard.greedy(shard.head(hidden)[:, -1]).clone()
        chosen.append(groups.pipeline.broadcast(picked, groups.pipeline.size - 1))
    return torch.stack(chosen, dim=1) if chosen else torch.empty((batch, 0), dtype=torch.int64)


def _stage(shard: Shard, groups: Communicators, tokens: torch.Tensor, cache: Any, padding: Any) -> torch.Tensor:
    """This stage's turn: its input from the stage before, its output to the one after."""
    inputs, place = tokens, groups.pipeline.index
    if not shard.first:
        inputs = torch.empty((*tokens.shape, shard.config.hidden), dtype=shard.dtype)
        groups.pipeline.receive(inputs, place - 1)
    hidden = shard.encode(inputs, padding) if cache is None else shard.forward(inputs, cache, padding)
    if not shard.last:
        groups.pipeline.send(hidden, place + 1)
    return hidden


def loaded_from(rank: int, folders: list[str]) -> str:
    """What loading says on two tensor-parallel ranks whose nodes have folders of their own."""
    cell = Cell(model="m", workload=GenerateWorkload(), layout=Layout(tp=2))
    job = Job(
        name="job", study="s", measuring_pass="timed", measuring=Measuring(), ranks_per_node=1,
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),), timeout_seconds=60, inputs="", cache="",
    )  # fmt: skip
    context = Context(
        job, JobPaths(Path(folders[rank])), rank, 2, torch.device("cpu"), manifest_of(folders[rank]), dist.barrier,
        communicators(1, 2, 1, rank),
    )  # fmt: skip
    try:
        raise_on_all_ranks(lambda: load_shard(context, torch.float32), context)
    except ValueError as error:
        return str(error)
    return ""
