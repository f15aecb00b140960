"""What the ranks of the tests of recorded steps do: compute the same in ordinary steps and in recorded ones."""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from configs.plans.model_manifest import ModelManifest
from engine.inference import residual
from engine.inference.model import Shard
from engine.inference.paged import PagedSizes
from engine.inference.pipeline import Replica
from engine.inference.recorded import decode_step, path_of
from engine.inference.weights import read_shard
from engine.parallel.communicator import PeerLostError
from engine.parallel.grid import Grid
from engine.prompts.tokens import PromptBatch
from engine.serving.step_message import TokenStep
from engine.serving.stepping import StepRunner
from tests.support.answers.sharded_runs import communicators

WORDS = 97


@dataclass(frozen=True)
class Decoding:
    """A model's configuration with random weights, the layout, rows in micro-batches of at most `size`."""

    config: dict[str, Any]
    rows: int = 1
    tp: int = 1
    pp: int = 1
    size: int = 8
    padding: tuple[int, ...] | None = None
    new_tokens: int = 12
    dtype: str = "float32"


def shards_of(rank: int, run: Decoding) -> dict[str, Shard]:
    """The rank's shards of the random model by stack."""
    manifest = ModelManifest(identity="synthetic:tiny@7", source="synthetic", folder="", files={}, config=run.config)
    grid = Grid(1, run.tp, run.pp, rank)
    group = communicators(1, run.tp, run.pp, rank).tensor
    shards = read_shard(manifest, grid, group, getattr(torch, run.dtype), torch.device("cpu")).shards
    for shard in shards.values():
        shard.finalize()
    return dict(shards)


@torch.inference_mode()
def decode(rank: int, run: Decoding) -> dict[str, Any]:
    """Tokens of ordinary and recorded steps, whether their caches hold the same bits, and the sum of what they hold.

    Thrice in the same memory, with other prompts.
    """
    shards, pipeline = shards_of(rank, run), communicators(1, run.tp, run.pp, rank).pipeline
    found: dict[str, Any] = {"tokens": [], "same_bits": [], "sums": [], "paths": []}
    decoder, encoder = shards["decoder"], shards.get("encoder")
    replicas = [
        Replica(decoder, pipeline, run.size, run.rows, 8 + run.new_tokens, encoder, recorded)
        for recorded in (False, True)
    ]
    for replica in replicas:
        for cache in replica._caches:
            cache.store.zero_()  # rows that no micro-batch has are compared as well
    for seed, length in ((1, 7), (2, 6), (3, 8)):
        words = torch.randint(0, WORDS, (run.rows, length), generator=torch.Generator().manual_seed(seed))
        padding = None if run.padding is None else torch.tensor(run.padding)
        outcomes = [replica.decode(PromptBatch(words, padding), run.new_tokens) for replica in replicas]
        tokens = [torch.cat([decoded.tokens for decoded in outcome]) for outcome in outcomes]
        kept = [[cache.store[..., : cache.length, :] for cache in replica._caches] for replica in replicas]
        found["tokens"].append([each.tolist() for each in tokens])
        found["same_bits"].append(all(torch.equal(*stores) for stores in zip(*kept, strict=True)))
        found["sums"].append(sum(store.double().sum().item() for store in kept[0]))
        found["paths"].append([replica.decode_path for replica in replicas])
    return found


@torch.inference_mode()
def lose(rank: int, run: Decoding, steps: int) -> tuple[str, int, str] | None:
    """Rank 1 ends after so many steps; how the other decodes by then, whom it misses, and in what."""
    shard = shards_of(rank, run)["decoder"]
    cache = shard.new_cache(1, 200)
    for _ in range(steps):
        decode_step(shard, cache, torch.tensor([[3]]), None)
    if rank == 1:
        os._exit(0)
    path, until = path_of(cache), time.perf_counter() + 20
    try:
        while time.perf_counter() < until:
            cache.length = steps
            decode_step(shard, cache, torch.tensor([[3]]), None)
    except PeerLostError as error:
        return path, error.rank, str(error)
    return None


