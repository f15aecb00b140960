"""One rank of the check `two-ranks`: both use the first device, and meet over gloo.

    python -m benchmarks.gpu.rank_program forward,oom FOLDER RANK [--rehearse]

Does the works in turn and leaves FOLDER/WORK-RANK.json of each. Works: forward, nccl, oom, hang.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.shapes import random_shard, training_model
from configs.common.base import write_atomically
from engine.inference.model import Shard
from engine.parallel.communicator import Communicator, open_communicators
from engine.parallel.grid import Grid
from engine.rank.failures import classify, one_line

RANKS = 2
NEW_TOKENS = 8
_HELD_BYTES = 2 << 30
_MEETING = timedelta(seconds=60)
"""Between the first rank and the last: beside other processes, importing torch takes one of them much longer."""
_FOREVER_CYCLES = 1 << 50
"""A GPU's clock would need a week for these."""


def shard_of_rank(bench: Bench, rank: int, group: Communicator, ranks: int = RANKS) -> Shard:
    """Return a tensor-parallel rank's shard, in float32 so that layouts can be compared by their tokens."""
    return random_shard(bench, training_model(bench), torch.float32, Grid(1, ranks, 1, rank), group)


@torch.inference_mode()
def greedy_tokens(bench: Bench, shard: Shard) -> list[int]:
    """Return greedy tokens, each from a prefill of all before: gloo's sums cannot be part of a CUDA graph."""
    generator = torch.Generator().manual_seed(5)
    known = torch.randint(0, shard.config.vocabulary, (1, 12), generator=generator).to(bench.device)
    cache = shard.new_cache(1, 12 + NEW_TOKENS)
    for _ in range(NEW_TOKENS):
        cache.clear()
        logits = shard.head(shard.forward(known, cache, last_only=True))
        known = torch.cat([known, shard.greedy(logits[:, -1])[:, None]], dim=1)
    return [int(token) for token in known[0, 12:]]


def _join(folder: Path, work: str, rank: int, backend: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet = f"file://{folder.absolute()}/{work}.meet"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=RANKS, timeout=_MEETING)


def _forward(bench: Bench, folder: Path, rank: int) -> dict[str, Any]:
    began = time.perf_counter()
    _join(folder, "forward", rank, "gloo")
    groups = open_communicators(Grid(1, RANKS, 1, rank), bench.device, "gloo", 30.0)
    dist.barrier()
    met = time.perf_counter() - began
    tokens = greedy_tokens(bench, shard_of_rank(bench, rank, groups.tensor))
    dist.barrier()
    began = time.perf_counter()
    groups.close()
    dist.destroy_process_group()
    closed = time.perf_counter() - began
    return {"tokens": tokens, "met": met, "closed": closed, "transport": groups.tensor.transport}


def _nccl(bench: Bench, folder: Path, rank: int) -> dict[str, Any]:
    """NCCL is to refuse the device that both ranks have; what it says is the result."""
    if not dist.is_nccl_available():
        return {"said": "a torch without NCCL"}
    _join(folder, "nccl", rank, "nccl")
    number = torch.ones(1, device=bench.device)
    dist.all_reduce(number)
    bench.clock.synchronise()
    return {"said": "", "sum": float(number)}


def _oom(bench: Bench, folder: Path, rank: int) -> dict[str, Any]:
    held = torch.empty(1 << 50, dtype=torch.uint8, device=bench.device)
    return {"said": f"{held.nbytes} bytes were given"}


def _hang(bench: Bench, folder: Path, rank: int) -> dict[str, Any]:
    held = torch.ones(_HELD_BYTES if bench.device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=bench.device)
    (folder / f"hang-{rank}.begun").touch()
    while bench.device.type != "cuda":
        time.sleep(3600)
    torch.cuda._sleep(_FOREVER_CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return {"said": f"came back with {held.nbytes} bytes"}


WORKS: dict[str, Callable[[Bench, Path, int], dict[str, Any]]] = {
    "forward": _forward,
    "nccl": _nccl,
    "oom": _oom,
    "hang": _hang,
}


def main() -> None:
    """Do the works; leave what each returned, or its error as the engine classifies it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("works")
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    bench = Bench(lambda figure: None, asked.rehearse, time.monotonic() + 600, asked.folder, asked.folder)
    for work in asked.works.split(","):
        try:
            found = WORKS[work](bench, asked.folder, asked.rank)
        except Exception as error:
            status, kind = classify(error, RANKS)
            found = {"status": str(status), "kind": kind, "said": one_line(error)}
        write_atomically(asked.folder / f"{work}-{asked.rank}.json", json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