@torch.inference_mode()
def heard(rank: int, run: Decoding) -> tuple[int, int]:
    """How many operations a listener hears of in a step before which it came, and in one after it has gone."""
    shard, group = shards_of(rank, run)["decoder"], communicators(1, run.tp, run.pp, rank).tensor
    cache = shard.new_cache(1, 20)
    counts = []
    for step in range(9):
        events: list[str] = []
        group.listener = (lambda event, events=events: events.append(event.operation)) if step == 7 else None
        decode_step(shard, cache, torch.tensor([[3]]), None)
        counts.append(len(events))
    assert path_of(cache) == "recorded"
    return counts[7], counts[8]


@torch.inference_mode()
def serve_in_company(rank: int, run: Decoding, split_rows: int | None = None) -> dict[str, Any]:
    """Random steps of a server, recorded ones and ordinary ones, on two caches: what was trusted, and whether logits
    and caches have the same bits. split_rows: tokens from which ranks split the rows of a step among them.
    """
    least_elements = residual._LEAST_ELEMENTS
    if split_rows is not None:
        residual._LEAST_ELEMENTS = split_rows * run.config["hidden_size"]
    try:
        shard, pipeline = shards_of(rank, run)["decoder"], communicators(1, run.tp, run.pp, rank).pipeline
        sizes = PagedSizes(blocks=60, block=4, sequences=6, max_length=40, max_tokens=33)
        caches = [shard.new_paged_cache(sizes) for _ in range(2)]
        caches[1].scaled_recordings = {}
        runners = [StepRunner(shard, pipeline, cache) for cache in caches]
        runners[0].warm_up()
        for cache in caches:
            cache.store.zero_()
        counts, same = [], []
        for step in _random_steps(sizes, seed=5):
            found = [runner.run(step) for runner in runners]
            counts.append(len(step.tokens))
            logits = [one.logits for one in found if one is not None and one.logits is not None]
            if len(logits) == 2:
                same.append(torch.equal(*logits))
        recordings = caches[0].scaled_recordings or {}
        return {
            "trusted": {splits: one.is_trusted for splits, one in recordings.items()},
            "refusals": set().union(*(one.refusals for one in recordings.values())),
            "counts": set(counts),
            "same_logits": (len(same), all(same)),
            "same_cache": torch.equal(caches[0].store, caches[1].store),
        }
    finally:
        residual._LEAST_ELEMENTS = least_elements


def _random_steps(sizes: PagedSizes, seed: int) -> Iterator[TokenStep]:
    """Pieces of all sequences at random until each is full, logits of each piece's last token wanted."""
    chance = random.Random(seed)
    done = [0] * sizes.sequences
    blocks = list(range(sizes.blocks))
    chance.shuffle(blocks)
    while any(length < sizes.max_length for length in done):
        slots, positions, rows, assigned = [], [], [], []
        for slot in chance.sample(range(sizes.sequences), sizes.sequences):
            length = min(chance.choice([0, 0, 1, 1, 2, 9, 20]), sizes.max_length - done[slot])
            if not length or len(slots) + length > sizes.max_tokens:
                continue
            for position in range(done[slot], done[slot] + length):
                if position % sizes.block == 0:
                    assigned.append((slot, position // sizes.block, blocks.pop()))
                slots.append(slot)
                positions.append(position)
            rows.append(len(slots) - 1)
            done[slot] += length
        if slots:
            tokens = torch.tensor([chance.randrange(WORDS) for _ in slots], dtype=torch.int32)
            numbers = [torch.tensor(one, dtype=torch.int32) for one in (slots, positions, rows)]
            entries = torch.tensor(assigned, dtype=torch.int32).reshape(-1, 3).T
            yield TokenStep(tokens, *numbers, entries, torch.arange(len(rows), dtype=torch.int32))
